"""Random PEFT adapters on all seven linears of a Llama base, for benchmarks only. numpy, no torch."""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

RANKS = {"a0": 8, "a1": 8, "a2": 8, "a3": 8, "a4": 16, "a5": 8}


def make_adapters(base: Path, target: Path) -> dict[str, Path]:
    """{name: artifact folder} below `target`, made once; deterministic by name."""
    config = json.loads((base / "config.json").read_text())
    return {name: _make(config, target / name, rank, seed) for seed, (name, rank) in enumerate(RANKS.items())}


def _make(config: dict[str, int], folder: Path, rank: int, seed: int) -> Path:
    if (folder / "adapter_model.safetensors").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(seed)
    tensors: dict[str, np.ndarray] = {}
    for layer in range(config["num_hidden_layers"]):
        for block, module, inputs, outputs in _linears(config):
            name = f"base_model.model.model.layers.{layer}.{block}.{module}"
            bound = 1 / np.sqrt(inputs)
            tensors[f"{name}.lora_A.weight"] = random.uniform(-bound, bound, (rank, inputs)).astype(np.float32)
            tensors[f"{name}.lora_B.weight"] = random.normal(0, 0.02, (outputs, rank)).astype(np.float32)
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": [module for _, module, _, _ in _linears(config)],
        "base_model_name_or_path": None,
        "task_type": "CAUSAL_LM",
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder


def _linears(config: dict[str, int]) -> list[tuple[str, str, int, int]]:
    """(block, module, inputs, outputs) of one layer."""
    hidden, mlp, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    head = config.get("head_dim") or hidden // heads
    kv = config["num_key_value_heads"] * head
    return [
        ("self_attn", "q_proj", hidden, heads * head),
        ("self_attn", "k_proj", hidden, kv),
        ("self_attn", "v_proj", hidden, kv),
        ("self_attn", "o_proj", heads * head, hidden),
        ("mlp", "gate_proj", hidden, mlp),
        ("mlp", "up_proj", hidden, mlp),
        ("mlp", "down_proj", mlp, hidden),
    ]
