"""One error tree, one renderer."""

import json

import pytest

from loraplane_core import errors
from loraplane_core.errors import LoraplaneError, from_wire, reason_of, render, tree


def _instance(kind: type[LoraplaneError]) -> LoraplaneError:
    return kind("why")


@pytest.mark.parametrize("kind", tree(), ids=lambda kind: kind.__name__)
def test_every_error_renders_as_an_openai_object_and_reads_back(kind: type[LoraplaneError]) -> None:
    status, body, headers = render(_instance(kind))
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert 400 <= status < 600
    assert (status == 503) == ("retry-after" in headers)
    again = from_wire(status, json.loads(json.dumps(body)))
    assert (again.status, again.code, again.message) == (status, body["error"]["code"], body["error"]["message"])


def test_codes_are_not_shared() -> None:
    codes = [kind.code for kind in tree() if kind is not errors.Internal]
    assert len(set(codes)) == len(codes)


@pytest.mark.parametrize("error", [RuntimeError("secret path /etc"), KeyError("token"), AssertionError()])
def test_the_text_of_an_unexpected_error_never_leaves(error: Exception) -> None:
    status, body, _ = render(error)
    assert status == 500
    assert body["error"]["code"] == "internal_error"
    assert "secret" not in json.dumps(body)
    assert "token" not in json.dumps(body)


def test_foreign_unknown_and_withdrawn_models_get_one_body() -> None:
    assert render(errors.ModelNotFound("acme/style")) == render(errors.ModelNotFound("acme/style"))
    status, body, _ = render(errors.ModelNotFound("acme/style"))
    assert (status, body["error"]["code"], body["error"]["param"]) == (404, "model_not_found", "model")


def test_headers_tell_clients_whether_and_when_to_retry() -> None:
    assert render(errors.TooManyRequests("slow down", retry_after=0.2))[2]["retry-after"] == "1"
    assert render(errors.EngineBusy("full", retry_after=7.4))[2]["retry-after"] == "7"
    assert render(errors.Conflict("no"))[2]["x-should-retry"] == "false"
    assert "x-should-retry" not in render(errors.InvalidRequest("no"))[2]
    assert render(errors.Unauthenticated("no"))[2]["www-authenticate"] == "Bearer"


def test_a_code_given_at_the_raise_is_kept_over_the_wire() -> None:
    rejected = errors.ArtifactRejected("no", code="rank_too_high", param="r")
    assert rejected.reason == "RankTooHigh"
    status, body, _ = render(rejected)
    again = from_wire(status, body)
    assert isinstance(again, errors.ArtifactRejected)
    assert (again.code, again.param) == ("rank_too_high", "r")


@pytest.mark.parametrize("body", [None, "text", {}, {"error": "x"}, {"error": {"code": 3}}, []])
def test_an_unreadable_answer_becomes_an_error_by_its_status(body: object) -> None:
    assert isinstance(from_wire(502, body), errors.Unavailable)
    assert isinstance(from_wire(404, body), errors.InvalidRequest)


def test_reasons_are_the_camel_case_of_codes() -> None:
    assert reason_of("base_model_mismatch") == "BaseModelMismatch"
