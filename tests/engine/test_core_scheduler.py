"""Memory and fairness: eviction, preemption, rotation, and that nothing waits for ever."""

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from loraplane_engine.core.scheduler import ROTATE_SECONDS
from loraplane_engine.messages import (
    Abort,
    AdapterKey,
    MarkAdapter,
    Output,
    RequestFailed,
    Scheduled,
    UnloadAdapter,
)
from tests.engine.harness import Clock, Driven, drive, make_artifact, make_base, random_prompt

PAGE = 8192
Make = Callable[..., Driven]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_base(tmp_path_factory.mktemp("base") / "tiny")


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Six of equal size (3 pages each) and different weights."""
    folder = tmp_path_factory.mktemp("artifacts")
    return [make_artifact(folder / f"a{i}", seed=i, rank=3) for i in range(6)]


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def make(base: Path, tmp_path: Path, clock: Clock) -> Iterator[Make]:
    made: list[Driven] = []

    def build(**options: Any) -> Driven:
        settings = {"max_model_len": 128, "max_batch_tokens": 32, "max_sequences": 8, **options}
        made.append(drive(tmp_path, base, clock=clock, **settings))
        return made[-1]

    yield build
    for driven in made:
        driven.core.close()


def pages_of(engine: Driven, key: AdapterKey) -> int:
    return engine.core.residency.images[key.digest].pages


def ticking(engine: Driven, clock: Clock, seconds: float = 0.1) -> None:
    def tick() -> None:
        clock.now += seconds

    engine.before_step = tick


def order_of_first_tokens(engine: Driven) -> list[str]:
    return [message.request for message in engine.said if isinstance(message, Scheduled)]


# --- device memory of adapters


def test_more_adapters_than_fit_all_get_served(make: Make, artifacts: list[Path], clock: Clock) -> None:
    """The budget holds two of six; nobody is refused, each gets its own weights' answer."""
    engine = make(device_memory=64 * PAGE, adapter_memory=6 * PAGE)
    keys = [engine.load(artifact, f"t{i}/a@1") for i, artifact in enumerate(artifacts)]
    assert {pages_of(engine, key) for key in keys} == {3}
    prompt = random_prompt(1, 6)
    wanted = [engine.complete(prompt, key) for key in keys]
    assert len({tuple(tokens) for tokens in wanted}) == 6
    ticking(engine, clock)
    for number, key in enumerate(keys * 3):
        engine.generate(f"r{number}", prompt, key)
    engine.finish(*(f"r{number}" for number in range(18)))
    assert [engine.tokens[f"r{number}"] for number in range(18)] == wanted * 3
    assert engine.core.residency.evictions > 0
    assert engine.core.base.arena.pages.used["adapter"] <= 6
    engine.assert_everything_free()


def test_an_adapter_in_use_is_never_evicted(make: Make, artifacts: list[Path]) -> None:
    engine = make(device_memory=64 * PAGE, adapter_memory=6 * PAGE)
    keys = [engine.load(artifact, f"t{i}/a@1") for i, artifact in enumerate(artifacts[:3])]
    engine.generate("long", random_prompt(1, 4), keys[0], max_tokens=60)
    engine.step()
    row = engine.core.residency.images[keys[0].digest].row
    for number in range(6):
        engine.complete(random_prompt(number, 5), keys[1 + number % 2], max_tokens=3)
        assert engine.core.residency.images[keys[0].digest].row == row
    assert engine.core.residency.evictions >= 4
    engine.finish("long")


def test_the_least_recently_used_idle_adapter_leaves(make: Make, artifacts: list[Path], clock: Clock) -> None:
    engine = make(device_memory=64 * PAGE, adapter_memory=9 * PAGE)
    ticking(engine, clock)
    keys = [engine.load(artifact, f"t{i}/a@1") for i, artifact in enumerate(artifacts[:4])]
    for key in (keys[0], keys[1], keys[2], keys[0]):
        engine.complete([1, 2], key)
    engine.complete([1, 2], keys[3])
    on_device = {key.ref for key in keys if engine.states[key].residency == "device"}
    assert on_device == {"t0/a@1", "t2/a@1", "t3/a@1"}


def test_a_pinned_adapter_stays(make: Make, artifacts: list[Path]) -> None:
    engine = make(device_memory=64 * PAGE, adapter_memory=6 * PAGE)
    keys = [engine.load(artifact, f"t{i}/a@1", pinned=i == 0) for i, artifact in enumerate(artifacts[:4])]
    for key in keys[1:] * 2:
        engine.complete([1, 2], key)
        assert engine.states[keys[0]].residency == "device"
    engine.core.handle(MarkAdapter(key=keys[1], pinned=True))
    engine.drain()
    engine.core.handle(MarkAdapter(key=keys[2], pinned=True))
    engine.drain()
    assert engine.failed[keys[2]].code == "insufficient_memory"
    assert not engine.states[keys[2]].pinned
    engine.generate("none", [1, 2], keys[3])
    engine.drain()
    failed = engine.ended["none"]
    assert isinstance(failed, RequestFailed) and failed.code == "insufficient_memory"


def test_slots_cap_the_adapters_on_the_device(make: Make, artifacts: list[Path], clock: Clock) -> None:
    engine = make(device_memory=64 * PAGE, adapter_memory=30 * PAGE, slots=2)
    ticking(engine, clock)
    keys = [engine.load(artifact, f"t{i}/a@1") for i, artifact in enumerate(artifacts)]
    for number, key in enumerate(keys):
        engine.generate(f"r{number}", random_prompt(number, 5), key)
    seen = []
    while len(engine.ended) < 6:
        engine.step()
        seen.append(engine.core.residency.on_device)
    assert max(seen) == 2


def test_without_slots_only_bytes_decide(make: Make, artifacts: list[Path]) -> None:
    engine = make(device_memory=64 * PAGE, adapter_memory=30 * PAGE)
    keys = [engine.load(artifact, f"t{i}/a@1") for i, artifact in enumerate(artifacts)]
    for number, key in enumerate(keys):
        engine.generate(f"r{number}", random_prompt(number, 5), key)
    engine.finish(*(f"r{number}" for number in range(6)))
    engine.step()
    assert engine.stats is not None
    assert engine.stats.adapters_in_step_histogram[6] > 0


def test_an_adapter_larger_than_the_budget_is_refused_with_the_arithmetic(make: Make, tmp_path: Path) -> None:
    engine = make(device_memory=64 * PAGE, adapter_memory=4 * PAGE)
    key = engine.load(make_artifact(tmp_path / "big", rank=32), "t/big@1")
    assert engine.failed[key].code == "insufficient_memory"
    assert "4" in engine.failed[key].message


def test_a_rank_over_the_limit_is_refused(make: Make, tmp_path: Path) -> None:
    engine = make(max_rank=8)
    key = engine.load(make_artifact(tmp_path / "big", rank=9), "t/big@1")
    assert engine.failed[key].code == "rank_too_high"


def test_an_adapter_of_rank_64_needs_runs_longer_than_a_page(make: Make, tmp_path: Path) -> None:
    engine = make(device_memory=256 * PAGE, adapter_memory=128 * PAGE)
    key = engine.load(make_artifact(tmp_path / "big", rank=64), "t/big@1")
    assert engine.core.residency.images[key.digest].manifest.runs
    assert engine.complete([1, 2, 3], key) != engine.complete([1, 2, 3])


# --- the host tier


def test_the_host_tier_keeps_to_its_bytes(make: Make, artifacts: list[Path], clock: Clock) -> None:
    engine = make(device_memory=64 * PAGE, adapter_memory=30 * PAGE, host_cache=9 * PAGE)
    keys = []
    for number, artifact in enumerate(artifacts):
        clock.now += 1
        keys.append(engine.load(artifact, f"t{number}/a@1", warm_wanted=number == 0))
        assert engine.core.residency.host_used <= 9 * PAGE
    gone = {key.ref for key in keys if engine.states[key].residency == "absent"}
    assert gone == {"t1/a@1", "t2/a@1", "t3/a@1"}  # the oldest without a wish to be warm
    engine.generate("gone", [1, 2], keys[1])
    engine.drain()
    failed = engine.ended["gone"]
    assert isinstance(failed, RequestFailed) and failed.code == "artifact_unavailable"


def test_a_host_tier_in_use_refuses_with_the_arithmetic(make: Make, artifacts: list[Path]) -> None:
    engine = make(device_memory=64 * PAGE, adapter_memory=30 * PAGE, host_cache=6 * PAGE)
    keys = [engine.load(artifact, f"t{i}/a@1") for i, artifact in enumerate(artifacts[:2])]
    for key in keys:
        engine.generate(key.ref, [1, 2], key)
    third = engine.load(artifacts[2], "t2/a@1", wait=False)
    engine.drain()
    assert engine.failed[third].code == "insufficient_memory"
    assert str(6 * PAGE) in engine.failed[third].message
    engine.finish(*(key.ref for key in keys))
    engine.load(artifacts[2], "t2/a@1")
    assert engine.states[third].residency == "host"


# --- nothing waits for ever


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
    assert engine.core.residency.swaps_in <= turns + 3
    assert engine.core.residency.swaps_in > 3


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
    engine = make(device_memory=16 * PAGE, adapter_memory=9 * PAGE)
    keys = [engine.load(artifact, f"t{i}/a@1") for i, artifact in enumerate(artifacts[:3])]
    for key in keys:
        engine.complete([1, 2], key)
    assert engine.core.base.arena.pages.used["adapter"] == 9
    for number in range(2):
        engine.generate(f"r{number}", random_prompt(number, 60), max_tokens=40)
    engine.finish("r0", "r1")
    assert engine.core.residency.evictions > 0
    assert all(isinstance(engine.ended[f"r{number}"], Output) for number in range(2))


def test_an_adapter_finds_room_although_kv_took_it(make: Make, artifacts: list[Path], clock: Clock) -> None:
    """KV may use what adapters do not, but not keep it from them for ever."""
    engine = make(device_memory=12 * PAGE, adapter_memory=3 * PAGE)
    key = engine.load(artifacts[0], "t/a@1")
    ticking(engine, clock)
    for number in range(4):
        engine.generate(f"base{number}", random_prompt(number, 30), max_tokens=90)
    while engine.core.base.arena.pages.free > 1:
        engine.step()
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


# --- everything at once


@settings(
    max_examples=15,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_any_order_of_events_ends_with_every_request_answered_rightly(
    data: st.DataObject, base: Path, artifacts: list[Path], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Requests, aborts, unloads and reloads in little memory; every token is that of the request's own weights."""
    clock = Clock()
    engine = drive(
        tmp_path_factory.mktemp("fuzz"),
        base,
        clock=clock,
        max_model_len=64,
        max_batch_tokens=16,
        max_sequences=4,
        device_memory=data.draw(st.sampled_from([11, 14, 24])) * PAGE,
        adapter_memory=6 * PAGE,
        host_cache=9 * PAGE,
    )
    prompts = [random_prompt(number, 3 + 9 * number) for number in range(3)]
    truth: dict[tuple[str, int], list[int]] = {}
    keys = [engine.load(artifact, f"t{i}/a@1") for i, artifact in enumerate(artifacts[:3])]
    for number, prompt in enumerate(prompts):
        truth["base", number] = engine.complete(prompt, max_tokens=20)
        for key in keys:
            truth[key.ref, number] = engine.complete(prompt, key, max_tokens=20)
    ticking(engine, clock, 0.3)
    open_requests: dict[str, tuple[str, int]] = {}
    for event in range(data.draw(st.integers(5, 30))):
        match data.draw(st.sampled_from(["ask", "ask", "ask", "step", "step", "abort", "unload", "load", "pin"])):
            case "ask":
                number, who = data.draw(st.integers(0, 2)), data.draw(st.integers(-1, 2))
                asked = None if who < 0 else keys[who]
                open_requests[f"q{event}"] = ("base" if asked is None else asked.ref, number)
                engine.generate(f"q{event}", prompts[number], asked, max_tokens=20)
            case "step":
                engine.step()
            case "abort" if open_requests:
                engine.core.handle(Abort(data.draw(st.sampled_from(sorted(open_requests)))))
            case "unload":
                key = keys[data.draw(st.integers(0, 2))]
                engine.core.handle(UnloadAdapter(key=key, drain_s=data.draw(st.sampled_from([0.0, 1.0, 60.0]))))
            case "load":
                who = data.draw(st.integers(0, 2))
                engine.load(artifacts[who], keys[who].ref, wait=data.draw(st.booleans()))
            case "pin":
                key = keys[data.draw(st.integers(0, 2))]
                engine.core.handle(MarkAdapter(key=key, pinned=data.draw(st.booleans())))
    engine.finish(*open_requests)
    for request, pair in open_requests.items():
        end, wanted = engine.ended[request], truth[pair]
        if isinstance(end, Output) and end.finish == "length":
            assert engine.tokens[request] == wanted
        else:
            got = engine.tokens.get(request, [])
            assert got == wanted[: len(got)]
            assert isinstance(end, Output) or end.code in (
                "artifact_unavailable", "adapter_withdrawn", "insufficient_memory",
            )  # fmt: skip
    engine.until(lambda: not engine.core.residency.loading)
    engine.assert_everything_free()
    for key in keys:
        engine.core.handle(UnloadAdapter(key=key, drain_s=0))
    engine.drain()
    assert engine.core.base.arena.pages.free == engine.core.base.arena.pages.total
    assert engine.core.residency.host_used == 0
    assert all(state.residency == "absent" and state.in_use == 0 for state in engine.states.values())
    engine.core.close()
