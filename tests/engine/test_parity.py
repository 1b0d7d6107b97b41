"""Logits of the real runner against PEFT, on the real base: paged cache, chunked prefill, decode, mixed batches."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

from loraplane_engine.messages import AdapterKey
from tests.engine.harness import Driven, Teacher, drive

ROOT = Path(__file__).parents[2]
MODEL = ROOT / ".loraplane/models/smollm2-135m-instruct"
DEMO = ROOT / "examples/adapters"
TOLERANCE = 3e-4
LENGTH = 12  # positions compared
PROMPT = 8  # of these come as the prompt, the rest are decoded
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
VARIANTS: dict[str, dict[str, Any]] = {
    **{f"rank-{rank}": {"r": rank, "lora_alpha": 2 * rank} for rank in (1, 3, 8, 16, 64)},
    "rslora": {"r": 16, "lora_alpha": 8, "use_rslora": True},
    "rank-pattern": {"r": 8, "lora_alpha": 8, "rank_pattern": {"q_proj": 3, r"layers\.[0-9]\.mlp\.up_proj": 12}},
    "alpha-pattern": {"r": 8, "lora_alpha": 8, "alpha_pattern": {"down_proj": 24, "layers.3.self_attn.v_proj": 2}},
    "missing-modules": {"r": 8, "lora_alpha": 16, "target_modules": ["k_proj", "up_proj"]},
}


# Real text: on random token ids the base itself is so badly conditioned that PEFT's own fp32 logits lie 1.4e-3 from
# its float64 ones.
TEXTS = (
    "<|im_start|>user\nWhat is the capital of France, and why is it so famous",
    "Write a long story about a robot who learned to paint and sold his pictures",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "The quick brown fox jumps over the lazy dog and runs away from the farm",
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face",
)


def demo_adapters() -> list[str]:
    """Trained adapters of this base; the one of another base has other shapes and is another test's."""
    return sorted(folder.name for folder in DEMO.glob("*/") if folder.name != "other-base") if DEMO.exists() else []


@dataclass
class Reference:
    truth: dict[str, list[int]]  # request -> token ids; the request is named like its adapter, or base-N
    logits: dict[str, torch.Tensor]  # request -> [LENGTH, vocabulary]
    artifacts: dict[str, Path]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """PEFT's own artifacts and PEFT's own logits, fp32."""
    assert MODEL.exists(), "the real base is missing: make model"
    folder = tmp_path_factory.mktemp("peft")
    base = LlamaForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    model: Any = None
    for name, settings in VARIANTS.items():
        config = LoraConfig(**{"target_modules": ALL, "task_type": "CAUSAL_LM", **settings})
        if model is None:
            model = get_peft_model(base, config, adapter_name=name)
        else:
            model.add_adapter(name, config)
        _randomise(model, name)
    model.save_pretrained(folder)
    artifacts = {name: folder / name for name in VARIANTS}
    for name in demo_adapters():
        model.load_adapter(DEMO / name, adapter_name=name)
        artifacts[name] = DEMO / name
    model = model.float().eval()
    names = [*artifacts, "base-0", "base-1"]
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    truth = {name: tokenizer.encode(TEXTS[i % len(TEXTS)]).ids[:LENGTH] for i, name in enumerate(names)}
    assert all(len(ids) == LENGTH for ids in truth.values())
    logits = {name: _logits(model, name if name in artifacts else None, ids) for name, ids in truth.items()}
    return Reference(truth, logits, artifacts)


def _randomise(model: PeftModel, adapter: str) -> None:
    generator = torch.Generator().manual_seed(len(adapter))
    for name, parameter in model.named_parameters():
        if f".{adapter}.weight" in name:
            bound = 1 / parameter.shape[1] ** 0.5 if "lora_A" in name else 0.03 / parameter.shape[1] ** 0.5
            with torch.no_grad():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * bound)


@torch.no_grad()
def _logits(model: Any, adapter: str | None, ids: list[int]) -> torch.Tensor:
    if adapter is None:
        with model.disable_adapter():
            return model(torch.tensor([ids])).logits[0]  # type: ignore[no-any-return]
    model.set_adapter(adapter)
    return model(torch.tensor([ids])).logits[0]  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def engine(
    reference: Reference, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Driven, dict[str, AdapterKey]]]:
    driven = drive(
        tmp_path_factory.mktemp("images"),
        MODEL,
        max_model_len=64,
        max_batch_tokens=48,  # 8 positions of each: the mixed prefill takes several steps and cuts chunks
        max_sequences=32,
        device_memory=512 << 20,
        adapter_memory=400 << 20,
        host_cache=512 << 20,
    )
    keys = {name: driven.load(folder, f"t/{name}@1") for name, folder in reference.artifacts.items()}
    assert not driven.failed
    yield driven, keys
    driven.core.close()


def run(
    engine: tuple[Driven, dict[str, AdapterKey]], reference: Reference, names: list[str]
) -> tuple[Teacher, dict[str, torch.Tensor]]:
    """Teacher-forced logits of the requests, all sent at once."""
    driven, keys = engine
    original = driven.core.base
    teacher = Teacher(driven.core, {name: reference.truth[name] for name in names})
    try:
        for name in names:
            ids = reference.truth[name][:PROMPT]
            driven.generate(name, ids, keys.get(name), max_tokens=LENGTH - PROMPT + 1, prompt_logprobs=True)
        driven.finish(*names)
    finally:
        driven.core.base = original
        for name in names:
            driven.ended.pop(name, None)
    driven.assert_everything_free()
    return teacher, {name: teacher.all_logits(name, LENGTH) for name in names}


def assert_equal(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert ours.shape == theirs.shape
    assert (ours - theirs).abs().max().item() <= TOLERANCE
    best = theirs.topk(2, dim=-1).values
    clear = best[:, 0] - best[:, 1] > 2 * TOLERANCE
    assert clear.any()
    assert torch.equal(ours.argmax(-1)[clear], theirs.argmax(-1)[clear])


@pytest.mark.parametrize("name", [*VARIANTS, "base-0"])
def test_an_adapter_alone_equals_peft(
    name: str, engine: tuple[Driven, dict[str, AdapterKey]], reference: Reference
) -> None:
    _, logits = run(engine, reference, [name])
    assert_equal(logits[name], reference.logits[name])


def test_demo_adapters_exist() -> None:
    assert not DEMO.exists() or len(demo_adapters()) >= 3


@pytest.mark.parametrize("name", demo_adapters())
def test_a_trained_adapter_alone_equals_peft(
    name: str, engine: tuple[Driven, dict[str, AdapterKey]], reference: Reference
) -> None:
    _, logits = run(engine, reference, [name])
    assert_equal(logits[name], reference.logits[name])


def test_all_mixed_in_one_batch_equal_peft(engine: tuple[Driven, dict[str, AdapterKey]], reference: Reference) -> None:
    names = list(reference.truth)
    teacher, logits = run(engine, reference, names)
    for name in names:
        assert_equal(logits[name], reference.logits[name])
    decoding = [batch for batch in teacher.batches if all(chunk.tokens == 1 for chunk in batch.chunks)]
    assert max(len(batch.chunks) for batch in decoding) == len(names)  # they really shared steps
    assert any(chunk.start > 0 and chunk.tokens > 1 for batch in teacher.batches for chunk in batch.chunks)  # cut
    mixed = [batch for batch in teacher.batches if {chunk.tokens > 1 for chunk in batch.chunks} == {True, False}]
    assert mixed  # prefill and decode in one batch


def test_adapters_differ_from_the_base_and_from_each_other(
    engine: tuple[Driven, dict[str, AdapterKey]], reference: Reference
) -> None:
    """The comparison with PEFT means nothing when an adapter does nothing."""
    driven, keys = engine
    shown: dict[str, torch.Tensor] = {}
    ids = reference.truth["base-0"]
    for name in ["base", *keys]:
        original = driven.core.base
        teacher = Teacher(driven.core, {name: ids})
        driven.generate(name, ids, keys.get(name), max_tokens=1)
        driven.finish(name)
        driven.core.base = original
        shown[name] = teacher.logits[name][LENGTH - 1]
        driven.ended.pop(name)
    names = list(shown)
    for index, one in enumerate(names):
        for other in names[index + 1 :]:
            assert (shown[one] - shown[other]).abs().max() > 100 * TOLERANCE, (one, other)


def test_the_variants_are_what_they_say(reference: Reference) -> None:
    config = json.loads((reference.artifacts["rslora"] / "adapter_config.json").read_text())
    assert config["use_rslora"] is True
    assert json.loads((reference.artifacts["rank-pattern"] / "adapter_config.json").read_text())["rank_pattern"]
