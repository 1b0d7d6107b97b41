"""Events told by the difference of two statuses, so that one is emitted once per change and not per pass."""

from collections.abc import Mapping
from typing import Any, Literal

from loraplane_core.resources.reasons import Reason
from loraplane_operator.actions import Note
from loraplane_operator.plan.conditions import raw_conditions
from loraplane_operator.plan.status import residency_class
from loraplane_operator.words import AdapterObject


def notes(obj: AdapterObject, status: Mapping[str, Any]) -> tuple[Note, ...]:
    told: list[Note] = []
    meta = obj.meta
    ready = raw_conditions(status).get("Ready")
    before = raw_conditions(obj.status).get("Ready")
    if ready is not None and (
        before is None or (before["status"], before["reason"]) != (ready["status"], ready["reason"])
    ):
        waiting = ready["reason"] in (Reason.PENDING, Reason.PROGRESSING, Reason.LOADING, Reason.INGESTING)
        kind: Literal["Normal", "Warning"] = "Normal" if ready["status"] == "True" or waiting else "Warning"
        told.append(Note(meta.ref, meta.uid, kind, ready["reason"], ready["message"]))
    for name in _lost(obj.status, status):
        message = f"{name} no longer holds version {status.get('activeVersion')}; warming it again"
        told.append(Note(meta.ref, meta.uid, "Warning", Reason.DRIFTED, message))
    return tuple(told)


def _truth(condition: Mapping[str, Any] | None) -> object:
    return condition and (condition["status"], condition["reason"])


def _lost(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Replicas that held the same version before and do not now."""
    if before.get("activeVersion") != after.get("activeVersion"):
        return []
    was = {row["name"] for row in before.get("replicas") or [] if residency_class(row.get("residency")) == "resident"}
    now = {row["name"] for row in after.get("replicas") or [] if residency_class(row.get("residency")) != "resident"}
    return sorted(was & now)
