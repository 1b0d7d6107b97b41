"""adapter_config.json: which PEFT fields are served, which only inform, and which must be neutral.

Three groups of fields: those that say how the served tensors are applied (checked by value), those that
only describe the training or choose modules (the tensors' names tell the truth), and all others, known or
not, which must be neutral: whatever they ask for would otherwise be dropped silently.
"""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from loraplane_core.artifact.header import shown
from loraplane_core.errors import ArtifactRejected, InvalidJson
from loraplane_core.jsonbody import parse_object

_ADVISORY = frozenset(
    {
        # where it comes from
        "auto_mapping", "base_model_name_or_path", "inference_mode", "peft_version", "revision", "runtime_config",
        # training only
        "eva_config", "lora_dropout",
        # which modules: the tensors' names are the truth
        "exclude_modules", "layers_pattern", "layers_to_transform", "target_modules",
        # companions that mean nothing without a field that is refused
        "megatron_core", "qalora_group_size",
        # read by layout
        "alpha_pattern", "lora_alpha", "r", "rank_pattern",
    }
)  # fmt: skip
_SAFE_INITS = ("gaussian", "orthogonal", "eva")
# A name on a model hub: organisation/name. Paths begin with '.', '/' or '~' or have more or fewer parts.
_HUB_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,95}/[A-Za-z0-9][A-Za-z0-9_.-]{0,95}")


def read_config(path: Path, *, max_bytes: int) -> dict[str, Any]:
    """The config as strict JSON; raises ArtifactRejected (`too_large`, `malformed_config`)."""
    with path.open("rb") as file:
        body = file.read(max_bytes + 1)
    if len(body) > max_bytes:
        raise ArtifactRejected(f"{path.name} is larger than {max_bytes} bytes", code="too_large")
    try:
        return parse_object(body)
    except InvalidJson as error:
        raise ArtifactRejected(f"{path.name}: {error.message}", code="malformed_config", param=error.param) from error


def check_config(config: Mapping[str, Any]) -> None:
    """Raises ArtifactRejected naming the first field (in alphabetical order) that asks for what is not served."""
    if "peft_type" not in config:
        raise _unsupported("peft_type", None, 'it must be "LORA"')
    for field in sorted(config):
        _check_field(field, config[field])


def _check_field(field: str, value: Any) -> None:
    if field in _ADVISORY:
        return
    if field == "peft_type":
        served, why = value == "LORA", 'it must be "LORA"'
    elif field in _SERVED:
        is_served, why = _SERVED[field]
        served = _neutral(value) or is_served(value)
    else:
        served, why = _neutral(value), "only a neutral value (null, false, empty, 0) is accepted"
    if not served:
        raise _unsupported(field, value, why)


#: Fields that may hold something else than a neutral value: what, and why nothing else.
_SERVED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "bias": (lambda value: value == "none", "trained biases are not served"),
    # pissa, olora, corda, loftq and others train against changed base weights, so their tensors are wrong beside
    # the real base until PEFT has converted them.
    "init_lora_weights": (
        lambda value: value is True or value in _SAFE_INITS,
        "it changes the base; let PEFT convert the adapter to a plain LoRA when it is saved",
    ),
    "task_type": (lambda value: value == "CAUSAL_LM", "only causal language models are served"),
    "use_rslora": (lambda value: value is True, "it must be true or false"),
}


def _neutral(value: Any) -> bool:
    return value is None or value is False or value in ("", [], {}) or (type(value) in (int, float) and value == 0)


def _unsupported(field: str, value: Any, why: str) -> ArtifactRejected:
    # A container may be nested too deeply to print.
    text = f"a non-empty {type(value).__name__}" if isinstance(value, list | dict) else json.dumps(value)
    return ArtifactRejected(
        f"the PEFT field {shown(field)} is not supported with {shown(text)}: {why}",
        code="unsupported_peft_field",
        param=field,
    )


def base_name(config: Mapping[str, Any]) -> str | None:
    """The base that the artifact states, if it has the form of a hub name; null and paths prove nothing."""
    value = config.get("base_model_name_or_path")
    if value is None:
        return None
    if not isinstance(value, str):
        raise ArtifactRejected(
            "base_model_name_or_path must be a string or null",
            code="invalid_peft_config",
            param="base_model_name_or_path",
        )
    return value if _HUB_NAME.fullmatch(value) else None
