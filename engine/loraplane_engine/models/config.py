"""config.json of a base model, checked: what is not implemented is refused at the start, not served wrongly."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec


class BaseConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The fields that the Llama family needs, with the names of the checkpoint."""

    architectures: list[str]
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    vocab_size: int
    rms_norm_eps: float
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    max_position_embeddings: int = 2048
    tie_word_embeddings: bool = False
    rope_theta: float | None = None
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None
    hidden_act: str = "silu"
    attention_bias: bool = False
    mlp_bias: bool = False
    eos_token_id: int | list[int] | None = None

    @property
    def kv_heads(self) -> int:
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def head_width(self) -> int:
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def rope(self) -> tuple[float, Mapping[str, Any]]:
        """(theta, scaling), from the new or the old form of the fields."""
        scaling = self.rope_parameters or self.rope_scaling or {}
        return float(scaling.get("rope_theta") or self.rope_theta or 10000.0), scaling


def read_config(folder: Path) -> BaseConfig:
    """Raises ValueError naming the field at fault."""
    try:
        config = msgspec.json.decode((folder / "config.json").read_bytes(), type=BaseConfig)
    except msgspec.MsgspecError as error:
        raise ValueError(f"{folder / 'config.json'}: {error}") from error
    if config.hidden_act != "silu":
        raise ValueError(f"hidden_act {config.hidden_act!r} is not supported, only 'silu'")
    if config.attention_bias or config.mlp_bias:
        raise ValueError("attention_bias and mlp_bias are not supported")
    if config.num_attention_heads % config.kv_heads:
        raise ValueError("num_attention_heads must be a multiple of num_key_value_heads")
    return config


def end_tokens(folder: Path, config: BaseConfig) -> frozenset[int]:
    """Ids that end a sequence; generation_config.json, when it is there, is the truth."""
    value: object = config.eos_token_id
    path = folder / "generation_config.json"
    if path.exists():
        value = json.loads(path.read_bytes()).get("eos_token_id", value)
    if value is None:
        return frozenset()
    return frozenset(value if isinstance(value, list) else [value])
