"""One parse, one truth."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loraplane_core.errors import InvalidJson, render
from loraplane_core.jsonbody import parse_object

_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


@settings(max_examples=100)
@given(value=st.dictionaries(st.text(), _json, max_size=4), ascii_only=st.booleans())
def test_what_json_writes_is_read(value: dict[str, Any], ascii_only: bool) -> None:
    assert parse_object(json.dumps(value, ensure_ascii=ascii_only).encode()) == value


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "not valid JSON"),
        (b"{", "character 1"),
        (b"{} {}", "not valid JSON"),
        (b"[]", "object"),
        (b"null", "object"),
        (b'{"a": 1, "a": 1}', "'a' appears twice"),
        (b'{"x": {"a": 1, "b": 2, "a": 3}}', "appears twice"),
        (b'{"a": NaN}', "NaN"),
        (b'{"a": -Infinity}', "Infinity"),
        (b'{"a": 1e999}', "too large"),
        (b'{"a": ' + b"9" * 5000 + b"}", "too large"),
        (b'{"a": ' * 20_000, "deeply"),
        (b'{"\xff": 1}', "UTF-8"),
        (b'{"a": "\\ud800"}', "surrogate"),
        (b'{"\\udc00": 1}', "surrogate"),
        (b'{"\\ud800": 1, "\\ud800": 2}', "twice"),
        (b'{"a": [' + b"[]," * 200_000 + b"[]]}", "too many"),
        (b'{"a": [' + b"{}," * 200_000 + b"{}]}", "too many"),
        (b'{"a": [' + b"1.5," * 600_000 + b"1.5]}", "too many"),
    ],
)
def test_anything_else_is_refused_with_a_reason_that_can_be_sent(body: bytes, words: str) -> None:
    with pytest.raises(InvalidJson) as caught:
        parse_object(body)
    assert words in caught.value.message
    status, answer, _ = render(caught.value)
    assert status == 400
    json.dumps(answer, ensure_ascii=False).encode()


def test_whole_surrogate_pairs_are_text() -> None:
    assert parse_object(b'{"a": "\\ud83d\\ude00"}') == {"a": "\U0001f600"}
