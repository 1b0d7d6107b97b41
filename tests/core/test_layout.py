"""From tensor names and a PEFT config to sites, ranks and scales."""

import math
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loraplane_core.artifact.layout import MODULES, Site, TensorSpan, parse_layout, rank_of, scale_of
from loraplane_core.errors import ArtifactRejected
from tests.core.artifacts import CONFIG, IN_OUT, name

Q0 = "model.layers.0.self_attn.q_proj"


def spans(*names: str, rank: int = 2) -> dict[str, TensorSpan]:
    found = {}
    for item in names:
        module = next((module for module in MODULES if f".{module}." in item), "q_proj")
        inputs, outputs = IN_OUT[module]
        shape = (rank, inputs) if "lora_A" in item else (outputs, rank)
        found[item] = TensorSpan(item, "F32", shape, 0, 4 * math.prod(shape))
    return found


def pair(layer: int, module: str) -> list[str]:
    return [name(layer, module, "A"), name(layer, module, "B")]


def test_sites_come_by_layer_and_then_in_the_order_of_modules() -> None:
    header = spans(*pair(10, "q_proj"), *pair(2, "down_proj"), *pair(2, "q_proj"), *pair(2, "o_proj"))
    sites = [weights.site for weights in parse_layout(CONFIG, header)]
    assert sites == [Site(2, "q_proj"), Site(2, "o_proj"), Site(2, "down_proj"), Site(10, "q_proj")]


def test_names_with_and_without_prefix_and_adapter_name_are_the_same_site() -> None:
    plain = name(0, "q_proj", "A")
    for variant in (plain, plain.removeprefix("base_model.model."), plain.replace("lora_A", "lora_A.default")):
        (weights,) = parse_layout(CONFIG, spans(variant, name(0, "q_proj", "B")))
        assert weights.site == Site(0, "q_proj")
        assert weights.a.name == variant


UNKNOWN = [
    "base_model.model.lm_head.lora_A.weight",
    "base_model.model.model.embed_tokens.lora_embedding_A",
    "base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector",
    "base_model.model.model.layers.0.self_attn.q_proj.lora_B.bias",
    "base_model.model.model.layers.0.self_attn.q_proj.bias",
    "base_model.model.model.layers.0.mlp.q_proj.lora_A.weight",
    "base_model.model.model.layers.0.self_attn.up_proj.lora_A.weight",
    "base_model.model.model.layers.0.mlp.experts.0.up_proj.lora_A.weight",
    "base_model.model.model.layers.00.self_attn.q_proj.lora_A.weight",
    "base_model.model.model.layers.-1.self_attn.q_proj.lora_A.weight",
    "base_model.model.base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight",
    "base_model.model.model.layers.0.self_attn.q_proj.lora_A.a.b.weight",
    "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight\n",
    "",
]


@pytest.mark.parametrize("unknown", UNKNOWN)
def test_E19_a_tensor_that_would_not_be_used_is_named_and_refused(unknown: str) -> None:
    with pytest.raises(ArtifactRejected) as caught:
        parse_layout(CONFIG, spans(*pair(1, "q_proj"), unknown))
    assert caught.value.code == "unknown_tensor"
    assert "is not served" in caught.value.message
    assert repr(unknown) in caught.value.message


def test_E19_an_artifact_that_changes_no_module_is_refused() -> None:
    with pytest.raises(ArtifactRejected) as caught:
        parse_layout(CONFIG, {})
    assert caught.value.code == "no_lora_tensors"


@pytest.mark.parametrize("half", ["A", "B"])
def test_half_a_pair_is_refused(half: str) -> None:
    with pytest.raises(ArtifactRejected) as caught:
        parse_layout(CONFIG, spans(*pair(0, "q_proj"), name(0, "v_proj", half)))
    assert caught.value.code == "incomplete_pair"
    assert name(0, "v_proj", half) in caught.value.message


def test_two_names_for_one_half_are_refused() -> None:
    twice = name(0, "q_proj", "A").replace("lora_A", "lora_A.default")
    with pytest.raises(ArtifactRejected, match="same half"):
        parse_layout(CONFIG, spans(*pair(0, "q_proj"), twice))


def test_a_tensor_that_is_no_matrix_is_refused() -> None:
    header = spans(*pair(0, "q_proj"))
    a = name(0, "q_proj", "A")
    header[a] = header[a]._replace(shape=(2, 32, 1))
    with pytest.raises(ArtifactRejected) as caught:
        parse_layout(CONFIG, header)
    assert caught.value.code == "shape_mismatch"


@pytest.mark.parametrize(
    "config",
    [
        {**CONFIG, "r": 4},
        {**CONFIG, "r": 2, "rank_pattern": {"q_proj": 4}},
        {"peft_type": "LORA"},  # PEFT's default is 8
    ],
)
def test_a_rank_that_disagrees_with_the_config_is_refused(config: dict[str, Any]) -> None:
    with pytest.raises(ArtifactRejected) as caught:
        parse_layout(config, spans(*pair(0, "q_proj"), rank=2))
    assert caught.value.code == "rank_mismatch"


def test_halves_of_different_rank_are_refused() -> None:
    header = spans(name(0, "q_proj", "A"), rank=2) | spans(name(0, "q_proj", "B"), rank=3)
    with pytest.raises(ArtifactRejected) as caught:
        parse_layout(CONFIG, header)
    assert caught.value.code == "rank_mismatch"


@pytest.mark.parametrize(
    "advice", [["q_proj", "v_proj"], ["k_proj"], "all-linear", "all", r".*\.(q|v)_proj", None, [], {"odd": 1}]
)
def test_E22_target_modules_is_advice_and_the_tensors_are_the_truth(advice: Any) -> None:
    (weights,) = parse_layout({**CONFIG, "target_modules": advice}, spans(*pair(1, "v_proj")))
    assert weights.site == Site(1, "v_proj")


def test_E26_rslora_divides_by_the_root_of_the_rank() -> None:
    assert scale_of({"lora_alpha": 16}, Q0, 4) == 4.0
    assert scale_of({"lora_alpha": 16, "use_rslora": True}, Q0, 4) == 8.0
    assert scale_of({"lora_alpha": 16, "use_rslora": False}, Q0, 4) == 4.0


@pytest.mark.parametrize(
    ("pattern", "hit"),
    [
        ("q_proj", True),
        ("self_attn.q_proj", True),
        (r"0\.self_attn\.q_proj", True),
        ("^model.layers.0.self_attn.q_proj", True),
        (r"model\.layers\.(0|1)\.self_attn\.(q|k)_proj", True),
        (r".*\.q_proj", True),
        ("_proj", False),  # a suffix must begin at a dot
        ("q", False),
        ("k_proj", False),
        ("^q_proj", False),
        ("", False),
    ],
)
def test_E26_patterns_match_a_dotted_suffix(pattern: str, hit: bool) -> None:
    assert scale_of({"lora_alpha": 2, "alpha_pattern": {pattern: 32}}, Q0, 2) == (16.0 if hit else 1.0)
    assert rank_of({"r": 2, "rank_pattern": {pattern: 5}}, Q0) == (5 if hit else 2)


def test_E26_the_first_pattern_that_matches_wins() -> None:
    assert scale_of({"lora_alpha": 2, "alpha_pattern": {"self_attn.q_proj": 8, "q_proj": 4}}, Q0, 2) == 4.0


@pytest.mark.parametrize("alpha", [True, "16", [16], float("nan"), float("inf"), 1e7, {}])
def test_an_alpha_that_is_no_plain_number_is_refused(alpha: Any) -> None:
    with pytest.raises(ArtifactRejected) as caught:
        scale_of({"lora_alpha": alpha}, Q0, 2)
    assert caught.value.code == "invalid_peft_config"


@pytest.mark.parametrize("rank", [True, "2", 0, -1, 2.0])
def test_a_rank_that_is_no_positive_integer_is_refused(rank: Any) -> None:
    with pytest.raises(ArtifactRejected) as caught:
        rank_of({"rank_pattern": {"q_proj": rank}}, Q0)
    assert caught.value.code == "invalid_peft_config"


HOSTILE = [
    "(a+)+$",
    "(a|a)*b",
    "(?:a)+",
    "(?=a)",
    ".*.*.*.*.*x",
    "(m|m)(o|o)(d|d)(e|e)x",
    "(" * 3,
    "[",
    "[a[b]",
    "a" * 257,
]


@pytest.mark.parametrize("pattern", HOSTILE)
def test_a_pattern_that_could_run_for_ever_is_refused_before_it_runs(pattern: str) -> None:
    with pytest.raises(ArtifactRejected) as caught:
        scale_of({"alpha_pattern": {pattern: 1}}, Q0, 2)
    assert (caught.value.code, caught.value.param) == ("invalid_peft_config", "alpha_pattern")


@settings(max_examples=200)
@given(pattern=st.text(alphabet="am.odel*+?()|[]{}1,^$\\-&~", max_size=60))
def test_any_pattern_is_matched_or_refused_in_bounded_time(pattern: str) -> None:
    started = time.process_time()
    try:
        scale_of({"alpha_pattern": {pattern: 1}}, "model.layers.1000.self_attn.gate_proj", 2)
    except ArtifactRejected as error:
        assert error.code == "invalid_peft_config"
    assert time.process_time() - started < 1.0


def test_tables_of_patterns_are_bounded() -> None:
    for table in ([1], {f"a{index}.*": 1 for index in range(33)}, {f"a{index}": 1 for index in range(3000)}):
        with pytest.raises(ArtifactRejected):
            scale_of({"alpha_pattern": table}, Q0, 2)
    assert scale_of({"alpha_pattern": None, "lora_alpha": None}, Q0, 8) == 1.0  # PEFT's default alpha is 8


def test_sites_times_patterns_are_bounded() -> None:
    header = spans(*(half for layer in range(200) for module in MODULES for half in pair(layer, module)))
    patterns = {f"none_{index}": 1 for index in range(800)}
    with pytest.raises(ArtifactRejected, match="1400 sites") as caught:
        parse_layout({**CONFIG, "alpha_pattern": patterns}, header)
    assert caught.value.code == "invalid_peft_config"
    with pytest.raises(ArtifactRejected, match="object"):
        parse_layout({**CONFIG, "alpha_pattern": 5}, header)
