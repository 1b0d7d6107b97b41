"""`loraplane adapter` and `loraplane rollback`: versions of a tenant's adapters, by admin REST."""

from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

from loraplane_cli.admin import AdminClient, upload_folder
from loraplane_cli.output import REFUSED, TIMED_OUT, age, console, done, errors, leave, print_json, print_table, size
from loraplane_cli.session import DEFAULT_STATE, Json, StateDir, admin
from loraplane_core.errors import InvalidName
from loraplane_core.identity import AdapterRef, check_name
from loraplane_core.wire.registry import Activate, Adapter, RegisterVersion, Rollback, Source, Version

adapter = typer.Typer(no_args_is_help=True, help="Adapters and their versions, through the registry.")

WAIT_SECONDS = 60.0
IN_WORK = ("pending_base", "ingesting")

Name = Annotated[str, typer.Argument(metavar="TENANT/ADAPTER")]
Versioned = Annotated[str, typer.Argument(metavar="TENANT/ADAPTER@VERSION")]
Wait = Annotated[float, typer.Option(min=0, help="Seconds to wait for the checks; 0 does not wait.")]
Pool = Annotated[str | None, typer.Option(help="NAMESPACE/NAME; by default the adapter's, or the only one.")]
Base = Annotated[str | None, typer.Option("--base-model", help="Base it was trained for; by default the pool's.")]
WaitWarm = Annotated[
    Literal["warm"] | None, typer.Option("--wait", help="warm: keep what serves until the version is warm.")
]
Deadline = Annotated[float, typer.Option(min=1, max=300, help="Seconds that --wait waits; then nothing has changed.")]
Active = Annotated[bool, typer.Option("--activate/--no-activate", help="Serve it once it is validated.")]


@adapter.command("list")
def list_adapters(
    tenant: Annotated[str | None, typer.Argument(help="Only this tenant's.")] = None,
    state_dir: StateDir = DEFAULT_STATE,
    json: Json = False,
) -> None:
    """List adapters."""
    with admin(state_dir) as client:
        tenants = [check_name(tenant, "tenant")] if tenant else [each.name for each in client.tenants()]
        found = [each for name in tenants for each in client.adapters(name)]
    if json:
        print_json({"items": found})
        return
    rows = [
        [each.tenant, each.adapter, each.active_version or "", len(each.versions), each.pool, each.claim_ref]
        for each in found
    ]
    print_table(["TENANT", "ADAPTER", "ACTIVE", "VERSIONS", "POOL", "OBJECT"], rows)


@adapter.command("show")
def show(name: Name, state_dir: StateDir = DEFAULT_STATE, json: Json = False) -> None:
    """Show one adapter with its versions."""
    tenant, adapter_name = parse_name(name)
    with admin(state_dir) as client:
        found = client.adapter(tenant, adapter_name)
    if json:
        print_json(found)
        return
    rows = [
        [each.version, each.state, _share(each), each.rank or "", size(each.bytes),
         each.digest[:12], each.base_model, each.base_evidence, age(each.created_at), each.message or each.reason]
        for each in found.versions
    ]  # fmt: skip
    console.print(f"{found.tenant}/{found.adapter}  pool {found.pool or '-'}  object {found.claim_ref or '-'}")
    headings = ["VERSION", "STATE", "", "RANK", "SIZE", "DIGEST", "BASE", "EVIDENCE", "AGE", "MESSAGE"]
    print_table(headings, rows)


@adapter.command("register")
def register(
    *,
    name: Name,
    uri: Annotated[str, typer.Argument(help="file:PATH below the registry's adapter root")],
    pool: Pool = None,
    base_model: Base = None,
    digest: Annotated[str | None, typer.Option(help="Refuse other bytes than these.")] = None,
    activate: Active = True,
    wait: Wait = WAIT_SECONDS,
    state_dir: StateDir = DEFAULT_STATE,
    json: Json = False,
) -> None:
    """Register a version from a source that the registry can read."""
    tenant, adapter_name = parse_name(name)
    spec = RegisterVersion(source=Source(uri=uri, digest=digest), pool=pool, base_model=base_model, activate=activate)
    with admin(state_dir) as client:
        _told(_registered(client, tenant, adapter_name, spec, wait), json, waited=wait > 0)


@adapter.command("upload")
def upload(
    *,
    name: Name,
    folder: Annotated[Path, typer.Argument(help="Folder with adapter_config.json and adapter_model.safetensors")],
    pool: Pool = None,
    base_model: Base = None,
    activate: Active = True,
    wait: Wait = WAIT_SECONDS,
    state_dir: StateDir = DEFAULT_STATE,
    json: Json = False,
) -> None:
    """Upload an adapter from here and register it."""
    tenant, adapter_name = parse_name(name)
    with admin(state_dir) as client:
        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
        uri = ""
        with Progress(*columns, console=errors, transient=True, disable=json) as progress:
            task = progress.add_task("upload", total=None)
            for uri, sent, total in upload_folder(client, tenant, folder):
                progress.update(task, description=uri, completed=sent, total=total)
        spec = RegisterVersion(source=Source(uri=uri), pool=pool, base_model=base_model, activate=activate)
        _told(_registered(client, tenant, adapter_name, spec, wait), json, waited=wait > 0)


@adapter.command("activate")
def activate_version(
    ref: Versioned,
    *,
    expect_active: Annotated[int | None, typer.Option(help="Only if this version is active now.")] = None,
    wait: WaitWarm = None,
    deadline: Deadline = 30.0,
    state_dir: StateDir = DEFAULT_STATE,
    json: Json = False,
) -> None:
    """Make a validated version the one that serves."""
    wished = AdapterRef.parse(ref)
    with admin(state_dir) as client:
        spec = Activate(version=wished.version, expect_active=expect_active, wait=wait or "", deadline_s=deadline)
        _active(client.activate(wished.tenant, wished.adapter, spec), json)


@adapter.command("verify")
def verify(ref: Versioned, wait: Wait = WAIT_SECONDS, state_dir: StateDir = DEFAULT_STATE, json: Json = False) -> None:
    """Ingest a version that was inserted by hand: only then it may be served."""
    wished = AdapterRef.parse(ref)
    with admin(state_dir) as client, errors.status("checking", spinner="dots"):
        found = client.verify(*wished, wait)
    _told(found, json, waited=wait > 0)


@adapter.command("delete")
def delete_version(ref: Versioned, state_dir: StateDir = DEFAULT_STATE, json: Json = False) -> None:
    """Delete a version that is not active."""
    wished = AdapterRef.parse(ref)
    with admin(state_dir) as client:
        client.delete_version(*wished)
    done(f"{wished} deleted", {"deleted": str(wished)}, as_json=json)


def rollback(
    name: Name,
    *,
    to: Annotated[int | None, typer.Option(min=1, help="Version; by default the one that served before.")] = None,
    wait: WaitWarm = None,
    deadline: Deadline = 30.0,
    state_dir: StateDir = DEFAULT_STATE,
    json: Json = False,
) -> None:
    """Go back to an earlier version in one call."""
    tenant, adapter_name = parse_name(name)
    with admin(state_dir) as client:
        _active(client.rollback(tenant, adapter_name, Rollback(version=to, wait=wait or "", deadline_s=deadline)), json)


def parse_name(text: str) -> tuple[str, str]:
    """`tenant/adapter` taken apart; raises InvalidName."""
    tenant, slash, name = text.partition("/")
    if not slash:
        raise InvalidName("an adapter reads TENANT/ADAPTER")
    return check_name(tenant, "tenant"), check_name(name, "adapter")


def _registered(client: AdminClient, tenant: str, name: str, spec: RegisterVersion, wait: float) -> Version:
    with errors.status("registering and checking", spinner="dots"):
        return client.register(tenant, name, spec, wait)


def _share(version: Version) -> str:
    """What of the requests it gets; "" for none."""
    if not version.is_active:
        return ""
    return f"{version.weight}%" if 0 < version.weight < 100 else "active"


def _told(found: Version, as_json: bool, *, waited: bool) -> None:
    """Show a version; a rejected one, or one still in work after waiting, is no success."""
    text = f"{found.tenant}/{found.adapter}@{found.version} {found.state}"
    text += f" ({found.reason}: {found.message})" if found.reason else ""
    text += ", active" if found.is_active else ""
    done(text, found, as_json=as_json)
    leave(REFUSED if found.state == "rejected" else TIMED_OUT if waited and found.state in IN_WORK else 0)


def _active(found: Adapter, as_json: bool) -> None:
    done(f"{found.tenant}/{found.adapter}@{found.active_version} serves", found, as_json=as_json)
