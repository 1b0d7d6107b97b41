"""The safetensors header as hostile input."""

import json
import mmap
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from loraplane_core.artifact.header import load_matrix, read_header
from loraplane_core.errors import ArtifactRejected
from tests.core.artifacts import Tensor, entries, ones, safetensors, safetensors_file, tensor


def _write(tmp_path: Path, content: bytes) -> Path:
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    return path


def test_reads_what_the_safetensors_library_writes(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    matrix = np.arange(12, dtype=np.float32).reshape(3, 4)
    half = np.array([[0.5, -2.0]], dtype=np.float16)
    save_file({"a": matrix, "b": half}, path, metadata={"format": "pt"})
    header = read_header(path)
    assert set(header) == {"a", "b"}
    content = path.read_bytes()
    np.testing.assert_array_equal(load_matrix(content, header["a"]), matrix)
    np.testing.assert_array_equal(load_matrix(content, header["b"]), half.astype(np.float32))


def test_bfloat16_is_the_upper_half_of_a_float32_and_the_file_can_be_closed(tmp_path: Path) -> None:
    values = np.array([[1.0, -0.15625, 3e38], [0.0, -0.0, 2.0**-120]], dtype=np.float32)
    exact = (values.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    path = _write(tmp_path, safetensors({"m": tensor(exact, "BF16")}))
    span = read_header(path)["m"]
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
        loaded = load_matrix(view, span)
        plain = load_matrix(memoryview(path.read_bytes()), span)
    assert loaded.dtype == np.float32
    np.testing.assert_array_equal(loaded, exact)
    np.testing.assert_array_equal(plain, exact)


_TWO = {"a": ones(2, 2), "b": ones(1, 3, dtype="F16")}


def _edited(edit: Callable[[dict[str, Any]], object]) -> bytes:
    header = entries(_TWO)
    edit(header)
    return safetensors_file(header, b"".join(item.data for item in _TWO.values()))


def _offsets(entry: str, begin: int, end: int) -> bytes:
    return _edited(lambda header: header[entry].update(data_offsets=[begin, end]))


def _shape(shape: object) -> bytes:
    return _edited(lambda header: header["a"].update(shape=shape))


BAD: dict[str, tuple[bytes, str, str]] = {
    "empty file": (b"", "malformed_weights", "too few"),
    "seven bytes": (b"\0" * 7, "malformed_weights", "too few"),
    "length beyond the file": (struct.pack("<Q", 1 << 20) + b"{}", "malformed_weights", "but the file has"),
    "length beyond the limit": (struct.pack("<Q", (1 << 64) - 1) + b"{}", "malformed_weights", "at most"),
    "not JSON": (safetensors_file(b"{nope", b""), "malformed_weights", "not valid JSON"),
    "not an object": (safetensors_file(b"[]", b""), "malformed_weights", "'{'"),
    "space before the object": (safetensors_file(b" {}", b""), "malformed_weights", "'{'"),
    "not UTF-8": (safetensors_file(b'{"\xff": 1}', b""), "malformed_weights", "UTF-8"),
    "nested too deeply": (safetensors_file(b'{"a":' * 50_000, b""), "malformed_weights", "deeply"),
    "a name twice": (safetensors_file(b'{"a": 1, "a": 2}', b""), "malformed_weights", "twice"),
    "metadata not strings": (_edited(lambda h: h.update({"__metadata__": {"a": 1}})), "malformed_weights", "strings"),
    "an entry too many": (_edited(lambda h: h["a"].update(extra=1)), "malformed_weights", "exactly"),
    "an entry too few": (_edited(lambda h: h["a"].pop("shape")), "malformed_weights", "exactly"),
    "a dtype not served": (_edited(lambda h: h["a"].update(dtype="F64")), "unsupported_dtype", "'F64'"),
    "dtype not text": (_edited(lambda h: h["a"].update(dtype=["F32"])), "unsupported_dtype", "F32"),
    "negative dimension": (_shape([-2, -2]), "malformed_weights", "positive"),
    "zero dimension": (_shape([0, 2]), "malformed_weights", "positive"),
    "fractional dimension": (_shape([2.0, 2]), "malformed_weights", "positive"),
    "boolean dimension": (_shape([True, 4]), "malformed_weights", "positive"),
    "dimensions without end": (_shape([1 << 4000, 1 << 4000]), "malformed_weights", "need"),
    "shape and bytes disagree": (_shape([2, 3]), "malformed_weights", "need 24"),
    "begin after end": (_offsets("a", 16, 0), "malformed_weights", "data_offsets"),
    "three offsets": (_edited(lambda h: h["a"].update(data_offsets=[0, 8, 16])), "malformed_weights", "data_offsets"),
    "overlap": (_offsets("b", 10, 16), "malformed_weights", "overlaps"),
    "a gap": (_offsets("b", 18, 24), "malformed_weights", "gap"),
    "data before the first tensor": (
        safetensors_file({"a": {"dtype": "F16", "shape": [1], "data_offsets": [2, 4]}}, b"\0" * 4),
        "malformed_weights",
        "gap",
    ),
    "truncated": (safetensors(_TWO)[:-1], "malformed_weights", "truncated"),
    "bytes after the end": (safetensors(_TWO) + b"\0", "malformed_weights", "1 bytes follow"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_malformed_file_is_refused_with_a_reason(case: str, tmp_path: Path) -> None:
    content, code, words = BAD[case]
    with pytest.raises(ArtifactRejected) as caught:
        read_header(_write(tmp_path, content))
    assert (caught.value.code, caught.value.status) == (code, 422)
    assert words in caught.value.message


def test_the_header_limit_is_the_callers(tmp_path: Path) -> None:
    path = _write(tmp_path, safetensors(_TWO))
    with pytest.raises(ArtifactRejected, match="at most 16"):
        read_header(path, limit=16)


def test_a_long_name_is_shortened_in_the_message(tmp_path: Path) -> None:
    bad = Tensor("F64", [1], b"\0" * 8)
    with pytest.raises(ArtifactRejected) as caught:
        read_header(_write(tmp_path, safetensors({"n" * 100_000: bad})))
    assert len(caught.value.message) < 400


_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=8,
)
_entry = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "F16", "BF16", "F64"]) | _values,
        "shape": st.lists(st.integers(0, 4), max_size=3) | _values,
        "data_offsets": st.lists(st.integers(0, 64), min_size=2, max_size=2) | _values,
    }
)


@settings(max_examples=150)
@given(header=st.dictionaries(st.text(max_size=6), _entry | _values, max_size=4), data=st.binary(max_size=64))
def test_no_header_does_anything_but_parse_or_be_refused(header: object, data: bytes, tmp_path: Path) -> None:
    _parse_or_refuse(tmp_path, safetensors_file(header, data))


@settings(max_examples=150)
@given(at=st.integers(0, 200), byte=st.integers(0, 255), cut=st.integers(0, 40))
def test_no_damaged_file_does_anything_but_parse_or_be_refused(at: int, byte: int, cut: int, tmp_path: Path) -> None:
    content = bytearray(safetensors(_TWO))
    content[at % len(content)] = byte
    _parse_or_refuse(tmp_path, bytes(content[: len(content) - cut]))


def _parse_or_refuse(tmp_path: Path, content: bytes) -> None:
    path = _write(tmp_path, content)
    try:
        header = read_header(path)
    except ArtifactRejected as error:
        json.dumps(error.message).encode()
        return
    for span in header.values():
        assert 8 <= span.start < span.end <= len(content)
        assert load_matrix(content, span).shape == span.shape
