"""Marks of the operator in the core: what is warm stays in memory, what is pinned stays on the device."""

from pathlib import Path

import pytest

from loraplane_engine.adapters.residency import KEEP_SECONDS, PASS_SECONDS
from loraplane_engine.core.scheduler import ROTATE_SECONDS
from loraplane_engine.messages import AdapterKey, MarkAdapter, Output, UnloadAdapter
from tests.engine.harness import (
    PAGE,
    Clock,
    Driven,
    Make,
    failure,
    fill_with_kv,
    make_artifact,
    pages_of,
    random_prompt,
    ticking,
)

ONE = 3  # pages of each of `artifacts`


def warm(engine: Driven, *keys: AdapterKey) -> bool:
    return all(engine.states[key].residency in ("host", "device") for key in keys)


def refused(engine: Driven, key: AdapterKey) -> str:
    assert engine.failed[key].code == "insufficient_memory"
    return engine.failed[key].message


@pytest.fixture
def small(make: Make) -> Driven:
    """Host memory for three of `artifacts`, device memory for two."""
    return make(device_memory=64 * PAGE, adapter_memory=2 * ONE * PAGE, host_cache=3 * ONE * PAGE)


# --- host tier


def test_cold_traffic_never_takes_a_warm_adapters_place(small: Driven, artifacts: list[Path], clock: Clock) -> None:
    ticking(small, clock)
    wanted = [small.load(artifact, f"warm{i}/a@1", warm_wanted=True) for i, artifact in enumerate(artifacts[:2])]
    for turn in range(8):
        key = small.load(artifacts[2 + turn % 4], f"cold{turn % 4}/a@1")
        small.complete([1, 2, 3], key)
        assert warm(small, key, *wanted)
    assert not any(small.states[key].residency == "absent" for key in wanted)
    assert small.stats is not None
    assert small.stats.host_reserved_bytes == 2 * ONE * PAGE
    assert small.stats.host_used_bytes == small.stats.host_budget_bytes == 3 * ONE * PAGE


def test_a_cold_load_that_reservations_leave_no_room_for_is_refused_at_once(
    small: Driven, artifacts: list[Path]
) -> None:
    for i, artifact in enumerate(artifacts[:3]):
        small.load(artifact, f"warm{i}/a@1", warm_wanted=True)
    cold = small.load(artifacts[3], "cold/a@1", wait_s=60)
    need, limit = ONE * PAGE, 3 * ONE * PAGE
    assert f"needs {need} bytes of host memory; warm and pinned" in refused(small, cold)
    assert f"reserved {limit} of {limit}, so 0 are free" in refused(small, cold)
    assert small.core.wait_seconds() is None


def test_a_wish_displaces_what_requests_brought_in_but_no_other_wish(
    small: Driven, artifacts: list[Path], clock: Clock
) -> None:
    cold = small.load(artifacts[0], "cold/a@1")
    clock.now += KEEP_SECONDS
    wanted = [small.load(artifacts[i], f"warm{i}/a@1", warm_wanted=True) for i in (1, 2, 3)]
    assert small.states[cold].residency == "absent"
    assert warm(small, *wanted)
    more = small.load(artifacts[4], "more/a@1", warm_wanted=True)
    assert "so 0 are free" in refused(small, more)
    assert warm(small, *wanted)
    small.mark(wanted[0], warm_wanted=False)  # no longer wished: from now on it is cache
    small.load(artifacts[4], "more/a@1", warm_wanted=True)
    assert warm(small, more, *wanted[1:]) and small.states[wanted[0]].residency == "absent"


def test_the_next_version_takes_the_place_of_the_one_before_it(small: Driven, artifacts: list[Path]) -> None:
    one, other, third = (small.load(artifacts[i], f"t{i}/a@1", warm_wanted=True) for i in range(3))
    small.generate("running", [1, 2], one, max_tokens=20)
    small.step()
    two = small.load(artifacts[3], "t0/a@2", warm_wanted=True, wait_s=60)
    assert two not in small.states and two not in small.failed  # its place is in use
    small.finish("running")
    small.until(lambda: two in small.states)
    assert warm(small, two, other, third) and small.states[one].residency == "absent"


def test_a_load_waits_until_an_adapter_in_use_becomes_idle(small: Driven, artifacts: list[Path]) -> None:
    keys = [small.load(artifact, f"t{i}/a@1") for i, artifact in enumerate(artifacts[:3])]
    for number, key in enumerate(keys):
        small.generate(key.ref, [1, 2], key, max_tokens=10 + 30 * number)
    late = small.load(artifacts[3], "late/a@1", wait_s=60)
    assert late not in small.failed and late not in small.states
    small.finish(keys[0].ref)
    small.until(lambda: late in small.states)
    assert keys[2].ref not in small.ended  # as soon as there was room
    assert small.states[keys[0]].residency == "absent" and warm(small, late, *keys[1:])
    small.finish(*(key.ref for key in keys))
    assert len(small.complete([1, 2], late)) == 8


def test_room_for_one_is_given_to_one_of_those_who_wait(small: Driven, artifacts: list[Path]) -> None:
    keys = [small.load(artifact, f"t{i}/a@1") for i, artifact in enumerate(artifacts[:3])]
    for number, key in enumerate(keys):
        small.generate(key.ref, [1, 2], key, max_tokens=8 + 40 * number)
    first, second = (small.load(artifacts[i], f"late{i}/a@1", wait_s=60) for i in (3, 4))
    small.finish(keys[0].ref)
    small.until(lambda: first in small.states)
    assert second not in small.states and small.core.residency.host_used == 3 * ONE * PAGE
    small.generate("uses", [1, 2], first, max_tokens=60)
    small.finish(keys[1].ref)
    small.until(lambda: second in small.states)
    assert warm(small, first, second) and small.core.residency.host_used == 3 * ONE * PAGE


def test_what_was_read_for_a_request_is_there_when_that_comes_a_moment_later(
    small: Driven, artifacts: list[Path], clock: Clock
) -> None:
    for i, artifact in enumerate(artifacts[:2]):
        small.load(artifact, f"warm{i}/a@1", warm_wanted=True)
    first = small.load(artifacts[2], "first/a@1")
    second = small.load(artifacts[3], "second/a@1", wait_s=60)  # sees it idle, since its request is not here yet
    small.step()
    assert len(small.complete([1, 2], first)) == 8
    small.until(lambda: second in small.states)
    third = small.load(artifacts[4], "third/a@1", wait_s=60)
    small.step()
    assert third not in small.states
    clock.now += KEEP_SECONDS  # nobody came
    small.until(lambda: third in small.states)


def test_a_load_that_found_no_room_in_time_is_told_who_had_it(
    small: Driven, artifacts: list[Path], clock: Clock
) -> None:
    keys = [small.load(artifact, f"t{i}/a@1") for i, artifact in enumerate(artifacts[:3])]
    for key in keys:
        small.generate(key.ref, [1, 2], key, max_tokens=100)
    late = small.load(artifacts[3], "late/a@1", wait_s=5)
    clock.now += 4.9
    small.step()
    assert late not in small.failed
    clock.now += 0.2
    small.step()
    assert f"for 5 seconds adapters that are warm or in use have held {3 * ONE * PAGE} of" in refused(small, late)
    assert small.core.residency.waiting == 0


def test_an_idle_core_wakes_for_a_load_that_waits(small: Driven, artifacts: list[Path]) -> None:
    keys = [small.load(artifact, f"t{i}/a@1") for i, artifact in enumerate(artifacts[:3])]
    for key in keys:
        small.core.residency.use(small.core.residency.adapters[key], "elsewhere")
    late = small.load(artifacts[3], "late/a@1", wait_s=60)
    assert not small.step()
    wait = small.core.wait_seconds()
    assert wait is not None and wait <= 0.05
    small.core.residency.release(small.core.residency.adapters[keys[0]], "elsewhere")
    small.until(lambda: late in small.states)
    assert small.core.wait_seconds() is None


def test_an_unload_ends_a_load_that_waits(small: Driven, artifacts: list[Path]) -> None:
    keys = [small.load(artifact, f"t{i}/a@1") for i, artifact in enumerate(artifacts[:3])]
    for key in keys:
        small.generate(key.ref, [1, 2], key)
    late = small.load(artifacts[3], "late/a@1", wait_s=60)
    small.core.handle(UnloadAdapter(key=late, drain_s=5))
    small.finish(*(key.ref for key in keys))
    assert small.states[late].residency == "absent"
    assert not small.core.residency.loading and small.core.residency.waiting == 0
    assert warm(small, *keys)


def test_a_waiting_load_that_becomes_a_wish_goes_first(small: Driven, artifacts: list[Path]) -> None:
    keys = [small.load(artifact, f"t{i}/a@1") for i, artifact in enumerate(artifacts[:3])]
    for number, key in enumerate(keys):
        small.generate(key.ref, [1, 2], key, max_tokens=8 + 40 * number)
    first = small.load(artifacts[3], "first/a@1", wait_s=60)
    wished = small.load(artifacts[4], "wished/a@1", wait_s=60)
    small.core.handle(MarkAdapter(key=wished, warm_wanted=True))
    small.finish(keys[0].ref)
    small.until(lambda: wished in small.states)
    assert first not in small.states and small.states[wished].warm_wanted
    small.finish(*(key.ref for key in keys[1:]))
    small.until(lambda: first in small.states)


@pytest.mark.parametrize("waited", [0.0, PASS_SECONDS])
def test_a_small_load_overtakes_a_large_one_only_for_a_moment(
    make: Make, artifacts: list[Path], tmp_path: Path, clock: Clock, waited: float
) -> None:
    engine = make(device_memory=64 * PAGE, adapter_memory=30 * PAGE, host_cache=10 * PAGE)
    busy = engine.load(artifacts[0], "busy/a@1")
    engine.generate("running", [1, 2], busy, max_tokens=50)
    large = engine.load(make_artifact(tmp_path / "large", rank=9), "large/a@1", wait_s=60)
    assert large not in engine.states
    clock.now += waited
    little = engine.load(artifacts[1], "little/a@1", wait_s=60)
    assert (little in engine.states) == (waited < PASS_SECONDS)
    engine.finish("running")
    clock.now += KEEP_SECONDS
    engine.until(lambda: large in engine.states)


# --- device tier


def test_a_pinned_adapter_never_leaves_the_device_whatever_others_ask_for(
    small: Driven, artifacts: list[Path], clock: Clock
) -> None:
    ticking(small, clock, 0.3)
    pinned = small.load(artifacts[0], "vip/a@1", warm_wanted=True, pinned=True)
    row = small.core.residency.images[pinned.digest].row
    assert row is not None
    others = [small.load(artifact, f"t{i}/a@1") for i, artifact in enumerate(artifacts[1:3])]
    for number in range(12):
        small.generate(f"r{number}", random_prompt(number, 40), others[number % 2], max_tokens=40)
    while len(small.ended) < 12:
        small.step()
        assert small.core.residency.images[pinned.digest].row == row
    assert small.core.residency.device.evictions > 0
    assert len(small.complete([1, 2], pinned)) == 8


def test_a_pin_finds_its_place_although_the_others_never_idle(
    small: Driven, artifacts: list[Path], clock: Clock
) -> None:
    keys = [small.load(artifact, f"t{i}/a@1") for i, artifact in enumerate(artifacts[:3])]
    wanted = small.complete(random_prompt(1, 4), keys[0], max_tokens=100)
    ticking(small, clock)
    for number, key in enumerate(keys[:2]):
        small.generate(f"r{number}", random_prompt(1, 4), key, max_tokens=100)
    small.step()
    small.mark(keys[2], pinned=True)
    assert small.states[keys[2]].pinned and small.states[keys[2]].residency == "host"
    asked = clock.now
    small.until(lambda: small.states[keys[2]].residency == "device")
    assert clock.now - asked < ROTATE_SECONDS + 0.5
    assert not {"r0", "r1"} & small.ended.keys()
    small.finish("r0", "r1")
    assert small.tokens["r0"] == wanted
    assert small.states[keys[2]].residency == "device"


def test_a_pin_finds_its_place_although_kv_took_it(make: Make, artifacts: list[Path], clock: Clock) -> None:
    engine = make(device_memory=12 * PAGE, adapter_memory=3 * PAGE)
    key = engine.load(artifacts[0], "t/a@1")
    fill_with_kv(engine, clock)
    engine.mark(key, pinned=True)
    asked = clock.now
    engine.until(lambda: engine.states[key].residency == "device")
    assert clock.now - asked < ROTATE_SECONDS + 0.5
    engine.finish(*(f"base{number}" for number in range(4)))


def test_a_pin_that_does_not_fit_is_refused_with_the_arithmetic_and_the_adapter_stays_warm(
    small: Driven, artifacts: list[Path]
) -> None:
    keys = [small.load(artifact, f"t{i}/a@1", warm_wanted=True) for i, artifact in enumerate(artifacts[:3])]
    for key in keys[:2]:
        small.mark(key, pinned=True)
    small.mark(keys[2], pinned=True, warm_wanted=True)
    need, budget = ONE * PAGE, 2 * ONE * PAGE
    assert refused(small, keys[2]) == (
        f"pinning needs {need} bytes of device memory; 2 pinned adapters hold {budget} of {budget}, so 0 are free"
    )
    assert warm(small, *keys) and small.states[keys[2]].warm_wanted and not small.states[keys[2]].pinned
    small.generate("none", [1, 2], keys[2])
    small.drain()
    assert failure(small, "none").code == "insufficient_memory"
    small.mark(keys[0], pinned=False)
    small.mark(keys[2], pinned=True)
    assert keys[2] not in small.failed and small.states[keys[2]].residency == "device"


def test_slots_bound_pins_too(make: Make, artifacts: list[Path]) -> None:
    engine = make(device_memory=64 * PAGE, adapter_memory=30 * PAGE, slots=1)
    first, second = (engine.load(artifact, f"t{i}/a@1", pinned=True) for i, artifact in enumerate(artifacts[:2]))
    assert engine.states[first].pinned
    assert refused(engine, second) == "pinning needs a slot; pinned adapters hold 1 of 1"


def test_marks_come_and_go_without_a_load(small: Driven, artifacts: list[Path]) -> None:
    key = small.load(artifacts[0], "t/a@1")
    copy = small.core.residency.images[key.digest].host
    for _ in range(2):
        small.mark(key, pinned=True, warm_wanted=True)
        assert small.states[key].residency == "device" and small.states[key].pinned and small.states[key].warm_wanted
        small.mark(key, pinned=False, warm_wanted=False)
        assert small.states[key].residency == "device" and not small.states[key].pinned
    assert small.core.residency.device.swaps_in == 1
    assert small.core.residency.images[key.digest].host is copy
    for i in range(1, 4):
        small.complete([1, 2], small.load(artifacts[i], f"t{i}/a@1"))
    assert small.states[key].residency == "absent"  # only cache since


def test_a_mark_on_what_is_not_here_says_so(small: Driven) -> None:
    key = AdapterKey("t/none@1", "0" * 64)
    small.mark(key, pinned=True)
    assert small.states[key].residency == "absent"


def test_equal_bytes_stay_for_whoever_still_wants_them(small: Driven, artifacts: list[Path]) -> None:
    one, two = (small.load(artifacts[0], ref, warm_wanted=True, pinned=True) for ref in ("acme/a@1", "globex/b@1"))
    small.step()
    assert small.stats is not None
    assert small.stats.adapter_reserved_bytes == small.stats.host_reserved_bytes == ONE * PAGE  # once, not twice
    small.core.handle(UnloadAdapter(key=one, drain_s=0))
    small.drain()
    for i in range(1, 5):
        small.complete([1, 2], small.load(artifacts[i], f"t{i}/a@1"))
        assert small.states[two].residency == "device"
    assert small.stats.adapter_reserved_bytes == ONE * PAGE


# --- withdrawal


def test_a_pinned_and_warm_adapter_that_is_withdrawn_drains_and_its_successor_need_not_wait(
    small: Driven, artifacts: list[Path], clock: Clock
) -> None:
    old, other = (small.load(artifacts[i], f"t{i}/a@1", warm_wanted=True, pinned=True) for i in range(2))
    small.generate("old", [1, 2], old, max_tokens=30)
    small.step()
    small.core.handle(UnloadAdapter(key=old, drain_s=60))
    small.drain()
    state = small.states[old]
    assert (state.residency, state.in_use, state.pinned, state.warm_wanted) == ("device", 1, False, False)
    small.generate("new", [1, 2], old)
    small.drain()
    assert failure(small, "new").code == "adapter_withdrawn"
    successor = small.load(artifacts[2], "t2/a@1", warm_wanted=True, pinned=True)
    assert successor not in small.failed and small.states[successor].pinned
    small.finish("old")
    ended = small.ended["old"]
    assert isinstance(ended, Output) and ended.finish == "length" and len(small.tokens["old"]) == 30
    assert small.states[old].residency == "absent"
    clock.now += ROTATE_SECONDS
    small.until(lambda: small.states[successor].residency == "device")
    assert small.states[other].residency == "device"
    small.step()
    assert small.stats is not None
    assert small.stats.adapter_reserved_bytes == (pages_of(small, other) + pages_of(small, successor)) * PAGE


def test_what_is_put_again_while_it_drains_stays_with_its_marks(small: Driven, artifacts: list[Path]) -> None:
    key = small.load(artifacts[0], "t/a@1", warm_wanted=True, pinned=True)
    small.generate("old", [1, 2], key)
    small.step()
    small.core.handle(UnloadAdapter(key=key, drain_s=60))
    small.load(artifacts[0], "t/a@1", warm_wanted=True, pinned=True)
    small.finish("old")
    state = small.states[key]
    assert (state.residency, state.pinned, state.warm_wanted) == ("device", True, True)
