"""Reasons of conditions: all documented."""

from loraplane_core import errors
from loraplane_core.resources.conditions import Condition
from loraplane_core.resources.reasons import Reason

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
