"""Kubernetes conditions as values: setting one returns a new list, and the clock is the caller's."""

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Literal

from pydantic import Field

from loraplane_core.resources.base import Report

ConditionStatus = Literal["True", "False", "Unknown"]
#: The API server's bound is larger; a longer text is no longer read in `kubectl describe`.
MESSAGE_MAX = 1024


class Condition(Report):
    type: str = Field(min_length=1, max_length=63)
    """What is judged, for example Ready."""
    status: ConditionStatus
    """True, False or Unknown."""
    reason: str = Field(pattern=r"^[A-Za-z]([A-Za-z0-9_]*[A-Za-z0-9])?$", max_length=128)
    """The stable reason, one of the documented enum."""
    message: str = Field(default="", max_length=32768)
    """The reason in words, for people."""
    last_transition_time: str = ""
    """RFC 3339 time of the last change of `status`."""
    observed_generation: int = 0
    """The metadata.generation that this was judged on."""


def timestamp(now: datetime) -> str:
    """RFC 3339 in UTC with whole seconds, as Kubernetes writes times."""
    return now.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def find_condition(conditions: Iterable[Condition], kind: str) -> Condition | None:
    return next((condition for condition in conditions if condition.type == kind), None)


def set_condition(
    conditions: Sequence[Condition],
    kind: str,
    status: ConditionStatus,
    reason: str,
    message: str = "",
    *,
    now: datetime,
    generation: int = 0,
) -> list[Condition]:
    """The conditions with this one replaced in place or appended.

    `last_transition_time` changes only when `status` does; an equal condition leaves the list equal, so that a
    status that did not change is not written.
    """
    before = find_condition(conditions, kind)
    moved = before is None or before.status != status or not before.last_transition_time
    condition = Condition(
        type=kind,
        status=status,
        reason=reason,
        message=message if len(message) <= MESSAGE_MAX else f"{message[: MESSAGE_MAX - 3]}...",
        last_transition_time=timestamp(now) if moved or before is None else before.last_transition_time,
        observed_generation=generation,
    )
    if before is None:
        return [*conditions, condition]
    return [condition if known is before else known for known in conditions]
