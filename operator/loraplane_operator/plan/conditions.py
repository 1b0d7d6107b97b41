"""Verdicts of a plan, and their rendering into an object's conditions."""

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any, NamedTuple

from loraplane_core.resources.conditions import MESSAGE_MAX, ConditionStatus

_WHOLE = {"type", "status", "reason", "message"}


class Verdict(NamedTuple):
    """What one condition says now. `reason` is of core.resources.reasons, or another component's code in CamelCase."""

    type: str
    status: ConditionStatus
    reason: str
    message: str = ""

    @property
    def holds(self) -> bool:
        return self.status == "True"


def raw_conditions(status: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Condition objects of a status by type. One of which somebody else has written a part is read as missing, and
    so written anew: what is left of it, as ours, tells nothing."""
    return {raw["type"]: raw for raw in status.get("conditions") or [] if raw.keys() >= _WHOLE}


def render(
    verdicts: Iterable[Verdict], previous: Mapping[str, Any], generation: int, now: float
) -> list[dict[str, Any]]:
    """Conditions in the order of the verdicts; lastTransitionTime moves when, and only when, a truth changes."""
    before = raw_conditions(previous)
    return [_rendered(verdict, before.get(verdict.type), generation, now) for verdict in verdicts]


def _rendered(verdict: Verdict, before: Mapping[str, Any] | None, generation: int, now: float) -> dict[str, Any]:
    if before is not None and _told(before) == (*verdict[1:], generation) and before.get("lastTransitionTime"):
        return dict(before)  # the usual case, and with many objects the one that counts
    message = verdict.message if len(verdict.message) <= MESSAGE_MAX else f"{verdict.message[: MESSAGE_MAX - 3]}..."
    since = before.get("lastTransitionTime") if before is not None and before.get("status") == verdict.status else ""
    return {
        "type": verdict.type,
        "status": verdict.status,
        "reason": verdict.reason,
        "message": message,
        "lastTransitionTime": since or rfc3339(now),
        "observedGeneration": generation,
    }


def _told(raw: Mapping[str, Any]) -> tuple[object, ...]:
    return raw.get("status"), raw.get("reason"), raw.get("message"), raw.get("observedGeneration")


def rfc3339(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def from_rfc3339(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()
