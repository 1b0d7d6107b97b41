"""An adapter of another base model: valid in itself, of other shapes, to be refused at registration."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

HIDDEN, LAYERS, RANK = 512, 2, 4
BASE_NAME = "example-org/other-base-1b"


def write_other_base(folder: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors: dict[str, torch.Tensor] = {}
    for layer in range(LAYERS):
        for module in ("q_proj", "v_proj"):
            stem = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            for part, shape in (("lora_A", (RANK, HIDDEN)), ("lora_B", (HIDDEN, RANK))):
                values = torch.randn(shape, generator=generator) * 0.02
                tensors[f"{stem}.{part}.weight"] = values.to(torch.bfloat16)
    folder.mkdir(parents=True, exist_ok=True)
    weights = folder / "adapter_model.safetensors"
    save_file(tensors, weights, metadata={"format": "pt"})
    weights.chmod(0o644)  # safetensors writes 0600; the services run as other users
    config = {
        "base_model_name_or_path": BASE_NAME,
        "bias": "none",
        "inference_mode": True,
        "lora_alpha": 2 * RANK,
        "lora_dropout": 0.0,
        "peft_type": "LORA",
        "r": RANK,
        "target_modules": ["q_proj", "v_proj"],
        "task_type": "CAUSAL_LM",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
