"""PEFT itself is the oracle: what it saves passes preflight, and each module's rank and scale are the same."""

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loraplane_core.artifact.digest import CONFIG_FILE, WEIGHTS_FILE
from loraplane_core.artifact.layout import load_matrix, parse_layout, read_header
from loraplane_core.artifact.peft_config import check_config
from loraplane_core.artifact.preflight import Limits, preflight
from loraplane_core.errors import ArtifactRejected

torch = pytest.importorskip("torch", reason="the engine extra is not installed")

CONFIGS: dict[str, dict[str, Any]] = {
    "plain": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]},
    "rsLoRA": {"r": 9, "lora_alpha": 16, "use_rslora": True, "target_modules": "all-linear"},
    "patterns": {
        "r": 4,
        "lora_alpha": 16,
        "target_modules": r".*\.(q_proj|k_proj|up_proj|down_proj)",
        "rank_pattern": {"up_proj": 1, r"1\.self_attn\.q_proj": 3, "^model.layers.0.self_attn.q_proj": 7},
        "alpha_pattern": {r".*\.layers\.0\..*k_proj": 5, "q_proj": 2.5, "proj": 99},
    },
    "rsLoRA with patterns, some layers": {
        "r": 2,
        "lora_alpha": 3,
        "use_rslora": True,
        "target_modules": ["o_proj", "gate_proj"],
        "layers_to_transform": [1],
        "rank_pattern": {"o_proj": 5},
        "alpha_pattern": {"gate_proj": 7},
    },
}


def _model() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=64,
        )
    )


@pytest.mark.parametrize("case", CONFIGS)
def test_E26_ranks_and_scales_equal_pefts(case: str, tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    with warnings.catch_warnings():
        # rsLoRA with patterns and patterns that match nothing: PEFT warns, and both are meant here.
        warnings.simplefilter("ignore")
        model = get_peft_model(_model(), LoraConfig(init_lora_weights=False, task_type="CAUSAL_LM", **CONFIGS[case]))
        model.save_pretrained(tmp_path)
    expected = {
        path.removeprefix("base_model.model."): module
        for path, module in model.named_modules()
        if hasattr(module, "scaling") and hasattr(module, "lora_A")
    }
    config = json.loads((tmp_path / CONFIG_FILE).read_text())
    sites = parse_layout(config, read_header(tmp_path / WEIGHTS_FILE))

    assert {weights.site.path for weights in sites} == set(expected)
    content = (tmp_path / WEIGHTS_FILE).read_bytes()
    for weights in sites:
        module = expected[weights.site.path]
        assert weights.rank == module.r["default"]
        assert weights.scale == pytest.approx(module.scaling["default"], rel=1e-12)
        np.testing.assert_array_equal(load_matrix(content, weights.a), module.lora_A["default"].weight.detach().numpy())
        np.testing.assert_array_equal(load_matrix(content, weights.b), module.lora_B["default"].weight.detach().numpy())

    report = preflight(tmp_path, base_config=model.config.to_dict(), limits=Limits())
    assert report.sites == len(expected)
    assert report.parameters == sum(p.numel() for name, p in model.named_parameters() if "lora_" in name)


@pytest.mark.parametrize(
    ("field", "options"),
    [
        ("use_dora", {"use_dora": True}),
        ("bias", {"bias": "all"}),
        ("lora_bias", {"lora_bias": True}),
        ("modules_to_save", {"modules_to_save": ["lm_head"]}),
        ("init_lora_weights", {"init_lora_weights": "pissa"}),
        ("target_parameters", {"target_parameters": ["mlp.up_proj.weight"]}),
        ("trainable_token_indices", {"trainable_token_indices": [1, 2]}),
        ("layer_replication", {"layer_replication": [[0, 1], [0, 2]]}),
        ("alora_invocation_tokens", {"alora_invocation_tokens": [1]}),
        ("use_qalora", {"use_qalora": True}),
        ("megatron_config", {"megatron_config": {"a": 1}}),
    ],
)
def test_E20_what_peft_writes_for_an_unserved_method_is_refused_by_name(field: str, options: dict[str, Any]) -> None:
    from peft import LoraConfig

    def as_saved(**more: Any) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            raw = LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], **more).to_dict()
        return json.loads(json.dumps(raw, default=list))

    check_config(as_saved())
    with pytest.raises(ArtifactRejected) as caught:
        check_config(as_saved(**options))
    assert (caught.value.code, caught.value.param) == ("unsupported_peft_field", field)
    assert field in caught.value.message
