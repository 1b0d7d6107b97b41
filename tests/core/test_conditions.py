"""Conditions change their time only when their status changes."""

from datetime import UTC, datetime, timedelta, timezone

from loraplane_core import errors
from loraplane_core.resources.conditions import (
    MESSAGE_MAX,
    Condition,
    find_condition,
    set_condition,
    timestamp,
)
from loraplane_core.resources.reasons import Reason

T0 = datetime(2026, 11, 30, 12, 0, 0, 500_000, tzinfo=UTC)
T1 = T0 + timedelta(minutes=1)


def test_a_new_condition_is_appended_with_the_time_of_now() -> None:
    found = set_condition([], "Ready", "False", Reason.PENDING, "waiting", now=T0, generation=2)
    assert found == [
        Condition(
            type="Ready",
            status="False",
            reason="Pending",
            message="waiting",
            last_transition_time="2026-11-30T12:00:00Z",
            observed_generation=2,
        )
    ]


def test_another_reason_keeps_the_time_and_another_status_moves_it() -> None:
    first = set_condition([], "Ready", "False", Reason.PENDING, now=T0)
    second = set_condition(first, "Ready", "False", Reason.LOADING, now=T1)
    assert second[0].reason == "Loading"
    assert second[0].last_transition_time == timestamp(T0)
    third = set_condition(second, "Ready", "True", Reason.READY, now=T1)
    assert third[0].last_transition_time == timestamp(T1)
    assert first[0].reason == "Pending"  # values, not places


def test_setting_the_same_again_changes_nothing_and_order_is_kept() -> None:
    found = set_condition([], "Claimed", "True", Reason.CLAIMED, now=T0)
    found = set_condition(found, "Ready", "Unknown", Reason.PENDING, now=T0)
    assert set_condition(found, "Claimed", "True", Reason.CLAIMED, now=T1) == found
    assert find_condition(found, "Ready") == found[1]
    assert find_condition(found, "Placed") is None


def test_a_long_message_is_cut() -> None:
    (found,) = set_condition([], "Ready", "False", Reason.LOAD_FAILED, "x" * 5000, now=T0)
    assert len(found.message) == MESSAGE_MAX
    assert found.message.endswith("...")


def test_times_are_utc_whatever_the_callers_zone() -> None:
    assert timestamp(T0.astimezone(timezone(timedelta(hours=5)))) == "2026-11-30T12:00:00Z"


# --- reasons ---

#: Codes that answer a request and never describe an object.
_REQUEST_ONLY = {
    "activation_owned", "body_too_large", "conflict", "context_length_exceeded", "forbidden", "invalid_api_key",
    "invalid_json", "invalid_name", "invalid_parameter", "invalid_request", "managed_by_object", "missing_reference",
    "model_not_found",
    "not_found", "rate_limit_exceeded",
}  # fmt: skip


def test_every_code_that_can_describe_an_object_is_a_documented_reason() -> None:
    codes = {kind.code for kind in errors.tree()} - _REQUEST_ONLY
    assert {errors.reason_of(code) for code in codes} <= set(Reason)


def test_every_rule_of_preflight_is_a_documented_reason() -> None:
    import re
    from pathlib import Path

    import loraplane_core.artifact as package

    sources = "".join(path.read_text() for path in Path(package.__file__).parent.glob("*.py"))
    codes = set(re.findall(r'code="([a-z_]+)"', sources))
    assert len(codes) > 15
    assert {errors.reason_of(code) for code in codes} <= set(Reason)


def test_reasons_are_words_for_conditions_with_an_explanation() -> None:
    for reason in Reason:
        assert reason.isalnum()
        assert reason[0].isupper()
        assert reason.__doc__
        assert reason.__doc__.endswith(".")
        Condition(type="Ready", status="True", reason=reason)
