"""One status write per object and pass, and only for what is worth one (design §5)."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from loraplane_core.resources.reasons import Reason
from loraplane_core.wire.engine import WARM
from loraplane_operator.actions import Action, Note, SetStatus
from loraplane_operator.plan.conditions import raw_conditions
from loraplane_operator.words import Meta, Residue, Wait, World

#: Numbers that move all the time reach a status at most this often; truth is /state.
VOLATILE_SECONDS = 30.0
_VOLATILE = frozenset({"capacity", "adapters"})
#: Ready's reasons while work is under way, and those for a silence that may be only ours: after a start, the streams
#: of engines and registry are not there yet.
_UNDER_WAY = frozenset({Reason.PENDING, Reason.PROGRESSING, Reason.INGESTING, Reason.NOT_WARM, Reason.LOADING})
_SILENT = frozenset({Reason.REPLICA_NOT_READY, Reason.REGISTRY_UNAVAILABLE})


@dataclass(frozen=True)
class ObjectPlan:
    actions: list[Action] = field(default_factory=list)
    due_at: float | None = None
    residues: frozenset[Residue] = frozenset()  # whose age shall be kept
    waits: frozenset[Wait] = frozenset()  # likewise


def status_action(
    world: World, meta: Meta, previous: Mapping[str, Any], status: Mapping[str, Any], notes: tuple[Note, ...] = ()
) -> tuple[list[Action], float | None]:
    """(the write, when a held-back one is due)."""
    if dict(previous) == dict(status):
        return [], None
    write = SetStatus(meta.ref, meta.uid, status, notes, passing(previous, status), why="status changed")
    if significant(previous) != significant(status):
        return [write], None
    due = world.memory.status_written.get(meta.uid, 0.0) + VOLATILE_SECONDS
    return ([write], None) if due <= world.now else ([], due)


def passing(previous: Mapping[str, Any], status: Mapping[str, Any]) -> bool:
    """Whether it tells only what most likely is over in a moment."""
    return under_way(previous, status) or _ready(status).get("reason") in _SILENT


def under_way(previous: Mapping[str, Any], status: Mapping[str, Any]) -> bool:
    """Whether it tells work on the way to Ready. That Ready is taken away is something else."""
    return _ready(status).get("reason") in _UNDER_WAY and _ready(previous).get("status") != "True"


def _ready(status: Mapping[str, Any]) -> Mapping[str, Any]:
    return raw_conditions(status).get("Ready", {})


def significant(status: Mapping[str, Any]) -> dict[str, Any]:
    """The part whose change is written at once: everything but volatile numbers, residency by class only."""
    kept = {key: value for key, value in status.items() if key not in _VOLATILE}
    kept["replicas"] = _classes(status.get("replicas"))
    return kept


def _classes(replicas: object) -> object:
    if not isinstance(replicas, list):
        return replicas
    return [(row.get("name"), residency_class(row.get("residency")), row.get("message")) for row in replicas]


def residency_class(residency: object) -> str:
    """resident, loading or absent: what a warm replica is, as far as a status write goes."""
    if residency in WARM:
        return "resident"
    return "loading" if residency == "loading" else "absent"
