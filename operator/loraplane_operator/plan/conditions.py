"""Verdicts of a plan, and their rendering into an object's conditions."""

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any, NamedTuple

from loraplane_core.resources.conditions import Condition, ConditionStatus, set_condition


class Verdict(NamedTuple):
    """What one condition says now. `reason` is of core.resources.reasons, or another component's code in CamelCase."""

    type: str
    status: ConditionStatus
    reason: str
    message: str = ""

    @property
    def holds(self) -> bool:
        return self.status == "True"


def conditions_of(status: Mapping[str, Any]) -> list[Condition]:
    return [Condition.model_validate(raw) for raw in status.get("conditions") or []]


def render(
    verdicts: Iterable[Verdict], previous: Mapping[str, Any], generation: int, now: float
) -> list[dict[str, Any]]:
    """Conditions in the order of the verdicts; lastTransitionTime moves when, and only when, a truth changes."""
    moment = datetime.fromtimestamp(now, UTC)
    before = {condition.type: condition for condition in conditions_of(previous)}
    rendered: list[Condition] = []
    for verdict in verdicts:
        known = [before[verdict.type]] if verdict.type in before else []
        rendered += set_condition(known, *verdict, now=moment, generation=generation)
    return [condition.to_wire() for condition in rendered]


def rfc3339(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def from_rfc3339(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()
