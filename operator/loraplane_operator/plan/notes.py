"""Events told by the difference of two statuses, so that one is emitted once per change and not per pass."""

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from loraplane_core.identity import ReplicaId
from loraplane_core.resources.reasons import Reason
from loraplane_operator.actions import Note
from loraplane_operator.plan.conditions import raw_conditions
from loraplane_operator.plan.readiness import DROPPED, RESTARTED, UNANSWERED
from loraplane_operator.plan.status import residency_class, under_way
from loraplane_operator.plan.wishes import Wish
from loraplane_operator.words import AdapterObject, World

_WAITING = (Reason.PENDING, Reason.PROGRESSING, Reason.LOADING, Reason.INGESTING)
#: What a replica's message says has happened, as the Event of the recovery words it.
_HAPPENED = {
    RESTARTED: "its engine had restarted and lost it",
    DROPPED: "its engine had dropped it",
    UNANSWERED: "it had not answered",
}


def notes(world: World, obj: AdapterObject, wish: Wish | None, status: Mapping[str, Any]) -> tuple[Note, ...]:
    told = [*_ready(obj, status)]
    if wish is not None and obj.status.get("activeVersion") == status.get("activeVersion"):
        told += _drift(world, obj, wish, status)
    return tuple(told)


def _ready(obj: AdapterObject, status: Mapping[str, Any]) -> Iterator[Note]:
    ready = raw_conditions(status)["Ready"]
    before = raw_conditions(obj.status).get("Ready")
    if before is not None and (before["status"], before["reason"]) == (ready["status"], ready["reason"]):
        return
    if ready["reason"] == Reason.DRIFTED or under_way(obj.status, status):
        return  # told by replica; and what is under way is told by its end
    normal = ready["status"] == "True" or ready["reason"] in _WAITING
    kind: Literal["Normal", "Warning"] = "Normal" if normal else "Warning"
    yield Note(obj.meta.ref, obj.meta.uid, kind, ready["reason"], ready["message"])


def _drift(world: World, obj: AdapterObject, wish: Wish, status: Mapping[str, Any]) -> Iterator[Note]:
    """Which replica lost what it should hold, why, and how long it took until it held it again."""
    meta = obj.meta
    before = {row["name"]: row for row in obj.status.get("replicas") or []}
    for row in status["replicas"]:
        was = before.get(row["name"])
        if was is None:
            continue
        resident, was_resident = (residency_class(each.get("residency")) == "resident" for each in (row, was))
        message = _unversioned(row["message"])
        if not resident and message in (RESTARTED, DROPPED) and row["message"] != was.get("message"):
            told = f"{row['name']}: {row['message']}"
            yield Note(meta.ref, meta.uid, "Warning", Reason.DRIFTED, told)
        elif not resident and was_resident and not row["message"]:
            told = f"{row['name']} no longer holds it; it is being loaded again"
            yield Note(meta.ref, meta.uid, "Warning", Reason.DRIFTED, told)
        elif resident and not was_resident:
            yield from _healed(world, obj, wish, row["name"], _unversioned(was.get("message") or ""))


def _unversioned(message: str) -> str:
    """A row of several versions begins with the one it is about."""
    return message.partition(": ")[2] if message.startswith("version ") else message


def _healed(world: World, obj: AdapterObject, wish: Wish, name: str, was: str) -> Iterator[Note]:
    replica = ReplicaId.parse(name)
    since = [world.memory.lost_since.get((replica, target.id)) for target in wish.weighted]
    known = [at for at in since if at is not None]
    if known:
        seconds = max(0.0, world.now - min(known))
        why = _HAPPENED.get(was, "it had lost it")
        told = f"{name} holds it again after {seconds:.1f} s: {why}"
        yield Note(obj.meta.ref, obj.meta.uid, "Normal", Reason.HEALED, told)
