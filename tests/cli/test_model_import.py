"""GGUF import: equal to what transformers makes of the same file, once, and all or nothing."""

import json
import os
import signal
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from fcntl import LOCK_EX, flock
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from loraplane_cli.model_import import ModelImportError, import_gguf
from loraplane_cli.model_import.weights import to_bf16
from tests.cli.tiny_gguf import CHAT_TEMPLATE, hugging_face_weights, write_gguf

TEXTS = ["the thesis is 1234 x12", " the\n\n  it's ü 漢 🙂", "<|im_start|>user\nis<|im_end|>"]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "tiny.gguf", hugging_face_weights())


def refusal(source: Path, target: Path) -> ModelImportError:
    with pytest.raises(ModelImportError) as caught:
        import_gguf(source, target)
    return caught.value


def leftovers(target: Path) -> list[str]:
    return sorted(path.name for path in target.parent.iterdir() if path.name.startswith("."))


@contextmanager
def quiet_transformers() -> Iterator[None]:
    transformers_logging.disable_progress_bar()
    yield
    transformers_logging.enable_progress_bar()


@pytest.mark.parametrize("quantised", [False, True])
@pytest.mark.parametrize("tied", [True, False])
def test_weights_equal_transformers_loading_of_the_same_gguf(tmp_path: Path, quantised: bool, tied: bool) -> None:
    gguf = write_gguf(tmp_path / "tiny.gguf", hugging_face_weights(tied=tied), quantised=quantised)
    imported = import_gguf(gguf, tmp_path / "model")
    with quiet_transformers():
        expected = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="tiny.gguf", dtype=torch.float32)
        loaded = AutoModelForCausalLM.from_pretrained(imported.path, dtype=torch.float32)
    stored = load_file(imported.path / "model.safetensors")
    assert ("lm_head.weight" in stored) is not tied
    assert all(tensor.dtype == torch.bfloat16 for tensor in stored.values())
    for name, tensor in expected.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor.to(torch.bfloat16).float()), name
    assert loaded.config.tie_word_embeddings is tied
    assert loaded.config.rope_parameters["rope_theta"] == 50000.0
    assert loaded.config.rms_norm_eps == 1e-05
    assert (loaded.config.bos_token_id, loaded.config.eos_token_id, loaded.config.pad_token_id) == (1, 2, 2)


def test_q_and_k_rows_are_put_back_into_the_order_before_the_conversion(tmp_path: Path) -> None:
    weights = hugging_face_weights()
    imported = import_gguf(write_gguf(tmp_path / "tiny.gguf", weights), tmp_path / "model")
    stored = load_file(imported.path / "model.safetensors")
    assert stored.keys() == weights.keys()
    for name, weight in weights.items():
        assert torch.equal(stored[name], torch.from_numpy(weight).to(torch.bfloat16)), name


def test_tokenizer_gives_the_ids_that_transformers_gives_and_splits_digits(tmp_path: Path, source: Path) -> None:
    imported = import_gguf(source, tmp_path / "model")
    own = Tokenizer.from_file(str(imported.path / "tokenizer.json"))
    loaded = AutoTokenizer.from_pretrained(imported.path)
    expected = AutoTokenizer.from_pretrained(tmp_path, gguf_file="tiny.gguf")
    for text in TEXTS:
        ids = own.encode(text).ids
        assert loaded(text).input_ids == ids
        assert own.decode(ids, skip_special_tokens=False) == text
        if "12" not in text:  # transformers leaves out the digit split that the file asks for
            assert expected(text).input_ids == ids
    assert [own.id_to_token(i) for i in own.encode("x12").ids] == ["x", "1", "2"]
    assert own.encode("<|im_end|>").ids == [2]
    assert loaded.eos_token == "<|im_end|>"
    assert loaded.chat_template == CHAT_TEMPLATE
    assert json.loads((imported.path / "tokenizer_config.json").read_text())["chat_template"] == CHAT_TEMPLATE


def test_a_gguf_that_asks_for_a_leading_bos_gets_one(tmp_path: Path) -> None:
    gguf = write_gguf(tmp_path / "tiny.gguf", hugging_face_weights(), add_bos=True)
    imported = import_gguf(gguf, tmp_path / "model")
    own = Tokenizer.from_file(str(imported.path / "tokenizer.json"))
    assert own.encode("is").ids[0] == 1
    assert own.encode("is", add_special_tokens=False).ids[0] != 1


def test_bf16_rounding_equals_torch() -> None:
    specials = [0.0, -0.0, np.inf, -np.inf, 1.00390625, 1.01171875, 3.4e38, 1e-40, np.float32(1) + np.float32(2**-8)]
    noise = np.random.default_rng(1).standard_normal(20000) * 10.0 ** np.random.default_rng(2).integers(-30, 30, 20000)
    values = np.array([*specials, *noise], dtype=np.float32)
    ours = torch.from_numpy(to_bf16(values).view(np.int16)).view(torch.bfloat16)
    assert torch.equal(ours, torch.from_numpy(values).to(torch.bfloat16))
    assert np.isnan(torch.from_numpy(to_bf16(np.array([np.nan])).view(np.int16)).view(torch.bfloat16).float().numpy())


def test_progress_counts_bytes_up_to_the_total_of_every_stage(tmp_path: Path, source: Path) -> None:
    seen: dict[str, list[tuple[int, int]]] = {}
    wheel = tmp_path / "model.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(source, "package/tiny.gguf")
    import_gguf(
        wheel, tmp_path / "model", progress=lambda stage, done, total: seen.setdefault(stage, []).append((done, total))
    )
    assert list(seen) == ["hash", "unpack", "convert"]
    for steps in seen.values():
        assert steps == sorted(steps)
        assert steps[-1][0] == steps[-1][1] > 0


def test_the_same_source_again_changes_nothing_also_from_a_wheel(tmp_path: Path, source: Path) -> None:
    target = tmp_path / "models" / "tiny"
    first = import_gguf(source, target)
    before = {path.name: path.stat().st_mtime_ns for path in target.iterdir()}
    wheel = tmp_path / "tiny.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("package/__init__.py", "")
        archive.write(source, "package/tiny.gguf")
    for again in (import_gguf(source, target), import_gguf(wheel, target)):
        assert again.already_present
        assert (again.source_sha256, again.bytes) == (first.source_sha256, first.bytes)
    assert not first.already_present
    assert {path.name: path.stat().st_mtime_ns for path in target.iterdir()} == before
    assert leftovers(target) == []


def test_another_model_or_a_strange_or_damaged_folder_is_never_overwritten(tmp_path: Path, source: Path) -> None:
    target = tmp_path / "model"
    import_gguf(source, target)
    other = write_gguf(tmp_path / "other.gguf", hugging_face_weights(seed=1))
    assert refusal(other, target).code == "target_occupied"
    (target / "model.safetensors").write_bytes(b"cut")
    assert "model.safetensors" in refusal(source, target).message
    strange = tmp_path / "strange"
    strange.mkdir()
    (strange / "notes.txt").write_text("mine")
    assert refusal(source, strange).code == "target_occupied"
    assert [path.name for path in strange.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize("keep", [4, 20, 200, 3000, -4096, -32])
def test_a_file_cut_short_anywhere_is_refused_and_leaves_nothing(tmp_path: Path, source: Path, keep: int) -> None:
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(source.read_bytes()[:keep])
    assert refusal(cut, tmp_path / "model").code == "truncated_file"
    assert not (tmp_path / "model").exists()
    assert leftovers(tmp_path / "model") == []


def test_what_is_no_gguf_is_refused(tmp_path: Path, source: Path) -> None:
    text = tmp_path / "readme.gguf"
    text.write_text("not a model")
    (tmp_path / "empty.gguf").touch()
    two = tmp_path / "two.zip"
    with zipfile.ZipFile(two, "w") as archive:
        archive.write(source, "a.gguf")
        archive.write(source, "b.gguf")
    assert refusal(text, tmp_path / "model").code == "not_a_gguf"
    assert refusal(tmp_path / "empty.gguf", tmp_path / "model").code == "not_a_gguf"
    assert "a.gguf, b.gguf" in refusal(two, tmp_path / "model").message
    assert refusal(tmp_path / "absent.gguf", tmp_path / "model").code == "source_not_found"


@pytest.mark.parametrize(
    ("options", "code", "named"),
    [
        ({"architecture": "qwen2"}, "unsupported_architecture", "qwen2"),
        ({"pre_tokenizer": "tekken"}, "unsupported_model", "tekken"),
        ({"rope_scaling": "yarn"}, "unsupported_model", "yarn"),
        ({"extra_tensor": "blk.0.attn_q.bias"}, "unsupported_model", "blk.0.attn_q.bias"),
    ],
)
def test_a_model_that_would_compute_something_else_is_refused_by_name(
    tmp_path: Path, options: dict[str, Any], code: str, named: str
) -> None:
    gguf = write_gguf(tmp_path / "tiny.gguf", hugging_face_weights(), **options)
    error = refusal(gguf, tmp_path / "model")
    assert error.code == code
    assert named in error.message
    assert not (tmp_path / "model").exists()


def test_a_missing_tensor_is_refused(tmp_path: Path) -> None:
    weights = hugging_face_weights()
    del weights["model.layers.1.mlp.up_proj.weight"]
    gguf = write_gguf(tmp_path / "tiny.gguf", weights)
    assert "blk.1.ffn_up.weight" in refusal(gguf, tmp_path / "model").message


KILLED_IMPORT = """
import sys
from pathlib import Path
from loraplane_cli.model_import import import_gguf

def stop_inside(stage, done, total):
    if stage == "convert" and done * 2 > total:
        print("inside", flush=True)
        sys.stdin.read()

import_gguf(Path(sys.argv[1]), Path(sys.argv[2]), progress=stop_inside)
"""


def test_an_import_killed_in_the_middle_leaves_no_half_model_and_the_next_one_succeeds(
    tmp_path: Path, source: Path
) -> None:
    target = tmp_path / "model"
    with subprocess.Popen(
        [sys.executable, "-c", KILLED_IMPORT, str(source), str(target)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"inside\n"
        assert refusal(source, target).code == "import_in_progress"
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=30)
    assert not target.exists()
    assert leftovers(target) == [".model.importing"]
    assert not import_gguf(source, target).already_present
    assert leftovers(target) == []


def test_a_failing_disk_leaves_no_work_folder(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ModelImportError) as caught:
        import_gguf(source, tmp_path / "model")
    assert caught.value.code == "disk_full"
    assert not (tmp_path / "model").exists()
    assert leftovers(tmp_path / "model") == []


def test_the_lock_of_a_running_import_is_respected(tmp_path: Path, source: Path) -> None:
    folder = tmp_path / ".model.importing"
    folder.mkdir()
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        flock(descriptor, LOCK_EX)
        assert refusal(source, tmp_path / "model").code == "import_in_progress"
    finally:
        os.close(descriptor)
    assert import_gguf(source, tmp_path / "model").path.is_dir()
