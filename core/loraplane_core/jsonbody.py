"""Strict JSON: one parse, one truth. Duplicate keys, NaN, infinities and trailing text are refused.

Python's parser keeps the last of two equal keys; another process may keep the first. A request whose
`model` depends on who reads it must not get in.
"""

import json
import math
import re
from typing import Any

from loraplane_core.errors import InvalidJson

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
MAX_DEPTH_MESSAGE = "the body is nested too deeply"
#: A parse holds up everything else in its process, and its time goes with the number of values, not of bytes:
#: 4 MiB of `[],[],…` took seconds. Marks inside strings count too, so the limits lie far above any real prompt.
MAX_CONTAINERS = 1 << 16
MAX_VALUES = 1 << 18


def parse_object(body: bytes) -> dict[str, Any]:
    """The JSON object in `body` (UTF-8). Raises InvalidJson, saying what is wrong and where."""
    if body.count(b"[") + body.count(b"{") > MAX_CONTAINERS or body.count(b",") > MAX_VALUES:
        raise InvalidJson("the body holds too many values")
    try:
        value = json.loads(
            body.decode("utf-8"),
            object_pairs_hook=_no_duplicates,
            parse_constant=_no_constant,
            parse_float=_finite,
        )
    except UnicodeDecodeError as error:
        raise InvalidJson("the body is not UTF-8") from error
    except RecursionError as error:
        raise InvalidJson(MAX_DEPTH_MESSAGE) from error
    except json.JSONDecodeError as error:
        raise InvalidJson(f"the body is not valid JSON: {error.msg} at character {error.pos}") from error
    except ValueError as error:  # Python refuses integers of more than 4300 digits
        raise InvalidJson("the body holds a number too large to read") from error
    if _SURROGATE.search(body):
        _check_unicode(value)
    if not isinstance(value, dict):
        raise InvalidJson("the body must be a JSON object")
    return value


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            printable = key[:80].encode("utf-8", "replace").decode()  # it may hold half a surrogate pair
            raise InvalidJson(f"the key {printable!r} appears twice", param=printable)
        found[key] = value
    return found


def _no_constant(name: str) -> Any:
    raise InvalidJson(f"{name} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise InvalidJson(f"the number {text[:80]} is too large")
    return value


def _check_unicode(value: Any) -> None:
    # Half a surrogate pair cannot be encoded again: it would fail wherever the text is next written.
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except RecursionError as error:
        raise InvalidJson(MAX_DEPTH_MESSAGE) from error
    except UnicodeEncodeError as error:
        raise InvalidJson("the body holds half of a surrogate pair") from error
