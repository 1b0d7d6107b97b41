"""Fairness: preemption, rotation, and that nothing waits for ever."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from loraplane_engine.core.scheduler import ROTATE_SECONDS
from loraplane_engine.messages import Output, Scheduled
from tests.engine.harness import PAGE, Clock, Driven, Make, fill_with_kv, random_prompt, ticking


def order_of_first_tokens(engine: Driven) -> list[str]:
    return [message.request for message in engine.said if isinstance(message, Scheduled)]


def test_an_adapter_without_a_place_blocks_no_other_queue(make: Make, artifacts: list[Path]) -> None:
    engine = make(device_memory=64 * PAGE, adapter_memory=3 * PAGE)
    keys = [engine.load(artifact, f"t{i}/a@1") for i, artifact in enumerate(artifacts[:2])]
    engine.generate("holds", [1, 2], keys[0], max_tokens=40)
    engine.step()
    engine.generate("waits", [1, 2], keys[1])
    engine.generate("base", [1, 2])
    engine.generate("same", [1, 2], keys[0])
    engine.finish("base", "same")
    assert "waits" not in engine.ended and "holds" not in engine.ended
    engine.finish("waits", "holds")


def test_an_adapter_still_being_read_blocks_no_other_queue(make: Make, artifacts: list[Path]) -> None:
    engine = make(device_memory=64 * PAGE, adapter_memory=9 * PAGE)
    loader = engine.core.residency._loader
    held: list[Any] = []
    finish, loader._finish = loader._finish, lambda *done: held.append(done)  # type: ignore[method-assign]
    key = engine.load(artifacts[0], "t/a@1", wait=False)
    engine.generate("waits", [1, 2], key)
    engine.generate("base", [1, 2])
    engine.finish("base")
    assert "waits" not in engine.ended
    engine.until(lambda: bool(held))
    loader._finish = finish  # type: ignore[method-assign]
    finish(*held[0])
    engine.finish("waits")
    assert isinstance(engine.ended["waits"], Output)


def test_a_blocked_adapter_takes_its_turn_although_another_never_idles(
    make: Make, artifacts: list[Path], clock: Clock
) -> None:
    """The slot cliff's starvation: one place, and a tenant that always has a request running."""
    engine = make(device_memory=64 * PAGE, adapter_memory=3 * PAGE)
    greedy, other = (engine.load(artifact, f"t{i}/a@1") for i, artifact in enumerate(artifacts[:2]))
    wanted = engine.complete(random_prompt(1, 4), greedy, max_tokens=100)
    ticking(engine, clock)
    engine.generate("long", random_prompt(1, 4), greedy, max_tokens=100)
    engine.step()
    engine.generate("waits", [1, 2], other)
    asked = clock.now
    engine.finish("waits")
    assert ROTATE_SECONDS <= clock.now - asked < ROTATE_SECONDS + 3
    assert "long" not in engine.ended
    engine.finish("long")
    assert engine.tokens["long"] == wanted  # paused and resumed, not begun again
    steps = [m for m in engine.said if isinstance(m, Scheduled) and m.request == "long"]
    assert len(steps) == 1
    engine.assert_everything_free()


def test_a_turn_lasts_at_least_its_time(make: Make, artifacts: list[Path], clock: Clock) -> None:
    """Three adapters for one place rotate; they do not throw each other out in every step."""
    engine = make(device_memory=64 * PAGE, adapter_memory=3 * PAGE)
    keys = [engine.load(artifact, f"t{i}/a@1") for i, artifact in enumerate(artifacts[:3])]
    ticking(engine, clock, 0.05)
    for number, key in enumerate(keys):
        engine.generate(f"r{number}", [1, 2], key, max_tokens=100)
    start = clock.now
    engine.finish("r0", "r1", "r2")
    turns = (clock.now - start) / ROTATE_SECONDS
    assert engine.core.residency.device.swaps_in <= turns + 3
    assert engine.core.residency.device.swaps_in > 3


def test_kv_that_runs_out_puts_back_the_youngest_and_all_finish(make: Make) -> None:
    roomy = make(device_memory=128 * PAGE, adapter_memory=0)
    tight = make(device_memory=10 * PAGE, adapter_memory=0)
    outputs = []
    for engine in (roomy, tight):
        for number in range(4):
            engine.generate(f"r{number}", random_prompt(number, 20), max_tokens=60, seed=number, temperature=0.8)
        engine.finish(*(f"r{number}" for number in range(4)))
        outputs.append([engine.tokens[f"r{number}"] for number in range(4)])
        engine.assert_everything_free()
    assert outputs[0] == outputs[1]
    assert all(isinstance(end, Output) and end.finish == "length" for end in tight.ended.values())
    first_end = next(m.request for m in tight.said if isinstance(m, Output) and m.finish)
    assert first_end == "r0"  # the oldest is never put back


def test_idle_adapters_make_way_for_kv(make: Make, artifacts: list[Path]) -> None:
    engine = make(device_memory=16 * PAGE, adapter_memory=9 * PAGE, max_model_len=112)
    keys = [engine.load(artifact, f"t{i}/a@1") for i, artifact in enumerate(artifacts[:3])]
    for key in keys:
        engine.complete([1, 2], key)
    assert engine.core.base.arena.pages.used["adapter"] == 9
    for number in range(2):
        engine.generate(f"r{number}", random_prompt(number, 60), max_tokens=40)
    engine.finish("r0", "r1")
    assert engine.core.residency.device.evictions > 0
    assert all(isinstance(engine.ended[f"r{number}"], Output) for number in range(2))


def test_an_adapter_finds_room_although_kv_took_it(make: Make, artifacts: list[Path], clock: Clock) -> None:
    """KV may use what adapters do not, but not keep it from them for ever."""
    engine = make(device_memory=12 * PAGE, adapter_memory=3 * PAGE)
    key = engine.load(artifacts[0], "t/a@1")
    fill_with_kv(engine, clock)
    engine.generate("adapter", [1, 2], key, max_tokens=2)
    engine.finish("adapter")
    assert len(engine.ended) < 5
    engine.finish(*(f"base{number}" for number in range(4)))
    engine.assert_everything_free()


def test_small_requests_do_not_overtake_a_large_one_for_ever(make: Make) -> None:
    engine = make(device_memory=10 * PAGE, adapter_memory=0)
    engine.generate("running", random_prompt(1, 60), max_tokens=20, tenant="a")
    engine.step()
    engine.step()
    engine.generate("large", random_prompt(2, 110), max_tokens=4, tenant="b")
    for number in range(6):
        engine.generate(f"small{number}", [1, 2], tenant="c", max_tokens=30)
    engine.finish("large")
    assert sum(f"small{number}" in engine.ended for number in range(6)) == 0


def test_a_tenant_with_many_requests_does_not_hold_up_another(make: Make) -> None:
    engine = make(max_sequences=2, max_batch_tokens=16)
    for number in range(8):
        engine.generate(f"crowd{number}", random_prompt(number, 8), tenant="crowd")
    engine.step()
    engine.generate("single", random_prompt(99, 8), tenant="single")
    engine.finish(*(f"crowd{number}" for number in range(8)), "single")
    assert order_of_first_tokens(engine).index("single") <= 2


def test_tenants_share_by_tokens_not_by_requests(make: Make) -> None:
    engine = make(max_sequences=1, max_batch_tokens=64)
    for number in range(20):
        engine.generate(f"long{number}", random_prompt(number, 50), tenant="long", max_tokens=10)
        engine.generate(f"short{number}", random_prompt(number, 5), tenant="short", max_tokens=10)
    engine.until(lambda: len(engine.ended) >= 15)
    served = Counter(request.rstrip("0123456789") for request in engine.ended)
    assert served["short"] == pytest.approx(4 * served["long"], abs=4)


def test_idle_time_is_not_saved_up(make: Make) -> None:
    engine = make(max_sequences=1, max_batch_tokens=64)
    engine.generate("first", random_prompt(1, 60), tenant="busy", max_tokens=40)
    for number in range(6):
        engine.generate(f"busy{number}", random_prompt(number, 8), tenant="busy", max_tokens=2)
    engine.finish("first")
    for number in range(6):
        engine.generate(f"new{number}", random_prompt(number, 8), tenant="new", max_tokens=2)
    engine.until(lambda: len(engine.ended) >= 8)
    kinds = Counter(request.rstrip("0123456789") for request in order_of_first_tokens(engine)[2:8])
    assert kinds["new"] in (3, 4)


def test_requests_paused_together_keep_their_order(make: Make, artifacts: list[Path], clock: Clock) -> None:
    engine = make(device_memory=64 * PAGE, adapter_memory=3 * PAGE, max_sequences=4, max_batch_tokens=8)
    one, other = (engine.load(artifact, f"t{i}/a@1") for i, artifact in enumerate(artifacts[:2]))
    for number in range(3):
        engine.generate(f"r{number}", random_prompt(number, 3), one, max_tokens=100)
    engine.until(lambda: len(engine.core.scheduler.running) == 3)
    engine.generate("other", [1, 2], other, max_tokens=1)
    engine.step()
    clock.now += ROTATE_SECONDS
    engine.step()
    assert [each.request for each in engine.core.scheduler.running] in ([], ["other"])
    assert [each.request for each in engine.core.scheduler.waiting if each.image.digest == one.digest] == [  # type: ignore[union-attr]
        "r0",
        "r1",
        "r2",
    ]
