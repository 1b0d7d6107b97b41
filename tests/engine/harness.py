"""What the core's tests share: a tiny base, PEFT artifacts made by hand, an EngineCore driven step by step."""

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from loraplane_core.artifact.layout import rank_of
from loraplane_engine.adapters.image import Layout, convert
from loraplane_engine.core.engine import EngineCore
from loraplane_engine.core.runner import Runner
from loraplane_engine.core.sampling import Sampled, SampleRow, sample
from loraplane_engine.core.words import Batch
from loraplane_engine.memory.arena import Arena
from loraplane_engine.messages import (
    AdapterFailed,
    AdapterKey,
    AdapterState,
    FromCore,
    Generate,
    LoadAdapter,
    MarkAdapter,
    Output,
    RequestFailed,
    SamplingParams,
    StepStats,
)
from loraplane_engine.options import CoreOptions

TINY = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 256,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
}
#: Bytes of one page of the tiny base's arena in float32.
PAGE = 8192
DEADLINE = 20.0

# Spinning OpenMP threads of many test processes on few cores cost more than they bring.
torch.set_num_threads(1)


def linears(config: Mapping[str, Any]) -> list[tuple[str, str, int, int]]:
    """(block, module, inputs, outputs) of one layer."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    q = config["num_attention_heads"] * config["head_dim"]
    kv = config["num_key_value_heads"] * config["head_dim"]
    return [
        ("self_attn", "q_proj", hidden, q),
        ("self_attn", "k_proj", hidden, kv),
        ("self_attn", "v_proj", hidden, kv),
        ("self_attn", "o_proj", q, hidden),
        ("mlp", "gate_proj", hidden, inner),
        ("mlp", "up_proj", hidden, inner),
        ("mlp", "down_proj", inner, hidden),
    ]


def make_base(folder: Path, config: Mapping[str, Any] = TINY) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    random = torch.Generator().manual_seed(7)
    hidden = config["hidden_size"]
    tensors = {"model.embed_tokens.weight": torch.randn(config["vocab_size"], hidden, generator=random) * 0.5}
    for layer in range(config["num_hidden_layers"]):
        name = f"model.layers.{layer}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{name}.{norm}.weight"] = 1 + 0.1 * torch.randn(hidden, generator=random)
        for block, module, inputs, outputs in linears(config):
            weight = torch.randn(outputs, inputs, generator=random) / inputs**0.5
            tensors[f"{name}.{block}.{module}.weight"] = weight
    tensors["model.norm.weight"] = torch.ones(hidden)
    save_file(tensors, folder / "model.safetensors")
    return folder


def make_artifact(
    folder: Path,
    *,
    seed: int = 0,
    rank: int = 4,
    base: Mapping[str, Any] = TINY,
    modules: tuple[str, ...] | None = None,
    dtype: torch.dtype = torch.float32,
    **settings: Any,
) -> Path:
    """A random artifact; `settings` go into adapter_config.json (rank_pattern, use_rslora, ...)."""
    folder.mkdir(parents=True)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, **settings}
    random = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(base["num_hidden_layers"]):
        for block, module, inputs, outputs in linears(base):
            if modules is not None and module not in modules:
                continue
            path = f"model.layers.{layer}.{block}.{module}"
            r = rank_of(config, path)
            name = f"base_model.model.{path}"
            tensors[f"{name}.lora_A.weight"] = (torch.randn(r, inputs, generator=random) / inputs**0.5).to(dtype)
            tensors[f"{name}.lora_B.weight"] = (torch.randn(outputs, r, generator=random) * 0.3).to(dtype)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


class PoisonedArena(Arena):
    """Pages are full of NaN from the start and again after every release: any read of what is not owned shows."""

    def __init__(self, pages: int, **shape: Any) -> None:
        super().__init__(pages, **shape)
        self.bytes.fill_(0xFF)

    def free_blocks(self, pages: Any) -> None:
        super().free_blocks(pages)
        self._poison(pages)

    def free_runs(self, pages: Any) -> None:
        super().free_runs(pages)
        self._poison(pages)

    def _poison(self, pages: Any) -> None:
        for page in pages:
            self.by_page[page].fill_(0xFF)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Driven:
    """An EngineCore with everything it has said so far, by request."""

    core: EngineCore
    folder: Path
    said: list[FromCore] = field(default_factory=list)
    tokens: dict[str, list[int]] = field(default_factory=dict)
    ended: dict[str, Output | RequestFailed] = field(default_factory=dict)
    states: dict[AdapterKey, AdapterState] = field(default_factory=dict)
    failed: dict[AdapterKey, AdapterFailed] = field(default_factory=dict)
    stats: StepStats | None = None
    before_step: Callable[[], None] = lambda: None

    def drain(self) -> list[FromCore]:
        new, self.core.outputs[:] = list(self.core.outputs), []
        self.said += new
        for message in new:
            match message:
                case Output():
                    self.tokens.setdefault(message.request, []).extend(message.tokens)
                    if message.finish is not None:
                        assert message.request not in self.ended, "a request ended twice"
                        self.ended[message.request] = message
                case RequestFailed():
                    assert message.request not in self.ended, "a request ended twice"
                    self.ended[message.request] = message
                case AdapterState():
                    self.states[message.key] = message
                case AdapterFailed():
                    self.failed[message.key] = message
                case StepStats():
                    self.stats = message
        return new

    def step(self) -> bool:
        self.before_step()
        worked = self.core.step()
        self.drain()
        return worked

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + DEADLINE
        while not condition():
            assert time.monotonic() < deadline, "the condition was not reached in time"
            self.step()

    def load(
        self,
        artifact: Path,
        ref: str,
        *,
        pinned: bool = False,
        warm_wanted: bool = False,
        wait: bool = True,
        wait_s: float = 0.0,
    ) -> AdapterKey:
        image = self.folder / f"{artifact.name}.image"
        manifest = convert(artifact, image, self.core.base.layout)
        key = AdapterKey(ref, manifest.digest)
        self.core.handle(LoadAdapter(key=key, image=str(image), warm_wanted=warm_wanted, wait_s=wait_s))
        if wait:
            self.until(lambda: not self.core.residency.loading)
        if pinned:
            self.mark(key, pinned=True)
        self.drain()
        return key

    def mark(self, key: AdapterKey, *, pinned: bool | None = None, warm_wanted: bool | None = None) -> None:
        self.failed.pop(key, None)
        self.core.handle(MarkAdapter(key=key, pinned=pinned, warm_wanted=warm_wanted))
        self.drain()

    def generate(
        self,
        request: str,
        prompt: list[int],
        adapter: AdapterKey | None = None,
        *,
        tenant: str | None = None,
        **params: Any,
    ) -> None:
        settings = {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True, **params}
        self.core.handle(
            Generate(
                request=request,
                adapter=adapter,
                tenant=tenant or (adapter.ref.partition("/")[0] if adapter else "base"),
                prompt=prompt,
                sampling=SamplingParams(**settings),
            )
        )

    def finish(self, *requests: str) -> None:
        self.until(lambda: all(request in self.ended for request in requests))

    def complete(self, prompt: list[int], adapter: AdapterKey | None = None, **params: Any) -> list[int]:
        """Run one request to its end."""
        request = f"one-{len(self.ended)}"
        self.generate(request, prompt, adapter, **params)
        self.finish(request)
        assert isinstance(self.ended[request], Output), self.ended[request]
        return self.tokens.get(request, [])

    def assert_everything_free(self) -> None:
        """No request is left anywhere, and only adapters hold pages."""
        core = self.core
        assert not core.scheduler.running and not core.scheduler.waiting.waiting
        assert core.base.arena.pages.used["kv"] == 0
        held = sum(image.pages for image in core.residency.images.values() if image.row is not None)
        assert core.base.arena.pages.used["adapter"] == held
        assert not any(adapter.requests for adapter in core.residency.adapters.values())
        assert not any(image.running for image in core.residency.images.values())


def drive(folder: Path, base: Path, *, arena_type: type[Arena] = PoisonedArena, **options: Any) -> Driven:
    clock = options.pop("clock", time.monotonic)
    core = EngineCore(CoreOptions(model=str(base), **options), arena_type=arena_type, clock=clock)
    return Driven(core, folder)


Make = Callable[..., Driven]


def pages_of(engine: Driven, key: AdapterKey) -> int:
    return engine.core.residency.images[key.digest].pages


def failure(engine: Driven, request: str) -> RequestFailed:
    ended = engine.ended[request]
    assert isinstance(ended, RequestFailed)
    return ended


def fill_with_kv(engine: Driven, clock: Clock) -> None:
    """Requests for the base take what adapters leave of the device; time passes by steps from now on."""
    ticking(engine, clock)
    for number in range(4):
        engine.generate(f"base{number}", random_prompt(number, 30), max_tokens=90)
    while engine.core.base.arena.pages.free > 1:
        engine.step()


def ticking(engine: Driven, clock: Clock, seconds: float = 0.1) -> None:
    """Time passes by steps."""

    def tick() -> None:
        clock.now += seconds

    engine.before_step = tick


class Teacher:
    """Stands between the core and its runner and sampler: records logits, and forces the tokens of `truth`."""

    def __init__(self, core: EngineCore, truth: Mapping[str, list[int]]) -> None:
        self._inner: Runner = core.base.runner
        self._truth = truth
        self._sampling: list[str] = []
        self.logits: dict[str, dict[int, torch.Tensor]] = {request: {} for request in truth}
        self.batches: list[Batch] = []
        core.base = replace(core.base, runner=self)  # type: ignore[arg-type]
        core._sampler = self.sample

    def forward(self, batch: Batch) -> tuple[torch.Tensor, list[slice]]:
        logits, slices = self._inner.forward(batch)
        self.batches.append(batch)
        self._sampling = [chunk.sequence.request for chunk in batch.chunks if chunk.samples]
        for chunk, wanted in zip(batch.chunks, slices, strict=True):
            rows = logits[wanted]
            end = chunk.start + chunk.tokens
            for index, row in enumerate(rows):
                self.logits[chunk.sequence.request][end - len(rows) + index] = row.clone()
        return logits, slices

    def sample(self, logits: torch.Tensor, rows: list[SampleRow]) -> Sampled:
        sampled = sample(logits, rows)
        for index, request in enumerate(self._sampling):
            position = max(self.logits[request]) + 1
            if position < len(self._truth[request]):
                sampled.tokens[index] = self._truth[request][position]
        return sampled

    def all_logits(self, request: str, length: int) -> torch.Tensor:
        return torch.stack([self.logits[request][position] for position in range(length)])


def layout_of(core: EngineCore) -> Layout:
    return core.base.layout


def random_prompt(seed: int, length: int, vocabulary: int = 256) -> list[int]:
    found: list[int] = np.random.default_rng(seed).integers(3, vocabulary, length).tolist()
    return found
