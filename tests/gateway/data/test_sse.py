"""Events on their way through: whole, unchanged, and without the usage chunk nobody asked for."""

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplane_gateway.data.sse import EventScanner, Usage, usage_of

USAGE = {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}


def _event(value: Any, end: str = "\n\n") -> bytes:
    return f"data: {json.dumps(value)}{end}".encode()


def _chunk(text: str) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": text}], "usage": None}


_STREAM = (
    b": a comment\n\n"
    + _event(_chunk("é \n\n data: [DONE]"))
    + _event(_chunk('"usage": {}'), "\r\n\r\n")
    + b"event: x\ndata: not json\n\n"
    + _event({"choices": [], "usage": USAGE})
    + b"data: [DONE]\n\n"
)


@given(cuts=st.lists(st.integers(0, len(_STREAM)), max_size=8), drop=st.booleans())
def test_however_it_is_cut_only_the_usage_event_may_be_missing(cuts: list[int], drop: bool) -> None:
    borders = [0, *sorted(cuts), len(_STREAM)]
    scanner = EventScanner(drop_usage=drop)
    passed = [scanner.feed(_STREAM[a:b]) for a, b in pairwise(borders)]
    whole = b"".join(passed) + scanner.finish()
    assert whole == (_STREAM.replace(_event({"choices": [], "usage": USAGE}), b"") if drop else _STREAM)
    assert scanner.usage == Usage(prompt_tokens=5, completion_tokens=2)
    assert scanner.done
    assert all(piece == b"" or piece.endswith((b"\n\n", b"\r\n\r\n")) for piece in passed)  # never a torn event


def test_usage_beside_choices_is_noted_and_passes() -> None:
    scanner = EventScanner(drop_usage=True)
    event = _event({"choices": [{"text": "a"}], "usage": USAGE})
    assert scanner.feed(event) == event
    assert scanner.usage == Usage(prompt_tokens=5, completion_tokens=2)


def test_a_torn_end_is_held_back_until_the_stream_ends_in_order() -> None:
    scanner = EventScanner(drop_usage=True)
    assert scanner.feed(b"data: {") == b""
    assert scanner.finish() == b"data: {"


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (json.dumps({"usage": USAGE}).encode(), Usage(prompt_tokens=5, completion_tokens=2)),
        (b'{"usage":null}', None),
        (b"{}", None),
        (b"not json", None),
        (b'{"usage":{"prompt_tokens":"many"}}', None),
    ],
)
def test_the_usage_of_an_unstreamed_answer(body: bytes, expected: Usage | None) -> None:
    assert usage_of(body) == expected
