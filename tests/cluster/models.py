"""The bases of the cluster tests: the real example model, and a tiny one for engines without a model."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from tests.core import artifacts

MODEL_CLAIM = "models"
REAL_BASE: dict[str, Any] = {
    "name": "smollm2-135m-instruct",
    "aliases": ["HuggingFaceTB/SmolLM2-135M-Instruct"],
    "uri": "file:smollm2-135m-instruct",
}
TINY_BASE: dict[str, Any] = {"name": "tiny", "uri": "file:tiny"}
_REAL = Path(__file__).parents[2] / ".loraplane" / "models" / "smollm2-135m-instruct"


def model_root(folder: Path) -> None:
    """What the claim holds. The tiny base has a config and no weights to speak of."""
    tiny = folder / "tiny"
    tiny.mkdir(parents=True, exist_ok=True)
    config = {**artifacts.BASE, "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 64}
    (tiny / "config.json").write_text(json.dumps(config))
    save_file({"model.norm.weight": np.ones(32, dtype=np.float32)}, tiny / "model.safetensors")
    real = folder / _REAL.name
    if not real.exists():
        real.symlink_to(_REAL)


def tiny_adapter(folder: Path, number: int = 0) -> Path:
    """An artifact for the tiny base; every number has other bytes, so another digest."""
    tensors = artifacts.lora(rank=2)
    name = artifacts.name(0, "q_proj", "A")
    values = np.arange(64, dtype=np.float32).reshape(2, 32) / 64
    values[0, 0] = number + 1
    return artifacts.write(folder, {**tensors, name: artifacts.tensor(values)})
