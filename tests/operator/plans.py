"""What tests ask of a plan."""

from dataclasses import replace
from typing import Any

from loraplane_core import placement
from loraplane_operator.actions import (
    Action,
    SetStatus,
)
from loraplane_operator.plan import plan
from loraplane_operator.words import Failure, World
from tests.operator.worlds import (
    NOW,
    entry,
    pool,
    registry,
    version,
    world,
)

HOME = placement.order("acme", "pirate", pool().replica_ids)[0]


def of(kind: type[Action], seen: World) -> list[Any]:
    return [action for action in plan(seen).actions if isinstance(action, kind)]


def status(seen: World, kind: str = "LoRAAdapter") -> dict[str, Any]:
    found = [dict(action.status) for action in of(SetStatus, seen) if action.ref.kind == kind]
    assert found, "no status is written"
    return found[0]


def condition(seen: World, type_: str, kind: str = "LoRAAdapter") -> tuple[str, str]:
    found = {each["type"]: (each["status"], each["reason"]) for each in status(seen, kind)["conditions"]}
    return found[type_]


def unclaimed(**changes: Any) -> World:
    return world(registry=registry(), **changes)


def failed(seen: World, kind: type[Action], code: str) -> World:
    failures = {action: Failure(code, "no", 1, NOW + 5) for action in of(kind, seen)}
    assert failures
    return replace(seen, memory=replace(seen.memory, failures=failures))


def told(seen: World) -> World:
    """With the statuses that the plan writes."""
    written = {action.ref: action.status for action in plan(seen).actions if isinstance(action, SetStatus)}
    objects = tuple(replace(obj, status=written.get(obj.meta.ref, obj.status)) for obj in seen.adapters)
    pools = {ref: replace(each, status=written.get(each.meta.ref, each.status)) for ref, each in seen.pools.items()}
    return replace(seen, adapters=objects, pools=pools)


def with_version(number: int = 1, **changes: Any) -> World:
    seen = version(number=number, **changes)
    return world(registry=registry(entry("pirate", seen, active_version=0)))
