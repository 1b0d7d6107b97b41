"""Which weights an artifact holds, by site: (layer, linear). Torch-free; shared by preflight and the engine.

Tensor names are the truth; `target_modules` of the config is advice that people write in many forms.
"""

import functools
import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from loraplane_core.artifact.header import TensorSpan, load_matrix, read_header, shown
from loraplane_core.errors import ArtifactRejected

__all__ = ["MODULES", "Site", "SiteWeights", "TensorSpan", "load_matrix", "parse_layout", "read_header", "scale_of"]

#: The order within a layer.
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_BLOCK = {module: "self_attn" if index < 4 else "mlp" for index, module in enumerate(MODULES)}
_PREFIX = "base_model.model."
# PEFT saves `lora_A.weight`; a raw state dict has the adapter's name between.
_NAME = re.compile(
    r"model\.layers\.(?P<layer>0|[1-9][0-9]{0,2})\.(?P<block>self_attn|mlp)\.(?P<module>[a-z_]+)"
    r"\.lora_(?P<half>[AB])(\.[A-Za-z0-9_-]{1,64})?\.weight"
)
PEFT_RANK = 8  # what PEFT takes when the config does not say
PEFT_ALPHA = 8

# rank_pattern and alpha_pattern are regular expressions written by a tenant, and Python's matcher can be
# driven into exponential time. These bounds keep the worst case to some ten thousand steps per module.
_LITERAL = re.compile(r"\^?[A-Za-z0-9_.\\-]*")
_PATTERN_LENGTH = 256
_MAX_PATTERNS = 2048
_MAX_REGEXES = 32
_MAX_MATCHES = 1_000_000  # sites times patterns; 126 layers with a pattern for every linear need 778 thousand
_MAX_QUANTIFIERS = 3
_MAX_GROUPS = 2
_QUANTIFIER = re.compile(r"[*+?{]")
_COSTLY_GROUP = re.compile(r"\)\s*[*+?{]|\(\?")
# Python keeps these forms inside a set for a later meaning and warns.
_AMBIGUOUS_SET = re.compile(r"\[[^\]]*(\[|--|&&|~~|\|\|)")


class Site(NamedTuple):
    layer: int
    module: str

    @property
    def path(self) -> str:
        """The linear's name in the base model, as PEFT's patterns see it."""
        return f"model.layers.{self.layer}.{_BLOCK[self.module]}.{self.module}"


class SiteWeights(NamedTuple):
    """y += scale * B (A x)."""

    site: Site
    rank: int
    scale: float
    a: TensorSpan  # [rank, in]
    b: TensorSpan  # [out, rank]


def parse_layout(config: Mapping[str, Any], header: Mapping[str, TensorSpan]) -> list[SiteWeights]:
    """All sites, sorted by layer and then MODULES order.

    Raises ArtifactRejected unless every tensor is one half of a complete pair of the rank that the config
    states, and there is at least one pair.
    """
    halves: dict[Site, dict[str, TensorSpan]] = {}
    for name in sorted(header):
        site, half = _locate(name)
        pair = halves.setdefault(site, {})
        if half in pair:
            raise ArtifactRejected(
                f"the tensors {shown(pair[half].name)} and {shown(name)} are the same half of one site",
                code="unknown_tensor",
            )
        pair[half] = header[name]
    if not halves:
        raise ArtifactRejected("the artifact holds no LoRA tensors", code="no_lora_tensors")
    for field in ("rank_pattern", "alpha_pattern"):
        if len(halves) * len(_table(config, field)) > _MAX_MATCHES:
            raise _invalid(field, f"shorter: {len(halves)} sites are matched against it")
    ordered = sorted(halves, key=lambda site: (site.layer, MODULES.index(site.module)))
    return [_weights(config, site, halves[site]) for site in ordered]


def _locate(name: str) -> tuple[Site, str]:
    match = _NAME.fullmatch(name.removeprefix(_PREFIX))
    if match is None or _BLOCK.get(match["module"]) != match["block"]:
        raise ArtifactRejected(
            f"the tensor {shown(name)} is not served: only lora_A and lora_B of the linears "
            f"{', '.join(MODULES)} in model.layers are",
            code="unknown_tensor",
        )
    return Site(int(match["layer"]), match["module"]), match["half"]


def _weights(config: Mapping[str, Any], site: Site, pair: Mapping[str, TensorSpan]) -> SiteWeights:
    if len(pair) != 2:
        (present,) = pair.values()
        raise ArtifactRejected(f"{shown(present.name)} has no other half (lora_A and lora_B)", code="incomplete_pair")
    a, b = pair["A"], pair["B"]
    for span in (a, b):
        if len(span.shape) != 2:
            raise ArtifactRejected(
                f"{shown(span.name)} has the shape {list(span.shape)}; a matrix is expected", code="shape_mismatch"
            )
    rank = a.shape[0]
    if b.shape[1] != rank:
        raise ArtifactRejected(
            f"{shown(a.name)} has rank {rank} but {shown(b.name)} has rank {b.shape[1]}", code="rank_mismatch"
        )
    stated = rank_of(config, site.path)
    if stated != rank:
        raise ArtifactRejected(
            f"{shown(a.name)} has rank {rank} but the config states {stated} (r, rank_pattern)", code="rank_mismatch"
        )
    return SiteWeights(site, rank, scale_of(config, site.path, rank), a, b)


def rank_of(config: Mapping[str, Any], module_name: str) -> int:
    """The rank that the config states for a module (full name, `model.layers...`)."""
    rank = _lookup(config, "rank_pattern", "r", PEFT_RANK, module_name)
    if type(rank) is not int or rank < 1:
        raise _invalid("rank_pattern or r", "a positive integer")
    return rank


def scale_of(config: Mapping[str, Any], module_name: str, rank: int) -> float:
    """The factor of B·A: alpha/rank, or alpha/sqrt(rank) with use_rslora. The only place that computes it.

    `module_name` is the full name without `base_model.model.`; alpha_pattern is applied as PEFT does.
    """
    alpha = _lookup(config, "alpha_pattern", "lora_alpha", PEFT_ALPHA, module_name)
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not abs(alpha) <= 1e6:
        raise _invalid("alpha_pattern or lora_alpha", "a number of at most a million")
    return alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank


def _lookup(config: Mapping[str, Any], patterns: str, default: str, fallback: Any, module_name: str) -> Any:
    """PEFT's rule: the first key, in the order written, that matches a dotted suffix of the module's name."""
    for key, value in _table(config, patterns).items():
        if _compiled(key, patterns).match(module_name):
            return value
    value = config.get(default)
    return fallback if value is None else value


def _table(config: Mapping[str, Any], field: str) -> Mapping[str, Any]:
    table = config.get(field) or {}
    if not isinstance(table, Mapping) or len(table) > _MAX_PATTERNS:
        raise _invalid(field, f"an object of at most {_MAX_PATTERNS} entries")
    if sum(_LITERAL.fullmatch(key) is None for key in table) > _MAX_REGEXES:
        raise _invalid(field, f"an object with at most {_MAX_REGEXES} regular expressions among its keys")
    return table


@functools.lru_cache(maxsize=_MAX_PATTERNS)
def _compiled(key: str, field: str) -> re.Pattern[str]:
    refused = (
        len(key) > _PATTERN_LENGTH
        or len(_QUANTIFIER.findall(key)) > _MAX_QUANTIFIERS
        or key.count("(") > _MAX_GROUPS
        or _COSTLY_GROUP.search(key) is not None
        or _AMBIGUOUS_SET.search(key) is not None
    )
    if not refused:
        try:
            return re.compile(rf"(.*\.)?({key})$")
        except (re.error, OverflowError, RecursionError):
            refused = True
    raise ArtifactRejected(
        f"the key {shown(key)} of {field} is not a regular expression that can be matched in bounded time",
        code="invalid_peft_config",
        param=field,
    )


def _invalid(field: str, expected: str) -> ArtifactRejected:
    return ArtifactRejected(f"{field} must be {expected}", code="invalid_peft_config", param=field)
