"""The header of a safetensors file, read as hostile input: an 8-byte little-endian length, a JSON object
{name: {dtype, shape, data_offsets}}, then the tensors' bytes (the format of huggingface/safetensors).

The library's own NumPy reader cannot read bfloat16, and accepts what preflight must refuse by name.
"""

import math
import mmap
import struct
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from loraplane_core.errors import ArtifactRejected, InvalidJson
from loraplane_core.jsonbody import parse_object

HEADER_LIMIT = 16 << 20
_LENGTH = struct.Struct("<Q")
_METADATA = "__metadata__"
_FIELDS = {"dtype", "shape", "data_offsets"}
DTYPE_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
_SHOWN = 120


class TensorSpan(NamedTuple):
    """Where one tensor lies; `start` and `end` are absolute byte offsets in the file."""

    name: str
    dtype: str  # "F32" | "F16" | "BF16"
    shape: tuple[int, ...]
    start: int
    end: int


def shown(name: str) -> str:
    """A name from an artifact, quoted and shortened for a message."""
    return repr(name if len(name) <= _SHOWN else f"{name[:_SHOWN]}...")


def malformed(why: str) -> ArtifactRejected:
    return ArtifactRejected(f"the safetensors file is malformed: {why}", code="malformed_weights")


def read_header(path: Path, *, limit: int = HEADER_LIMIT) -> dict[str, TensorSpan]:
    """All tensors of the file by name. Raises ArtifactRejected; reads only the header (at most `limit` bytes)."""
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(_LENGTH.size)
        if len(prefix) < _LENGTH.size:
            raise malformed(f"it has {size} bytes, too few for a header")
        (length,) = _LENGTH.unpack(prefix)
        if length > limit:
            raise malformed(f"its header claims {length} bytes; at most {limit} are read")
        data_start = _LENGTH.size + length
        if data_start > size:
            raise malformed(f"its header claims {length} bytes but the file has {size}")
        header = file.read(length)
    if len(header) != length:
        raise malformed("it was shortened while it was read")
    if not header.startswith(b"{"):
        raise malformed("its header does not begin with '{'")
    try:
        entries = parse_object(header)
    except InvalidJson as error:
        raise malformed(f"its header: {error.message}") from error
    _check_metadata(entries.pop(_METADATA, {}))
    spans = {name: _span(name, entry, data_start) for name, entry in entries.items()}
    _check_cover(spans, data_start, size)
    return spans


def _check_metadata(metadata: object) -> None:
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise malformed(f"{_METADATA} is not a map of strings")


def _span(name: str, entry: Any, data_start: int) -> TensorSpan:
    if not isinstance(entry, dict) or set(entry) != _FIELDS:
        raise malformed(f"the entry of {shown(name)} must hold exactly dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise ArtifactRejected(
            f"the tensor {shown(name)} has dtype {shown(str(dtype))}; float32, float16 and bfloat16 are supported",
            code="unsupported_dtype",
        )
    if not _naturals(shape) or 0 in shape:
        raise malformed(f"the shape of {shown(name)} is not a list of positive integers")
    if not _naturals(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise malformed(f"the data_offsets of {shown(name)} are not [begin, end]")
    begin, end = offsets
    expected = math.prod(shape) * DTYPE_BYTES[dtype]
    if end - begin != expected:
        raise malformed(f"{shown(name)} has {end - begin} bytes; its shape and dtype need {expected}")
    return TensorSpan(name, dtype, tuple(shape), data_start + begin, data_start + end)


def _naturals(value: object) -> bool:
    # type(), because True is an int in Python and not in the format; at most 8 dimensions keep prod() cheap.
    return isinstance(value, list) and len(value) <= 8 and all(type(item) is int and item >= 0 for item in value)


def _check_cover(spans: dict[str, TensorSpan], data_start: int, size: int) -> None:
    """Every byte after the header belongs to exactly one tensor, or something is hidden, missing or shared."""
    position = data_start
    for span in sorted(spans.values(), key=lambda span: (span.start, span.end)):
        if span.start != position:
            what = "overlaps another tensor" if span.start < position else "leaves a gap before it"
            raise malformed(f"the data of {shown(span.name)} {what}")
        position = span.end
    if position > size:
        raise malformed(f"its tensors end at byte {position} but the file has {size}: it is truncated")
    if position < size:
        raise malformed(f"{size - position} bytes follow its last tensor")


def load_matrix(file: mmap.mmap | memoryview | bytes, span: TensorSpan) -> np.ndarray:
    """The tensor as float32, in its shape. Always a copy, so that `file` can be closed afterwards."""
    count = math.prod(span.shape)
    if span.dtype == "BF16":  # the upper half of a float32
        bits = np.frombuffer(file, dtype="<u2", count=count, offset=span.start).astype(np.uint32)
        return (bits << np.uint32(16)).view(np.float32).reshape(span.shape)
    kind = "<f2" if span.dtype == "F16" else "<f4"
    return np.frombuffer(file, dtype=kind, count=count, offset=span.start).astype(np.float32).reshape(span.shape)
