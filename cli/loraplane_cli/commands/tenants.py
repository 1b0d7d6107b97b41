"""`loraplane tenant` and `loraplane key`: the platform's side of the registry."""

from enum import StrEnum
from typing import Annotated

import typer

from loraplane_cli.output import age, console, done, print_json, print_table
from loraplane_cli.session import DEFAULT_STATE, Json, StateDir, admin
from loraplane_core.identity import check_name
from loraplane_core.wire.registry import KeyScope, KeySpec, TenantSpec

tenant = typer.Typer(no_args_is_help=True, help="Tenants.")
key = typer.Typer(no_args_is_help=True, help="A tenant's API keys.")


class Scope(StrEnum):
    INFERENCE = "inference"
    ADMIN = "admin"


Name = Annotated[str, typer.Argument(metavar="TENANT")]


@tenant.command("create")
def create_tenant(
    name: Name,
    namespace: Annotated[
        list[str] | None,
        typer.Option("-n", "--namespace", help="Namespace whose objects may serve it; repeat it: these and no others."),
    ] = None,
    state_dir: StateDir = DEFAULT_STATE,
    json: Json = False,
) -> None:
    """Create a tenant, or give an existing one these namespaces in place of those that it has."""
    check_name(name, "name")
    with admin(state_dir) as client:
        made = client.put_tenant(TenantSpec(name=name, namespaces=namespace or []))
    done(f"tenant {made.name} (namespaces: {', '.join(made.namespaces) or 'none'})", made, as_json=json)


@tenant.command("list")
def list_tenants(state_dir: StateDir = DEFAULT_STATE, json: Json = False) -> None:
    """List tenants."""
    with admin(state_dir) as client:
        found = client.tenants()
    if json:
        print_json({"items": found})
        return
    rows = [[each.name, ", ".join(each.namespaces), age(each.created_at)] for each in found]
    print_table(["NAME", "NAMESPACES", "AGE"], rows)


@tenant.command("delete")
def delete_tenant(name: Name, state_dir: StateDir = DEFAULT_STATE, json: Json = False) -> None:
    """Delete a tenant of which nothing is claimed or active; its keys go with it."""
    check_name(name, "name")
    with admin(state_dir) as client:
        client.delete_tenant(name)
    done(f"tenant {name} deleted", {"deleted": name}, as_json=json)


@key.command("create")
def create_key(
    *,
    tenant_name: Name,
    label: Annotated[str, typer.Option("--name", help="What the key is for.")] = "",
    scope: Annotated[list[Scope] | None, typer.Option(help="May be repeated.")] = None,
    expires_at: Annotated[str | None, typer.Option(help="RFC 3339 time.")] = None,
    state_dir: StateDir = DEFAULT_STATE,
    json: Json = False,
) -> None:
    """Create a key. Its secret is shown once, now."""
    check_name(tenant_name, "tenant")
    scopes: list[KeyScope] = [each.value for each in scope or [Scope.INFERENCE]]
    with admin(state_dir) as client:
        made = client.create_key(tenant_name, KeySpec(name=label, scopes=scopes, expires_at=expires_at))
    if json:
        print_json(made)
    else:
        console.print(made.secret, markup=False)


@key.command("list")
def list_keys(tenant_name: Name, state_dir: StateDir = DEFAULT_STATE, json: Json = False) -> None:
    """List a tenant's keys, without their secrets."""
    check_name(tenant_name, "tenant")
    with admin(state_dir) as client:
        found = client.keys(tenant_name)
    if json:
        print_json({"items": found})
        return
    rows = [
        [each.id, each.name, ",".join(each.scopes), "revoked" if each.revoked_at else "live", each.expires_at or "",
         age(each.created_at)]
        for each in found
    ]  # fmt: skip
    print_table(["ID", "NAME", "SCOPES", "STATE", "EXPIRES", "AGE"], rows)


@key.command("revoke")
def revoke_key(
    tenant_name: Name,
    key_id: Annotated[str, typer.Argument(metavar="ID")],
    state_dir: StateDir = DEFAULT_STATE,
    json: Json = False,
) -> None:
    """Revoke a key; every gateway refuses it within a second."""
    check_name(tenant_name, "tenant")
    with admin(state_dir) as client:
        client.revoke_key(tenant_name, key_id)
    done(f"key {key_id} revoked", {"revoked": key_id}, as_json=json)
