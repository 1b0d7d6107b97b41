"""`loraplane get`, `events`, `logs`: what is, without asking anybody but the state folder (tenants: the registry)."""

import json as jsonlib
import time
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from loraplane_cli.errors import LocalError
from loraplane_cli.objects import KINDS, Object, adapter_row, condition, pool_row, read_objects, reference
from loraplane_cli.output import age, console, print_json, print_table, print_yaml
from loraplane_cli.session import DEFAULT_STATE, Json, StateDir, admin, tell_if_stopped
from loraplane_cli.supervisor.layout import StateFolder
from loraplane_cli.supervisor.spec import tail
from loraplane_core.errors import NotFound
from loraplane_core.identity import check_name
from loraplane_core.labels import ADAPTER_KIND, POOL_KIND

FOLLOW_SECONDS = 0.2


class Form(StrEnum):
    TABLE = "table"
    WIDE = "wide"
    JSON = "json"
    YAML = "yaml"


HEADINGS = {
    ADAPTER_KIND: ["NAME", "TENANT", "BASE", "VERSION", "READY", "RESIDENT", "RANK", "REASON", "AGE"],
    POOL_KIND: [
        "NAME", "BASE", "REPLICAS", "READY", "SLOTS", "ADAPTERS", "RESIDENT", "AVAILABLE", "REASON", "AGE",
    ],
}  # fmt: skip
WIDE = {
    ADAPTER_KIND: ["NAMESPACE", "POOL", "DIGEST", "WHERE", "MESSAGE"],
    POOL_KIND: ["NAMESPACE", "KV LOST", "MESSAGE"],
}

Namespace = Annotated[str | None, typer.Option("-n", "--namespace", help="Only this namespace.")]


def get(
    *,
    what: Annotated[str, typer.Argument(help="pools, adapters or tenants (also: bmp, lora)")] = "adapters",
    name: Annotated[str | None, typer.Argument(help="Only this one.")] = None,
    namespace: Namespace = None,
    output: Annotated[Form, typer.Option("-o", "--output", help="Form of the answer.")] = Form.TABLE,
    state_dir: StateDir = DEFAULT_STATE,
    json: Json = False,
) -> None:
    """Show objects and their status (tenants: on Kubernetes, too)."""
    form = Form.JSON if json else output
    for text, param in ((name, "name"), (namespace, "namespace")):
        if text is not None:
            check_name(text, param)
    if what in ("tenant", "tenants"):
        _tenants(state_dir, name, form)
        return
    kind = KINDS.get(what.lower())
    if kind is None:
        raise LocalError(f"there is no kind {what!r}; ask for pools, adapters or tenants")
    state = StateFolder.of(state_dir)
    found = list(read_objects(state.objects, kind, namespace, name))
    tell_if_stopped(state)
    if name is not None and not found:
        raise NotFound(f"there is no {kind} {name}" + (f" in {namespace}" if namespace else ""))
    if form in (Form.JSON, Form.YAML):
        value: Any = found[0] if name is not None and len(found) == 1 else {"items": found}
        (print_json if form is Form.JSON else print_yaml)(value)
        return
    if not found:
        console.print(f"no {kind} yet")
        return
    _print_objects(kind, found, wide=form is Form.WIDE)


def _print_objects(kind: str, found: list[Object], *, wide: bool) -> None:
    cells = adapter_row if kind == ADAPTER_KIND else pool_row
    rows = []
    for each in found:
        *values, created = cells(each)
        rows.append([*values, age(str(created)), *(_wide(kind, each) if wide else [])])
    print_table([*HEADINGS[kind], *(WIDE[kind] if wide else [])], rows)


def _wide(kind: str, found: Object) -> list[object]:
    spec, status = found.get("spec") or {}, found.get("status") or {}
    namespace = reference(found)[0]
    if kind == POOL_KIND:
        lost = (status.get("capacity") or {}).get("kvTokensDisplaced")
        return [namespace, lost, condition(found, "Available").get("message")]
    where = ", ".join(f"{row['name'].rpartition('/')[2]}:{row['residency']}" for row in status.get("replicas") or [])
    digest = str(status.get("digest") or "")[:12]
    return [namespace, (spec.get("poolRef") or {}).get("name"), digest, where, condition(found, "Ready").get("message")]


def _tenants(state_dir: Path, name: str | None, form: Form) -> None:
    with admin(state_dir) as client:
        tenants = [tenant for tenant in client.tenants() if name in (None, tenant.name)]
    if name is not None and not tenants:
        raise NotFound(f"there is no tenant {name}")
    if form in (Form.JSON, Form.YAML):
        (print_json if form is Form.JSON else print_yaml)({"items": tenants})
        return
    rows = [[tenant.name, ", ".join(tenant.namespaces), age(tenant.created_at)] for tenant in tenants]
    print_table(["NAME", "NAMESPACES", "AGE"], rows)


def events(
    name: Annotated[str | None, typer.Argument(help="Only events of the object of this name.")] = None,
    namespace: Namespace = None,
    limit: Annotated[int, typer.Option(min=1, help="The newest so many.")] = 50,
    state_dir: StateDir = DEFAULT_STATE,
    json: Json = False,
) -> None:
    """Show what happened to objects, the newest at the end."""
    found = []
    path = StateFolder.of(state_dir).events
    for line in path.read_text().splitlines() if path.exists() else []:
        event = jsonlib.loads(line)
        about = event["object"]
        if name in (None, about["name"]) and namespace in (None, about["namespace"]):
            found.append(event)
    found = found[-limit:]
    if json:
        print_json({"items": found})
        return
    rows = [
        [
            age(event["time"]), event["type"], event["reason"],
            f"{event['object']['kind']}/{event['object']['name']}", event["message"],
        ]
        for event in found
    ]  # fmt: skip
    print_table(["LAST SEEN", "TYPE", "REASON", "OBJECT", "MESSAGE"], rows)


def logs(
    name: Annotated[str | None, typer.Argument(help="Process; without one, the names are listed.")] = None,
    lines: Annotated[int, typer.Option("-n", "--lines", min=1, help="The last so many lines.")] = 50,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Go on as the log grows.")] = False,
    state_dir: StateDir = DEFAULT_STATE,
    json: Json = False,
) -> None:
    """Show the log of a process of this machine."""
    state = StateFolder.of(state_dir)
    names = sorted(path.stem for path in state.logs.glob("*.log"))
    if name is None:
        if json:
            print_json({"items": [{"name": each, "path": str(state.log(each))} for each in names]})
        else:
            console.print("\n".join(names) or "no logs yet", markup=False)
        return
    if name not in names:
        raise NotFound(f"there is no log {name!r}; there are: {', '.join(names) or 'none'}")
    text = tail(state.log(name), lines)
    if json:
        print_json({"name": name, "lines": text.splitlines()})
        return
    console.out(text, highlight=False)
    if follow:
        _follow(state.log(name))


def _follow(path: Path) -> None:
    """Until interrupted. A log that was moved aside is followed from its new beginning."""
    position = path.stat().st_size
    while True:
        time.sleep(FOLLOW_SECONDS)
        now = path.stat().st_size if path.exists() else 0
        position = 0 if now < position else position
        if now > position:
            with path.open("rb") as stream:
                stream.seek(position)
                console.out(stream.read(now - position).decode(errors="replace"), end="", highlight=False)
            position = now
