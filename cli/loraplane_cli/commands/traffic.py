"""`loraplane traffic`: how the requests of an adapter are shared out among its versions, by admin REST."""

from typing import Annotated

import typer

from loraplane_cli.commands.adapters import Name, parse_name
from loraplane_cli.output import done, print_json, print_table
from loraplane_cli.session import DEFAULT_STATE, Json, StateDir, admin
from loraplane_core.errors import InvalidParameter
from loraplane_core.wire.registry import Adapter, SetTraffic, Share

Shares = Annotated[
    list[str] | None,
    typer.Argument(metavar="[VERSION=PERCENT]...", help="All shares at once; versions not named get none."),
]


def traffic(
    name: Name,
    shares: Shares = None,
    expect: Annotated[
        list[str] | None, typer.Option(metavar="VERSION=PERCENT", help="Only if these are the shares now; repeatable.")
    ] = None,
    state_dir: StateDir = DEFAULT_STATE,
    json: Json = False,
) -> None:
    """Show how requests are shared out, or share them out anew: `traffic acme/pirate 3=90 4=10`."""
    tenant, adapter = parse_name(name)
    wanted, before = ([_share(text) for text in texts] if texts else None for texts in (shares, expect))
    with admin(state_dir) as client:
        if wanted is None:
            _show(client.adapter(tenant, adapter), json)
            return
        found = client.set_traffic(tenant, adapter, SetTraffic(shares=wanted, expect=before))
    told = ", ".join(f"@{each.version} {each.weight}%" for each in found.versions if each.weight)
    done(f"{found.tenant}/{found.adapter}: {told}", found, as_json=json)


def _share(text: str) -> Share:
    version, _, weight = text.partition("=")
    if not all(part.isascii() and part.isdigit() and len(part) < 10 for part in (version, weight)):
        raise InvalidParameter(f"a share reads VERSION=PERCENT, not {text!r}", param="shares")
    return Share(version=int(version), weight=int(weight))


def _show(found: Adapter, as_json: bool) -> None:
    if as_json:
        print_json(found)
        return
    rows = [[each.version, f"{each.weight}%", each.digest[:12]] for each in found.versions if each.weight]
    print_table(["VERSION", "SHARE", "DIGEST"], rows)
