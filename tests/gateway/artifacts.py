"""Small adapters for a tiny Llama base, written without torch."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

#: Two layers, hidden 16, MLP 32, 4 heads of 4, 2 key-value heads.
BASE_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
}
BASE_NAME = "tiny-llama"
BASE_ALIAS = "test-org/tiny-llama"
BASE_DIGEST = "b" * 64


def write_adapter(
    folder: Path, *, seed: int = 0, rank: int = 4, hidden: int = 16, base: str | None = BASE_ALIAS, **config: Any
) -> Path:
    """A q_proj adapter of both layers; `config` adds or replaces fields of adapter_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(seed)
    tensors = {}
    for layer in range(2):
        site = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        tensors[f"{site}.lora_A.weight"] = random.standard_normal((rank, hidden)).astype(np.float32)
        tensors[f"{site}.lora_B.weight"] = random.standard_normal((hidden, rank)).astype(np.float32)
    save_file(tensors, folder / "adapter_model.safetensors")
    fields = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": ["q_proj"],
        "bias": "none",
        "inference_mode": True,
    }
    (folder / "adapter_config.json").write_text(json.dumps({**fields, **config}))
    return folder
