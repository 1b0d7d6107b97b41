"""Loading a base: what is computed as in transformers, and what is refused at the start."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from loraplane_engine.core.engine import EngineCore
from loraplane_engine.models.config import end_tokens, read_config
from loraplane_engine.models.rope import inverse_frequencies
from loraplane_engine.options import CoreOptions
from tests.engine.harness import TINY, Teacher, drive, make_base, random_prompt

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def config_of(**changes: Any) -> dict[str, Any]:
    return {**TINY, **changes}


def with_head(base: Path) -> None:
    """Give the tiny base an untied head."""
    tensors = load_file(base / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].flip(0).contiguous()
    save_file(tensors, base / "model.safetensors")


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_key_value_heads": 4},
        {"num_key_value_heads": 1},
        {"tie_word_embeddings": False},
        {"rope_theta": None, "rope_parameters": LLAMA3},
        {"rope_theta": 500000.0, "rope_scaling": {k: v for k, v in LLAMA3.items() if k != "rope_theta"}},
    ],
    ids=["gqa", "mha", "mqa", "untied", "llama3", "llama3-old-form"],
)
def test_logits_equal_transformers(tmp_path: Path, changes: dict[str, Any]) -> None:
    config = config_of(**changes)
    base = make_base(tmp_path / "base", config)
    if not config["tie_word_embeddings"]:
        with_head(base)
    ids = random_prompt(5, 100)
    theirs = LlamaForCausalLM(LlamaConfig(**config)).eval()
    theirs.load_state_dict(load_file(base / "model.safetensors"), strict=False)
    with torch.no_grad():
        expected = theirs(torch.tensor([ids])).logits[0]
    driven = drive(tmp_path, base, max_model_len=128, max_batch_tokens=24, max_sequences=2)
    teacher = Teacher(driven.core, {"r": ids})
    driven.generate("r", ids, max_tokens=1, prompt_logprobs=True)
    driven.finish("r")
    torch.testing.assert_close(teacher.all_logits("r", len(ids)), expected, atol=1e-4, rtol=1e-4)
    driven.core.close()


def test_llama3_frequencies_equal_transformers() -> None:
    config = LlamaConfig(**config_of(rope_theta=None, rope_parameters=LLAMA3))
    expected, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    torch.testing.assert_close(inverse_frequencies(16, 500000.0, LLAMA3), expected)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"attention_bias": True}, "attention_bias"),
        ({"architectures": ["MixtralForCausalLM"]}, "MixtralForCausalLM"),
        ({"num_attention_heads": 3}, "num_key_value_heads"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "yarn"),
        ({"hidden_size": 128}, "the config says"),
        ({"num_hidden_layers": 1}, "not understood"),
        ({"num_hidden_layers": 3}, "lacks the tensor"),
        ({"vocab_size": None}, "vocab_size"),
    ],
)
def test_what_is_not_understood_stops_the_start(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    base = make_base(tmp_path / "base")
    (base / "config.json").write_text(json.dumps(config_of(**changes)))
    with pytest.raises(ValueError, match=says):
        EngineCore(CoreOptions(model=str(base)))


def test_end_tokens_come_from_the_generation_config_first(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base")
    config = read_config(base)
    assert end_tokens(base, config) == {2}
    (base / "generation_config.json").write_text('{"eos_token_id": [5, 6]}')
    assert end_tokens(base, config) == {5, 6}
