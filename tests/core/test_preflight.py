"""What an artifact must pass before it is registered, rule by rule."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loraplane_core.artifact import preflight as module_under_test
from loraplane_core.artifact.digest import CONFIG_FILE, WEIGHTS_FILE, artifact_digest
from loraplane_core.artifact.preflight import BaseShapes, Limits, PreflightReport, base_evidence, preflight
from loraplane_core.errors import ArtifactRejected, BaseModelMismatch, InvalidParameter
from tests.core.artifacts import BASE, CONFIG, IN_OUT, Tensor, lora, name, ones, safetensors, tensor, write

ALL_SITES = [(layer, module) for layer in (0, 1) for module in IN_OUT]


def check(folder: Path, **limits: int) -> PreflightReport:
    return preflight(folder, base_config=BASE, limits=Limits(**limits))


def rejection(folder: Path, **limits: int) -> ArtifactRejected:
    with pytest.raises(ArtifactRejected) as caught:
        check(folder, **limits)
    assert caught.value.status == 422
    return caught.value


@pytest.mark.parametrize(("dtype", "called"), [("F32", "float32"), ("F16", "float16"), ("BF16", "bfloat16")])
def test_a_good_artifact_is_described(dtype: str, called: str, tmp_path: Path) -> None:
    config = {**CONFIG, "base_model_name_or_path": "org/toy"}
    folder = write(tmp_path, lora(ALL_SITES, dtype=dtype), config)
    report = check(folder)
    assert report == PreflightReport(
        digest=artifact_digest(folder),
        bytes=sum((folder / file).stat().st_size for file in (CONFIG_FILE, WEIGHTS_FILE)),
        rank=2,
        target_modules=list(IN_OUT),
        dtype=called,
        base_name="org/toy",
        sites=14,
        parameters=2 * sum(2 * (inputs + outputs) for inputs, outputs in IN_OUT.values()),
    )


def test_mixed_ranks_and_dtypes_and_missing_modules_are_accepted(tmp_path: Path) -> None:
    tensors = lora([(0, "k_proj")], rank=1) | lora([(1, "up_proj")], rank=5, dtype="BF16")
    report = check(write(tmp_path, tensors, {**CONFIG, "r": 5, "rank_pattern": {"k_proj": 1}}))
    assert (report.rank, report.dtype, report.target_modules) == (5, "mixed", ["k_proj", "up_proj"])


def test_other_files_are_ignored(tmp_path: Path) -> None:
    folder = write(tmp_path, lora())
    alone = check(folder)
    (folder / "README.md").write_text("hello")
    (folder / "optimizer.pt").write_bytes(b"\x80\x04.")
    (folder / "link").symlink_to("/etc/passwd")
    assert check(folder) == alone


# --- files ---


@pytest.mark.parametrize("missing", [CONFIG_FILE, WEIGHTS_FILE])
def test_a_missing_file_is_named(missing: str, tmp_path: Path) -> None:
    folder = write(tmp_path, lora())
    (folder / missing).unlink()
    error = rejection(folder)
    assert error.code == "missing_file"
    assert missing in error.message
    for nowhere in (tmp_path / "nowhere", folder / next(folder.iterdir()).name):
        assert rejection(nowhere).code == "missing_file"


@pytest.mark.parametrize("file", ["adapter_model.bin", "adapter_model.pt", "weights.PTH", "adapter_model.pkl"])
def test_E37_pickled_weights_are_refused_unopened(file: str, tmp_path: Path) -> None:
    folder = write(tmp_path, lora())
    (folder / WEIGHTS_FILE).rename(folder / file)
    error = rejection(folder)
    assert error.code == "unsafe_format"
    assert file in error.message


@pytest.mark.parametrize("file", [CONFIG_FILE, WEIGHTS_FILE])
@pytest.mark.parametrize("inside", [True, False])
def test_G82_a_linked_file_is_refused(file: str, inside: bool, tmp_path: Path) -> None:
    folder = write(tmp_path / "artifact", lora())
    target = (folder if inside else tmp_path) / "elsewhere"
    (folder / file).rename(target)
    (folder / file).symlink_to(target)
    error = rejection(folder)
    assert error.code == "unsafe_path"
    assert file in error.message


def test_G82_a_pipe_is_refused_without_waiting_for_a_writer(tmp_path: Path) -> None:
    folder = write(tmp_path, lora())
    (folder / CONFIG_FILE).unlink()
    os.mkfifo(folder / CONFIG_FILE)
    assert rejection(folder).code == "unsafe_path"


def test_each_file_has_its_own_size_limit(tmp_path: Path) -> None:
    folder = write(tmp_path, lora())
    weights, config = ((folder / file).stat().st_size for file in (WEIGHTS_FILE, CONFIG_FILE))
    check(folder, max_bytes=weights, max_config_bytes=config)
    assert WEIGHTS_FILE in rejection(folder, max_bytes=weights - 1).message
    error = rejection(folder, max_config_bytes=config - 1)
    assert CONFIG_FILE in error.message
    assert error.code == "too_large"


# --- config ---


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"{", b'{"r": NaN}', b'{"r": 1, "r": 2}', b"\xff{}", b'{"a":' * 60_000, b"{} {}"]
)
def test_a_config_that_is_not_strict_json_is_refused(body: bytes, tmp_path: Path) -> None:
    assert rejection(write(tmp_path, lora(), body)).code == "malformed_config"


NEUTRAL: list[Any] = [None, False, 0, 0.0, "", [], {}]
OTHERS: list[Any] = [True, 1, -0.5, "x", ["x"], {"x": 1}, [None], {"x": None}]


@pytest.mark.parametrize(
    "field", ["use_dora", "modules_to_save", "lora_bias", "a_field_of_peft_9", "monteclora_config"]
)
def test_E20_unserved_and_unknown_fields_pass_when_neutral_and_are_refused_by_name_otherwise(
    field: str, tmp_path: Path
) -> None:
    for value in NEUTRAL:
        check(write(tmp_path, lora(), {**CONFIG, field: value}))
    for value in OTHERS:
        error = rejection(write(tmp_path, lora(), {**CONFIG, field: value}))
        assert (error.code, error.param) == ("unsupported_peft_field", field)
        assert field in error.message


@pytest.mark.parametrize(
    ("field", "served", "refused"),
    [
        ("bias", ["none", *NEUTRAL], ["all", "lora_only", True]),
        ("init_lora_weights", [True, False, "gaussian", "orthogonal", "eva"], ["pissa", "pissa_niter_4", "olora", 1]),
        ("init_lora_weights", [None], ["corda", "loftq", "lora_ga", "mica"]),
        ("task_type", ["CAUSAL_LM", None], ["SEQ_CLS", "SEQ_2_SEQ_LM", "TOKEN_CLS"]),
        ("use_rslora", [True, False, None], ["true", 1, "False"]),
        ("peft_type", ["LORA"], [None, "", "lora", "ADALORA", "IA3"]),
        ("lora_dropout", [0.0, 0.1], []),
        ("layers_to_transform", [None, [0], 0], []),
        ("exclude_modules", [None, ["lm_head"], ".*mlp.*"], []),
        ("revision", [None, "main", "0f3c"], []),
        ("qalora_group_size", [16], []),
        ("megatron_core", ["megatron.core"], []),
        ("fan_in_fan_out", [False], [True]),
    ],
)
def test_each_field_of_peft_has_its_values(field: str, served: list[Any], refused: list[Any], tmp_path: Path) -> None:
    for value in served:
        check(write(tmp_path, lora(), {**CONFIG, field: value}))
    for value in refused:
        error = rejection(write(tmp_path, lora(), {**CONFIG, field: value}))
        assert (error.code, error.param) == ("unsupported_peft_field", field)


def test_a_config_without_peft_type_is_refused(tmp_path: Path) -> None:
    config = {key: value for key, value in CONFIG.items() if key != "peft_type"}
    assert rejection(write(tmp_path, lora(), config)).param == "peft_type"


# --- tensors ---


def test_O13_an_artifact_that_no_engine_could_load_fails_at_registration(tmp_path: Path) -> None:
    cut = safetensors(lora(ALL_SITES))[:-1]
    assert rejection(write(tmp_path, cut)).code == "malformed_weights"


@pytest.mark.parametrize(
    "extra",
    [
        "base_model.model.lm_head.weight",
        "base_model.model.model.embed_tokens.weight",
        "base_model.model.model.embed_tokens.lora_embedding_A",
        "base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector",
    ],
)
def test_E20_full_modules_and_other_methods_tensors_are_refused_by_name(extra: str, tmp_path: Path) -> None:
    error = rejection(write(tmp_path, lora() | {extra: ones(2, 2)}))
    assert error.code == "unknown_tensor"
    assert extra in error.message


@pytest.mark.parametrize(("half", "shape"), [("A", (2, 31)), ("B", (48, 2)), ("A", (2, 32, 1)), ("B", (64,))])
def test_a_shape_that_does_not_fit_the_base_is_named_with_both_shapes(
    half: str, shape: tuple[int, ...], tmp_path: Path
) -> None:
    tensors = lora() | {name(0, "q_proj", half): ones(*shape)}
    error = rejection(write(tmp_path, tensors))
    assert error.code == "shape_mismatch"
    assert name(0, "q_proj", half) in error.message
    assert str(list(shape)) in error.message


@pytest.mark.parametrize("module", IN_OUT)
def test_every_linear_is_checked_against_the_base(module: str, tmp_path: Path) -> None:
    folder = write(tmp_path, lora([(1, module)]))
    check(folder)
    other = {**BASE, "hidden_size": 40, "intermediate_size": 56, "num_key_value_heads": 1, "head_dim": 9}
    with pytest.raises(ArtifactRejected, match="shape"):
        preflight(folder, base_config=other, limits=Limits())


def test_a_layer_beyond_the_base_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path, lora([(2, "q_proj")]))
    error = rejection(folder)
    assert error.code == "shape_mismatch"
    assert "layer 2" in error.message
    preflight(folder, base_config=None, limits=Limits())  # the base is not known yet: nothing to compare with


@pytest.mark.parametrize(
    ("config", "key_value", "query"),
    [
        (BASE, 16, 32),
        ({**BASE, "num_key_value_heads": None}, 32, 32),
        ({**BASE, "head_dim": 16}, 32, 64),
    ],
)
def test_shapes_of_a_base_follow_its_config(config: dict[str, Any], key_value: int, query: int) -> None:
    shapes = BaseShapes.of(config)
    assert (shapes.key_value, shapes.query) == (key_value, query)
    assert shapes.in_out("q_proj") == (32, query)
    assert shapes.in_out("o_proj") == (query, 32)
    assert shapes.in_out("k_proj") == shapes.in_out("v_proj") == (32, key_value)
    assert shapes.in_out("gate_proj") == shapes.in_out("up_proj") == shapes.in_out("down_proj")[::-1] == (32, 48)


@pytest.mark.parametrize("broken", [{}, {**BASE, "hidden_size": "32"}, {**BASE, "num_hidden_layers": 0}])
def test_a_base_config_without_sizes_is_not_the_artifacts_fault(broken: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(InvalidParameter):
        preflight(write(tmp_path, lora()), base_config=broken, limits=Limits())


def test_a_rank_above_the_limit_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path, lora(rank=9), {**CONFIG, "r": 9})
    check(folder, max_rank=9)
    error = rejection(folder, max_rank=8)
    assert error.code == "rank_too_high"
    assert "rank 9" in error.message


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("half", ["A", "B"])
def test_nan_and_infinity_are_refused_in_every_dtype_and_place(
    dtype: str, value: float, half: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module_under_test, "_CHUNK", 16)  # many chunks
    tensors = lora(ALL_SITES, dtype=dtype)
    target = name(1, "down_proj", half)
    values = np.ones(tensors[target].shape)
    values.flat[-1] = value
    error = rejection(write(tmp_path, tensors | {target: tensor(values, dtype)}))
    assert error.code == "not_finite"
    assert target in error.message


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_the_largest_and_smallest_numbers_of_a_dtype_are_finite(dtype: str, tmp_path: Path) -> None:
    bits = {"F32": [0x7F7FFFFF, 1, 0x80000001], "F16": [0x7BFF, 1, 0x8001], "BF16": [0x7F7F, 1, 0x8001]}[dtype]
    width = 4 if dtype == "F32" else 2
    tensors = lora(dtype=dtype)
    target = name(0, "q_proj", "A")
    data = b"".join(bit.to_bytes(width, "little") for bit in bits)
    data += tensors[target].data[len(data) :]
    check(write(tmp_path, tensors | {target: Tensor(dtype, tensors[target].shape, data)}))


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("half", ["A", "B"])
@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_E19_an_adapter_whose_updates_are_all_zero_is_dead(dtype: str, half: str, zero: float, tmp_path: Path) -> None:
    tensors = lora([(0, "q_proj"), (1, "q_proj")], dtype=dtype)
    tensors[name(0, "q_proj", half)] = tensor(np.full(tensors[name(0, "q_proj", half)].shape, zero), dtype)
    check(write(tmp_path, tensors))  # the other site still changes the answers
    tensors[name(1, "q_proj", half)] = tensor(np.full(tensors[name(1, "q_proj", half)].shape, zero), dtype)
    assert rejection(write(tmp_path, tensors)).code == "dead_adapter"


def test_E19_an_adapter_scaled_by_zero_is_dead(tmp_path: Path) -> None:
    assert rejection(write(tmp_path, lora(), {**CONFIG, "lora_alpha": 0})).code == "dead_adapter"


# --- base ---


@pytest.mark.parametrize(
    ("stated", "hub_name"),
    [
        ("org/toy", "org/toy"),
        ("HuggingFaceTB/SmolLM2-135M-Instruct", "HuggingFaceTB/SmolLM2-135M-Instruct"),
        (None, None),
        ("", None),
        ("/models/toy", None),
        ("./models/toy", None),
        ("../toy", None),
        ("~/toy", None),
        ("C:\\models\\toy", None),
        ("toy", None),
        ("a/b/c", None),
        ("org/toy/", None),
    ],
)
def test_only_a_hub_like_name_is_evidence(stated: str | None, hub_name: str | None, tmp_path: Path) -> None:
    report = check(write(tmp_path, lora(), {**CONFIG, "base_model_name_or_path": stated}))
    assert report.base_name == hub_name


def test_a_base_name_that_is_no_text_is_refused(tmp_path: Path) -> None:
    error = rejection(write(tmp_path, lora(), {**CONFIG, "base_model_name_or_path": ["org/toy"]}))
    assert (error.code, error.param) == ("invalid_peft_config", "base_model_name_or_path")


def test_the_stated_base_must_be_the_pools_or_an_alias(tmp_path: Path) -> None:
    stated = check(write(tmp_path / "a", lora(), {**CONFIG, "base_model_name_or_path": "org/toy"})).base_name
    silent = check(write(tmp_path / "b", lora())).base_name
    assert base_evidence(stated, ["org/toy"]) == "artifact"
    assert base_evidence(stated, ["toy", "x/y", "org/toy"]) == "artifact"
    assert base_evidence(silent, ["toy"]) == "declared"
    with pytest.raises(BaseModelMismatch, match="org/toy"):
        base_evidence(stated, ["toy", "org/Toy"])


def test_another_stated_base_is_the_reason_before_any_shape(tmp_path: Path) -> None:
    folder = write(tmp_path, lora(), {**CONFIG, "base_model_name_or_path": "org/other"})
    narrow = {**BASE, "hidden_size": 2}
    with pytest.raises(BaseModelMismatch, match="org/other"):
        preflight(folder, base_config=narrow, limits=Limits(), base_names=["toy", "org/toy"])


def test_core_reads_artifacts_and_resources_without_torch_and_without_yaml() -> None:
    script = (
        "import sys, loraplane_core.artifact.preflight\n"
        "import loraplane_core.resources.documents, loraplane_core.resources.crds\n"
        "print(sorted({'torch', 'yaml', 'safetensors', 'transformers', 'peft'} & set(sys.modules)))"
    )
    found = subprocess.run([sys.executable, "-P", "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert found.stdout.strip() == "[]"
