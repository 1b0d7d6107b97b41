"""The engine image: one artifact packed for the arena, written once and mapped many times. Torch-free.

File: MAGIC, the manifest's length (u64 little-endian) and sha256, the manifest (JSON), zeros up to a multiple of
ALIGN_FILE, then `pages` x `page_bytes` of data. Page i of the image goes to any page of the arena; offsets in the
manifest are bytes from the start of the data. A tensor lies within one page unless it is larger than one:
then its pages form a *run*, which must stay contiguous in the arena.

Tensors, in layer order: per group the stacked A of its present members, [sum of ranks, in] row-major (one
shrink serves the group); per member B transposed, [rank, out] row-major. The scale stays apart, as fp32.
"""

import hashlib
import math
import mmap
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from loraplane_core.artifact.digest import ARTIFACT_FILES, CONFIG_FILE, WEIGHTS_FILE, digest_of
from loraplane_core.artifact.layout import SiteWeights, load_matrix, parse_layout, read_header
from loraplane_core.errors import ArtifactRejected, Unavailable
from loraplane_core.jsonbody import parse_object
from loraplane_engine.adapters.sites import GROUPS, site_index

MAGIC = b"LPIMAGE2"
VERSION = 1
ALIGN_FILE = 4096
#: The code of an image file that cannot be used; making it again mends it.
IMAGE_BROKEN = "image_broken"
ALIGN_TENSOR = 64
_HEAD = struct.Struct("<8sQ32s")  # magic, length and sha256 of the manifest
_MANIFEST_LIMIT = 64 << 20
_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class Layout(NamedTuple):
    """What an image must match to be read by a core: `v1/float32/737280`."""

    version: int
    dtype: str
    page_bytes: int

    def __str__(self) -> str:
        return f"v{self.version}/{self.dtype}/{self.page_bytes}"

    @property
    def item_bytes(self) -> int:
        return _ITEM_BYTES[self.dtype]

    @classmethod
    def parse(cls, text: str) -> "Layout":
        version, _, rest = text.partition("/")
        dtype, _, page_bytes = rest.partition("/")
        if version != f"v{VERSION}" or dtype not in _ITEM_BYTES or not page_bytes.isdecimal() or int(page_bytes) < 1:
            raise ValueError(f"not an engine-image layout of version {VERSION}: {text!r}")
        if int(page_bytes) % ALIGN_TENSOR:
            raise ValueError(f"a page must be a multiple of {ALIGN_TENSOR} bytes: {text!r}")
        return cls(VERSION, dtype, int(page_bytes))


class SiteEntry(msgspec.Struct, frozen=True, array_like=True):
    """One site. `a` and `b` are byte offsets in the image's data."""

    site: int
    rank: int
    in_features: int
    out_features: int
    scale: float
    a: int
    b: int


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    layout: str
    digest: str  # of the artifact
    data_sha256: str
    pages: int
    rank: int  # the largest
    parameters: int
    runs: list[tuple[int, int]]  # (first page, pages), only those longer than one
    sites: list[SiteEntry]

    @property
    def data_bytes(self) -> int:
        return self.pages * Layout.parse(self.layout).page_bytes


class _Piece(NamedTuple):
    offset: int
    data: np.ndarray


class _Packer:
    """Places tensors first-fit into the last few open pages, so that their order stays roughly by layer."""

    OPEN = 3

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._open: list[list[int]] = []  # [page, bytes used]
        self.pages = 0
        self.runs: list[tuple[int, int]] = []
        self.pieces: list[_Piece] = []

    def put(self, data: np.ndarray) -> int:
        size = -(-data.nbytes // ALIGN_TENSOR) * ALIGN_TENSOR
        page_bytes = self._layout.page_bytes
        slot = next((slot for slot in self._open if slot[1] + size <= page_bytes), None)
        if slot is None:
            first, count = self.pages, max(1, -(-size // page_bytes))
            self.pages += count
            if count > 1:
                self.runs.append((first, count))
            slot = [first + count - 1, 0]
            self._open = [*self._open, slot][-self.OPEN :]
            offset = first * page_bytes
            slot[1] = size - (count - 1) * page_bytes
        else:
            offset = slot[0] * page_bytes + slot[1]
            slot[1] += size
        self.pieces.append(_Piece(offset, data))
        return offset

    def buffer(self) -> np.ndarray:
        """The data of all pages, gaps zeroed, as bytes."""
        data = np.zeros(self.pages * self._layout.page_bytes, dtype=np.uint8)
        for piece in self.pieces:
            raw = np.frombuffer(piece.data.tobytes(), dtype=np.uint8)
            data[piece.offset : piece.offset + raw.size] = raw
        return data


def convert(artifact: Path, out: Path, layout: Layout, expected_digest: str | None = None) -> Manifest:
    """Write the image of `artifact` to `out` (atomically). Raises ArtifactRejected or OSError.

    The digest is computed from the very bytes that are converted.
    """
    config_bytes = (artifact / CONFIG_FILE).read_bytes()
    with (artifact / WEIGHTS_FILE).open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as weights:
        sums = {CONFIG_FILE: hashlib.sha256(config_bytes), WEIGHTS_FILE: hashlib.sha256(weights)}
        digest = digest_of({name: sums[name].hexdigest() for name in ARTIFACT_FILES})
        if expected_digest is not None and digest != expected_digest:
            raise ArtifactRejected(f"the artifact's digest is {digest}, not {expected_digest}", code="digest_mismatch")
        config = parse_object(config_bytes)
        sites = parse_layout(config, read_header(artifact / WEIGHTS_FILE))
        packer = _Packer(layout)
        entries = list(_pack(packer, sites, weights, layout.dtype))
    data = packer.buffer()
    manifest = Manifest(
        layout=str(layout),
        digest=digest,
        data_sha256=hashlib.sha256(data.data).hexdigest(),
        pages=packer.pages,
        rank=max(entry.rank for entry in entries),
        parameters=sum(entry.rank * (entry.in_features + entry.out_features) for entry in entries),
        runs=packer.runs,
        sites=entries,
    )
    _write(out, manifest, data)
    return manifest


def _pack(packer: _Packer, sites: Sequence[SiteWeights], weights: mmap.mmap, dtype: str) -> Iterator[SiteEntry]:
    by_site: Mapping[tuple[int, str], SiteWeights] = {(w.site.layer, w.site.module): w for w in sites}
    for layer in sorted({w.site.layer for w in sites}):
        for modules in GROUPS:
            members = [by_site[layer, module] for module in modules if (layer, module) in by_site]
            if not members:
                continue
            matrices = [_cast(load_matrix(weights, member.a), dtype, member.a.name) for member in members]
            if len({matrix.shape[1] for matrix in matrices}) > 1:
                raise ArtifactRejected(
                    f"the linears {', '.join(m.site.path for m in members)} read one input but their lora_A "
                    "have different widths",
                    code="shape_mismatch",
                )
            offset = packer.put(np.concatenate(matrices))
            for member, matrix in zip(members, matrices, strict=True):
                b = np.ascontiguousarray(_cast(load_matrix(weights, member.b), dtype, member.b.name).T)
                yield SiteEntry(
                    site_index(member.site),
                    member.rank,
                    matrix.shape[1],
                    b.shape[1],
                    float(np.float32(member.scale)),
                    offset,
                    packer.put(b),
                )
                offset += matrix.nbytes


def _cast(matrix: np.ndarray, dtype: str, name: str) -> np.ndarray:
    """To the image's dtype; bfloat16 as its bits, rounded to nearest even."""
    if not np.isfinite(matrix).all():
        raise ArtifactRejected(f"the tensor {name!r} holds NaN or infinity", code="not_finite")
    if dtype == "float32":
        return matrix
    if dtype == "bfloat16":
        bits = matrix.view(np.uint32)
        return ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(
            np.uint16
        )
    if np.abs(matrix).max(initial=0.0) > np.finfo(np.float16).max:
        raise ArtifactRejected(f"the tensor {name!r} does not fit float16", code="not_finite")
    return matrix.astype(np.float16)


def _write(out: Path, manifest: Manifest, data: np.ndarray) -> None:
    encoded = msgspec.json.encode(manifest)
    start = _data_start(len(encoded))
    temporary = out.with_name(f"{out.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            head = _HEAD.pack(MAGIC, len(encoded), hashlib.sha256(encoded).digest()) + encoded
            file.write(head + bytes(start - len(head)))
            file.write(data.data)  # not synced: a torn image fails its checksum and is made again
        temporary.replace(out)
    finally:
        temporary.unlink(missing_ok=True)


def _data_start(manifest_length: int) -> int:
    return math.ceil((_HEAD.size + manifest_length) / ALIGN_FILE) * ALIGN_FILE


def read_manifest(path: Path) -> tuple[Manifest, int]:
    """(manifest, byte offset of the data). Raises Unavailable when the file is not a whole image."""
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(_HEAD.size)
        if len(head) < _HEAD.size or not head.startswith(MAGIC):
            raise broken(path, "it is not an engine image")
        _, length, checksum = _HEAD.unpack(head)
        if length > min(size, _MANIFEST_LIMIT):
            raise broken(path, f"its manifest claims {length} bytes")
        encoded = file.read(length)
        # Scales, ranks and offsets decide the answer as much as the data does.
        if hashlib.sha256(encoded).digest() != checksum:
            raise broken(path, "its manifest does not match its checksum")
        try:
            manifest = msgspec.json.decode(encoded, type=Manifest)
            start = _data_start(length)
            complete = size == start + manifest.data_bytes
        except (msgspec.MsgspecError, ValueError) as error:
            raise broken(path, str(error)) from error
    if not complete:
        raise broken(path, f"it has {size} bytes; {start + manifest.data_bytes} are expected")
    return manifest, start


def read_data(path: Path, manifest: Manifest, start: int, into: memoryview) -> None:
    """Copy the data into `into` (exactly `data_bytes`), checking its sha256. Raises Unavailable."""
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        done = 0
        while done < len(into):
            count = file.readinto(into[done:])
            if not count:
                raise broken(path, "it was shortened while it was read")
            done += count
    if hashlib.sha256(into).hexdigest() != manifest.data_sha256:
        raise broken(path, "its data does not match its checksum")


def broken(path: Path, why: str) -> Unavailable:
    return Unavailable(f"the engine image {path.name} cannot be used: {why}", code=IMAGE_BROKEN)
