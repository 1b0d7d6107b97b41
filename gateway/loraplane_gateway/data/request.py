"""An inference request: one strict parse, from which everything downstream follows."""

import json
from dataclasses import dataclass
from typing import Any

from loraplane_core.errors import InvalidParameter
from loraplane_core.jsonbody import parse_object

MODEL_MAX = 512


@dataclass(frozen=True, slots=True)
class InferenceRequest:
    """`body` is what goes to the engine: the client's bytes, or the same object plus include_usage."""

    path: str
    model: str
    stream: bool
    wants_usage: bool  # the client asked for the usage chunk of a stream itself
    body: bytes
    user: str = ""  # of the request, when it is a string


def parse(path: str, body: bytes) -> InferenceRequest:
    """Raises InvalidJson, InvalidParameter (with `param`). Other fields are the engine's to check."""
    fields = parse_object(body)
    model = fields.get("model")
    if model is None:
        raise InvalidParameter("you must provide `model`", param="model", code="missing_model")
    if not isinstance(model, str) or not model:
        raise InvalidParameter("`model` must be a non-empty string", param="model")
    if len(model) > MODEL_MAX:
        raise InvalidParameter(f"`model` is longer than {MODEL_MAX} characters", param="model")
    stream = _optional_bool(fields, "stream")
    wants_usage = _include_usage(fields)
    if stream and not wants_usage:
        # Streams are settled on the engine's own count (G62); the extra chunk is taken out again on the way back.
        options = {**(fields.get("stream_options") or {}), "include_usage": True}
        body = json.dumps({**fields, "stream_options": options}).encode()
    user = fields.get("user")
    return InferenceRequest(path, model, stream, wants_usage, body, user if isinstance(user, str) else "")


def _optional_bool(fields: dict[str, Any], name: str) -> bool:
    value = fields.get(name)
    if value is not None and not isinstance(value, bool):
        raise InvalidParameter(f"`{name}` must be true or false", param=name)
    return bool(value)


def _include_usage(fields: dict[str, Any]) -> bool:
    options = fields.get("stream_options")
    if options is None:
        return False
    if not isinstance(options, dict):
        raise InvalidParameter("`stream_options` must be an object", param="stream_options")
    value = options.get("include_usage")
    if value is not None and not isinstance(value, bool):
        raise InvalidParameter("`stream_options.include_usage` must be true or false", param="stream_options")
    return bool(value)
