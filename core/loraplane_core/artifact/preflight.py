"""What an adapter artifact must pass before it gets a version that can be served.

Runs in a worker process of the registry, without torch, in memory bounded by a few chunks. Every rule has
a stable code (resources.reasons documents them); the message names the tensor or field, what was expected
and what was found.
"""

import stat
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np

from loraplane_core.artifact.digest import ARTIFACT_FILES, CONFIG_FILE, WEIGHTS_FILE, artifact_digest
from loraplane_core.artifact.header import DTYPE_BYTES, HEADER_LIMIT, shown
from loraplane_core.artifact.layout import MODULES, Site, SiteWeights, TensorSpan, parse_layout, read_header
from loraplane_core.artifact.peft_config import base_name, check_config, read_config
from loraplane_core.errors import ArtifactRejected, BaseModelMismatch, InvalidParameter

BaseEvidence = Literal["artifact", "declared"]
#: Formats that run code when they are opened.
_PICKLES = frozenset({".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt"})
_CHUNK = 4 << 20
#: Per dtype: the unsigned integer of its width and the bits of its exponent, all ones in NaN and infinity.
_BITS: dict[str, tuple[np.dtype[np.uint16 | np.uint32], int, int]] = {
    "F32": (np.dtype("<u4"), 0x7F80_0000, 0x7FFF_FFFF),
    "F16": (np.dtype("<u2"), 0x7C00, 0x7FFF),
    "BF16": (np.dtype("<u2"), 0x7F80, 0x7FFF),
}
_DTYPE_NAMES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


@dataclass(frozen=True)
class Limits:
    max_bytes: int = 2 << 30  # of the weights file
    max_config_bytes: int = 1 << 20
    max_header_bytes: int = HEADER_LIMIT
    max_rank: int = 64  # the pool's


@dataclass(frozen=True)
class PreflightReport:
    digest: str
    bytes: int  # of the two files together
    rank: int  # the largest
    target_modules: list[str]  # in MODULES order
    dtype: str  # float32 | float16 | bfloat16 | mixed
    base_name: str | None  # the hub-like name that the artifact states
    sites: int
    parameters: int


@dataclass(frozen=True)
class BaseShapes:
    """The sizes of a Llama-family base that adapters must fit."""

    layers: int
    hidden: int
    intermediate: int
    query: int  # heads * head_dim
    key_value: int  # key-value heads * head_dim

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> "BaseShapes":
        """From a Hugging Face config.json; raises InvalidParameter when a size is missing or no positive integer."""
        heads = _size(config, "num_attention_heads")
        hidden = _size(config, "hidden_size")
        head_dim = hidden // heads if config.get("head_dim") is None else _size(config, "head_dim")
        grouped = config.get("num_key_value_heads") is not None
        key_value_heads = _size(config, "num_key_value_heads") if grouped else heads
        return cls(
            layers=_size(config, "num_hidden_layers"),
            hidden=hidden,
            intermediate=_size(config, "intermediate_size"),
            query=heads * head_dim,
            key_value=key_value_heads * head_dim,
        )

    def in_out(self, module: str) -> tuple[int, int]:
        """(inputs, outputs) of a linear."""
        return {
            "q_proj": (self.hidden, self.query),
            "k_proj": (self.hidden, self.key_value),
            "v_proj": (self.hidden, self.key_value),
            "o_proj": (self.query, self.hidden),
            "gate_proj": (self.hidden, self.intermediate),
            "up_proj": (self.hidden, self.intermediate),
            "down_proj": (self.intermediate, self.hidden),
        }[module]


def _size(config: Mapping[str, Any], field: str) -> int:
    value = config.get(field)
    if type(value) is not int or value < 1:
        raise InvalidParameter(f"the base's config has no usable {field}", param=field)
    return value


def preflight(
    folder: Path,
    *,
    base_config: Mapping[str, Any] | None,
    limits: Limits,
    base_names: Sequence[str] = (),
) -> PreflightReport:
    """Check the artifact in `folder`; raises ArtifactRejected with the code of the first rule it breaks.

    Only the two files are read. Without `base_config` shapes are checked for consistency only. With
    `base_names` (the base's name and aliases) another base stated in the artifact raises BaseModelMismatch
    before any shape is looked at: that is the reason a person can act on. The caller owns the folder:
    nobody may write to it meanwhile.
    """
    sizes = _check_files(folder, limits)
    config = read_config(folder / CONFIG_FILE, max_bytes=limits.max_config_bytes)
    check_config(config)
    if base_names:
        base_evidence(base_name(config), base_names)
    header = read_header(folder / WEIGHTS_FILE, limit=limits.max_header_bytes)
    sites = parse_layout(config, header)
    _check_ranks(sites, limits.max_rank)
    if base_config is not None:
        _check_shapes(sites, BaseShapes.of(base_config))
    _check_values(folder / WEIGHTS_FILE, sites)
    used: set[str] = {weights.site.module for weights in sites}
    dtypes = {span.dtype for span in header.values()}
    return PreflightReport(
        digest=artifact_digest(folder),
        bytes=sum(sizes),
        rank=max(weights.rank for weights in sites),
        target_modules=[module for module in MODULES if module in used],
        dtype=_DTYPE_NAMES[dtypes.pop()] if len(dtypes) == 1 else "mixed",
        base_name=base_name(config),
        sites=len(sites),
        parameters=sum((span.end - span.start) // DTYPE_BYTES[span.dtype] for span in header.values()),
    )


def base_evidence(stated: str | None, base_names: Sequence[str]) -> BaseEvidence:
    """What ties an artifact that states the base `stated` to the base called `base_names` (name, then aliases).

    Its own statement, or only the declaration. Raises BaseModelMismatch.
    """
    if stated is None:
        return "declared"
    if stated in base_names:
        return "artifact"
    raise BaseModelMismatch(
        f"the artifact was trained for {shown(stated)}; the pool serves {shown(base_names[0])}"
        f" (aliases: {', '.join(base_names[1:]) or 'none'})",
        param="base_model",
    )


def _check_files(folder: Path, limits: Limits) -> list[int]:
    """Sizes of the two files, in ARTIFACT_FILES order; raises ArtifactRejected unless both are plain and small."""
    sizes = []
    for name in ARTIFACT_FILES:
        try:
            status = (folder / name).lstat()
        except (FileNotFoundError, NotADirectoryError):
            raise _missing(folder, name) from None
        if not stat.S_ISREG(status.st_mode):
            raise ArtifactRejected(f"{name} is a link or not a plain file", code="unsafe_path")
        sizes.append(status.st_size)
    for name, size, limit in zip(ARTIFACT_FILES, sizes, (limits.max_config_bytes, limits.max_bytes), strict=True):
        if size > limit:
            raise ArtifactRejected(f"{name} has {size} bytes; at most {limit} are accepted", code="too_large")
    return sizes


def _missing(folder: Path, name: str) -> ArtifactRejected:
    pickles = (
        sorted(file.name for file in folder.iterdir() if file.suffix.lower() in _PICKLES) if folder.is_dir() else []
    )
    if name == WEIGHTS_FILE and pickles:
        return ArtifactRejected(
            f"{shown(pickles[0])} can run code when it is opened; save the adapter as {WEIGHTS_FILE}",
            code="unsafe_format",
        )
    return ArtifactRejected(f"the artifact has no {name}", code="missing_file")


def _check_ranks(sites: Iterable[SiteWeights], limit: int) -> None:
    for weights in sites:
        if weights.rank > limit:
            raise ArtifactRejected(
                f"{shown(weights.a.name)} has rank {weights.rank}; the pool accepts at most {limit}",
                code="rank_too_high",
            )


def _check_shapes(sites: Iterable[SiteWeights], base: BaseShapes) -> None:
    for weights in sites:
        layer, module = weights.site
        if layer >= base.layers:
            raise ArtifactRejected(
                f"{shown(weights.a.name)} is of layer {layer}; the base has the layers 0 to {base.layers - 1}",
                code="shape_mismatch",
            )
        inputs, outputs = base.in_out(module)
        for span, expected in ((weights.a, (weights.rank, inputs)), (weights.b, (outputs, weights.rank))):
            if span.shape != expected:
                raise ArtifactRejected(
                    f"{shown(span.name)} has the shape {list(span.shape)}; the base needs {list(expected)}",
                    code="shape_mismatch",
                )


def _check_values(path: Path, sites: Sequence[SiteWeights]) -> None:
    """Every number finite, and at least one site that adds something to the base's output."""
    changed: list[Site] = []
    with path.open("rb") as file:
        for weights in sites:
            # both are read, whatever the first one holds: each must be finite
            nonzero = [_scan(file, span) for span in (weights.a, weights.b)]
            if all(nonzero) and weights.scale != 0:
                changed.append(weights.site)
    if not changed:
        raise ArtifactRejected(
            "every update multiplies to zero, so answers would be the base's: was it saved before training?",
            code="dead_adapter",
        )


def _scan(file: BinaryIO, span: TensorSpan) -> bool:
    """True if the tensor holds a number other than zero; raises ArtifactRejected at the first NaN or infinity."""
    kind, exponent, magnitude = _BITS[span.dtype]
    nonzero = False
    file.seek(span.start)
    left = span.end - span.start
    while left:
        chunk = file.read(min(left, _CHUNK))
        if len(chunk) % kind.itemsize or not chunk:
            raise ArtifactRejected("the safetensors file was shortened while it was read", code="malformed_weights")
        left -= len(chunk)
        bits = np.frombuffer(chunk, dtype=kind)
        if ((bits & exponent) == exponent).any():
            raise ArtifactRejected(f"{shown(span.name)} holds a NaN or an infinity", code="not_finite")
        nonzero = nonzero or bool((bits & magnitude).any())
    return nonzero
