"""Conditions change their time only when their status changes."""

from typing import Any

from loraplane_core.resources.conditions import MESSAGE_MAX, Condition
from loraplane_core.resources.reasons import Reason
from loraplane_operator.plan.conditions import Verdict, render, rfc3339

T0, T1 = 1_796_040_000.5, 1_796_040_060.5
WAITING = Verdict("Ready", "False", Reason.PENDING, "waiting")


def rendered(verdict: Verdict, before: list[dict[str, Any]] | None = None, now: float = T0) -> dict[str, Any]:
    (condition,) = render([verdict], {"conditions": before or []}, 2, now)
    return condition


def test_a_new_condition_has_the_time_of_now_and_is_one_that_the_crd_takes() -> None:
    found = rendered(WAITING)
    assert found == {
        "type": "Ready",
        "status": "False",
        "reason": "Pending",
        "message": "waiting",
        "lastTransitionTime": "2026-11-30T12:00:00Z",
        "observedGeneration": 2,
    }
    assert Condition.model_validate(found).to_wire() == found


def test_another_reason_keeps_the_time_and_another_status_moves_it() -> None:
    first = rendered(WAITING)
    second = rendered(WAITING._replace(reason=Reason.LOADING), [first], T1)
    assert (second["reason"], second["lastTransitionTime"]) == ("Loading", rfc3339(T0))
    third = rendered(Verdict("Ready", "True", Reason.READY), [second], T1)
    assert (third["reason"], third["lastTransitionTime"]) == ("Ready", rfc3339(T1))


def test_a_condition_without_a_time_gets_one() -> None:
    first = rendered(WAITING) | {"lastTransitionTime": ""}
    assert rendered(WAITING._replace(message="still"), [first], T1)["lastTransitionTime"] == rfc3339(T1)


def test_rendering_the_same_again_changes_nothing() -> None:
    first = render([WAITING, Verdict("Placed", "Unknown", Reason.PENDING)], {}, 1, T0)
    again = render([WAITING, Verdict("Placed", "Unknown", Reason.PENDING)], {"conditions": first}, 1, T1)
    assert again == first
    assert [each["type"] for each in again] == ["Ready", "Placed"]


def test_a_long_message_is_cut_and_does_not_make_a_change_of_each_pass() -> None:
    long = WAITING._replace(message="x" * 5000)
    first = rendered(long)
    assert len(first["message"]) == MESSAGE_MAX
    assert first["message"].endswith("...")
    assert rendered(long, [first], T1) == first
