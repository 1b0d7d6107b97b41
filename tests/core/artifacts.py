"""Builds artifacts byte by byte, so that tests can make what no library would write."""

import json
import math
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from loraplane_core.artifact.digest import CONFIG_FILE, WEIGHTS_FILE

#: A toy Llama: 2 layers, 4 heads of 8 over 2 key-value heads.
BASE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
}
IN_OUT = {
    "q_proj": (32, 32),
    "k_proj": (32, 16),
    "v_proj": (32, 16),
    "o_proj": (32, 32),
    "gate_proj": (32, 48),
    "up_proj": (32, 48),
    "down_proj": (48, 32),
}
CONFIG: dict[str, Any] = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"], "bias": "none"}
_KINDS = {"F32": "<f4", "F16": "<f2", "F64": "<f8", "I32": "<i4"}


class Tensor(NamedTuple):
    dtype: str
    shape: list[int]
    data: bytes


def tensor(values: np.ndarray, dtype: str = "F32") -> Tensor:
    if dtype == "BF16":
        bits = values.astype("<f4").view("<u4") >> 16
        return Tensor(dtype, list(values.shape), bits.astype("<u2").tobytes())
    return Tensor(dtype, list(values.shape), values.astype(_KINDS[dtype]).tobytes())


def ones(*shape: int, dtype: str = "F32") -> Tensor:
    return tensor(np.ones(shape), dtype)


def entries(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    position, found = 0, {}
    for name, (dtype, shape, data) in tensors.items():
        found[name] = {"dtype": dtype, "shape": shape, "data_offsets": [position, position + len(data)]}
        position += len(data)
    return found


def safetensors_file(header: object, data: bytes) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def safetensors(tensors: Mapping[str, Tensor]) -> bytes:
    return safetensors_file(entries(tensors), b"".join(item.data for item in tensors.values()))


def name(layer: int, module: str, half: str) -> str:
    block = "mlp" if module in ("gate_proj", "up_proj", "down_proj") else "self_attn"
    return f"base_model.model.model.layers.{layer}.{block}.{module}.lora_{half}.weight"


def lora(sites: Iterable[tuple[int, str]] = ((0, "q_proj"),), rank: int = 2, dtype: str = "F32") -> dict[str, Tensor]:
    """Pairs that fit BASE, filled with distinct small numbers."""
    found = {}
    for layer, module in sites:
        inputs, outputs = IN_OUT[module]
        for half, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
            values = (np.arange(math.prod(shape)).reshape(shape) % 7 + 1) / 8 + layer
            found[name(layer, module, half)] = tensor(values, dtype)
    return found


def write(folder: Path, tensors: Mapping[str, Tensor] | bytes, config: Mapping[str, Any] | bytes = CONFIG) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    weights = tensors if isinstance(tensors, bytes) else safetensors(tensors)
    (folder / WEIGHTS_FILE).write_bytes(weights)
    (folder / CONFIG_FILE).write_bytes(config if isinstance(config, bytes) else json.dumps(config).encode())
    return folder
