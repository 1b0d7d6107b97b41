"""The core driven step by step on a tiny base: requests, their ends, and failures."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from loraplane_engine.core.engine import EngineCore
from loraplane_engine.core.sampling import SampleRow, sample
from loraplane_engine.messages import (
    Abort,
    AdapterKey,
    CoreReady,
    Output,
    RequestFailed,
    Scheduled,
    Shutdown,
)
from loraplane_engine.options import CoreOptions
from tests.engine.harness import PAGE, Clock, Driven, drive, failure, make_artifact, random_prompt


def test_the_first_word_is_what_the_server_needs_to_know(engine: Driven) -> None:
    engine.drain()
    ready = engine.said[0]
    assert isinstance(ready, CoreReady)
    assert ready.layout == f"v1/float32/{PAGE}"
    assert (ready.page_bytes, ready.max_model_len, ready.vocab_size, ready.lora_form) == (PAGE, 128, 256, "torch")


def test_a_request_is_the_same_alone_and_beside_others(engine: Driven, tmp_path: Path) -> None:
    keys = [engine.load(make_artifact(tmp_path / f"a{i}", seed=i, rank=1 + 3 * i), f"t{i}/a@1") for i in range(3)]
    wanted = {
        (name, number): engine.complete(random_prompt(number, 9 + number), key)
        for number in range(2)
        for name, key in [("base", None), *((key.ref, key) for key in keys)]
    }
    assert len({tuple(tokens) for (_, number), tokens in wanted.items() if number == 0}) == 4  # adapters do something
    for name, number in wanted:
        key = next((key for key in keys if key.ref == name), None)
        engine.generate(f"{name}-{number}", random_prompt(number, 9 + number), key)
    engine.finish(*(f"{name}-{number}" for name, number in wanted))
    assert {pair: engine.tokens[f"{pair[0]}-{pair[1]}"] for pair in wanted} == wanted
    engine.step()  # an idle core says its last figures
    stats = engine.stats
    assert stats is not None
    assert sum(stats.adapters_in_step_histogram) == stats.steps
    assert stats.adapters_in_step_histogram[3] > 0
    assert stats.padded_tokens == 0
    assert stats.tokens_by_adapter[keys[0].ref] > 0
    assert stats.lora_tokens == sum(stats.tokens_by_adapter.values()) < stats.tokens
    engine.assert_everything_free()


def test_a_long_prompt_is_computed_in_chunks_with_the_same_result(base: Path, tmp_path: Path) -> None:
    prompt = random_prompt(1, 90)
    whole = drive(tmp_path, base, max_model_len=128, max_batch_tokens=128, max_sequences=4)
    chunked = drive(tmp_path, base, max_model_len=128, max_batch_tokens=7, max_sequences=4)
    outputs: list[tuple[list[int], list[int]]] = []
    for driven in (whole, chunked):
        key = driven.load(make_artifact(tmp_path / f"a-{len(outputs)}"), "t/a@1")
        outputs.append((driven.complete(prompt), driven.complete(prompt, key)))
        driven.core.close()
    assert outputs[0] == outputs[1]


def test_prompt_logprobs_are_whole_over_chunks(base: Path, tmp_path: Path) -> None:
    prompt = random_prompt(2, 40)
    found = []
    for budget in (64, 9):
        driven = drive(tmp_path, base, max_model_len=128, max_batch_tokens=budget, max_sequences=4)
        driven.generate("r", prompt, prompt_logprobs=True, logprobs=2)
        driven.finish("r")
        with_prompt = [m for m in driven.said if isinstance(m, Output) and m.prompt_logprobs is not None]
        assert len(with_prompt) == 1
        entries = with_prompt[0].prompt_logprobs
        assert entries is not None and entries[0] is None
        assert [entry.token for entry in entries[1:] if entry] == prompt[1:]
        found.append([entry.logprob for entry in entries[1:] if entry])
        driven.core.close()
    assert found[0] == pytest.approx(found[1], abs=1e-4)


def test_a_stop_token_ends_and_is_not_among_the_tokens(engine: Driven) -> None:
    prompt = random_prompt(3, 6)
    plain = engine.complete(prompt, max_tokens=6)
    stop = plain[2]
    engine.generate("stops", prompt, max_tokens=6, stop_token_ids=(stop,))
    engine.generate("later", prompt, max_tokens=6, stop_token_ids=(stop,), min_tokens=5)
    engine.finish("stops", "later")
    ended = engine.ended["stops"]
    assert isinstance(ended, Output)
    assert (ended.finish, ended.stop_token) == ("stop", stop)
    assert engine.tokens["stops"] == plain[: plain.index(stop)]
    assert stop not in engine.tokens["later"][:5]
    assert len(engine.tokens["later"]) >= 5


def test_the_end_token_of_the_base_ends_unless_ignored(engine: Driven) -> None:
    prompt = random_prompt(4, 6)
    first = engine.complete(prompt, max_tokens=1)[0]
    engine.core.base = replace(engine.core.base, end_tokens=frozenset({first}))
    assert engine.complete(prompt, max_tokens=4, ignore_eos=True)[0] == first
    assert engine.complete(prompt, max_tokens=4, ignore_eos=False) == []
    assert first not in engine.complete(prompt, max_tokens=4, ignore_eos=False, min_tokens=4)[:4]


@pytest.mark.parametrize(
    ("prompt", "params", "status", "code"),
    [
        ([], {}, 400, "invalid_parameter"),
        ([256], {}, 400, "invalid_parameter"),
        ([-1], {}, 400, "invalid_parameter"),
        ([1], {"max_tokens": 0}, 400, "invalid_parameter"),
        ([1], {"stop_token_ids": (999,)}, 400, "invalid_parameter"),
        ([1] * 121, {}, 400, "context_length_exceeded"),
        ([1] * 128, {"max_tokens": 1}, 400, "context_length_exceeded"),
    ],
)
def test_bad_requests_are_refused_and_cost_nothing(
    engine: Driven, prompt: list[int], params: dict[str, Any], status: int, code: str
) -> None:
    engine.generate("bad", prompt, **params)
    engine.drain()
    assert (failure(engine, "bad").status, failure(engine, "bad").code) == (status, code)
    engine.assert_everything_free()
    assert engine.complete([1] * 120)  # the largest that fits


def test_an_unknown_adapter_is_an_error_and_never_the_base(engine: Driven) -> None:
    engine.generate("lost", [1, 2], AdapterKey("t/none@1", "0" * 64))
    engine.drain()
    assert (failure(engine, "lost").status, failure(engine, "lost").code) == (503, "artifact_unavailable")


def test_a_used_request_id_is_refused_and_the_first_goes_on(engine: Driven) -> None:
    engine.generate("same", [1, 2, 3])
    engine.step()
    engine.generate("same", [1, 2, 3])
    engine.drain()
    assert failure(engine, "same").code == "invalid_parameter"
    engine.ended.clear()
    engine.finish("same")
    assert isinstance(engine.ended["same"], Output)


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_an_abort_frees_at_once(engine: Driven, tmp_path: Path, steps: int) -> None:
    key = engine.load(make_artifact(tmp_path / "a"), "t/a@1")
    engine.generate("gone", random_prompt(1, 40), key)
    for _ in range(steps):
        engine.step()
    engine.core.handle(Abort("gone"))
    engine.drain()
    ended = engine.ended["gone"]
    assert isinstance(ended, Output) and ended.finish == "abort"
    engine.assert_everything_free()
    assert engine.states[key].in_use == 0
    engine.core.handle(Abort("gone"))  # again, and for a stranger: nothing happens
    engine.core.handle(Abort("never"))
    assert not [m for m in engine.drain() if isinstance(m, Output | RequestFailed)]


def test_a_failed_step_fails_its_requests_and_the_core_goes_on(engine: Driven, tmp_path: Path) -> None:
    key = engine.load(make_artifact(tmp_path / "a"), "t/a@1")
    runner = engine.core.base.runner

    class Broken:
        def forward(self, batch: Any) -> Any:
            raise RuntimeError("a kernel failed")

    engine.generate("one", [1, 2, 3])
    engine.generate("two", [1, 2, 3], key)
    engine.core.base = replace(engine.core.base, runner=Broken())  # type: ignore[arg-type]
    engine.step()
    assert {failure(engine, request).status for request in ("one", "two")} == {500}
    assert "kernel" not in failure(engine, "one").message
    engine.assert_everything_free()
    engine.core.base = replace(engine.core.base, runner=runner)
    assert len(engine.complete([1, 2, 3], key)) == 8


def test_logits_that_are_not_finite_fail_only_their_request(engine: Driven) -> None:
    def poisoned(logits: torch.Tensor, rows: list[SampleRow]) -> Any:
        broken = logits.clone()
        broken[0] = torch.nan
        return sample(broken, rows)

    engine.generate("one", random_prompt(1, 4))
    engine.generate("two", random_prompt(2, 5))
    engine.core._sampler = poisoned
    engine.step()
    engine.core._sampler = sample
    engine.finish("one", "two")
    assert sorted(type(engine.ended[r]).__name__ for r in ("one", "two")) == ["Output", "RequestFailed"]
    engine.assert_everything_free()


def test_scheduled_comes_once_before_the_first_output(engine: Driven, tmp_path: Path, clock: Clock) -> None:
    key = engine.load(make_artifact(tmp_path / "a"), "t/a@1")
    engine.generate("first", [1, 2], key)
    clock.now += 0.25
    engine.finish("first")
    events = [m for m in engine.said if isinstance(m, Scheduled | Output) and m.request == "first"]
    assert [type(event).__name__ for event in events[:2]] == ["Scheduled", "Output"]
    scheduled = next(m for m in engine.said if isinstance(m, Scheduled))
    assert scheduled.queue_ms == pytest.approx(250)
    assert not scheduled.cold  # it was warm: on the host, not yet on the device


def test_shutdown_is_a_message_like_others(engine: Driven) -> None:
    engine.core.handle(Shutdown())
    assert engine.core.stopping


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_other_dtypes_run(base: Path, tmp_path: Path, dtype: str) -> None:
    driven = drive(tmp_path, base, dtype=dtype, max_model_len=128, max_sequences=4)
    key = driven.load(make_artifact(tmp_path / "a", rank=8), "t/a@1")
    assert len(driven.complete([1, 2, 3])) == len(driven.complete([1, 2, 3], key)) == 8
    driven.core.close()


@pytest.mark.parametrize(
    "options",
    [
        {"max_model_len": 4096},
        {"max_batch_tokens": 4, "max_sequences": 8},
        {"slots": 0},
        {"device_memory": 4 * PAGE, "adapter_memory": 4 * PAGE},
        {"device_memory": 8 * PAGE, "adapter_memory": 4 * PAGE, "max_model_len": 65},
        {"device_memory": 8 * PAGE, "max_model_len": 129},
    ],
)
def test_options_that_cannot_work_stop_the_start(base: Path, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"max_model_len|max_batch_tokens|slots|device_memory"):
        EngineCore(CoreOptions(model=str(base), **options))


def test_a_context_that_memory_cannot_hold_stops_the_start_with_the_arithmetic(base: Path) -> None:
    options = {"device_memory": 8 * PAGE, "adapter_memory": 4 * PAGE, "max_model_len": 128}
    with pytest.raises(ValueError, match=r"128 needs 8 pages .* leaves 4 \(64 tokens\) .* give device_memory more"):
        EngineCore(CoreOptions(model=str(base), **options))  # type: ignore[arg-type]


@pytest.mark.parametrize(("pages", "adapters", "tokens"), [(8, 4, 64), (8, None, 96), (64, 0, 512)])
def test_a_context_nobody_asked_for_is_cut_to_the_memory_and_one_request_can_have_all_of_it(
    base: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, pages: int, adapters: int | None, tokens: int
) -> None:
    budget = None if adapters is None else adapters * PAGE
    driven = drive(tmp_path, base, device_memory=pages * PAGE, adapter_memory=budget, max_sequences=2)
    driven.drain()
    ready = driven.said[0]
    assert isinstance(ready, CoreReady) and ready.max_model_len == tokens
    assert ("max_model_len is" in caplog.text) == (tokens < 512)
    assert len(driven.complete([1] * (tokens - 3), max_tokens=3)) == 3
    driven.core.close()
