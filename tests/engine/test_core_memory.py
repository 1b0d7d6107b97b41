"""The tiers' memory: who is evicted, who stays, who is refused."""

from pathlib import Path

from loraplane_engine.messages import RequestFailed
from tests.engine.harness import PAGE, Clock, Make, make_artifact, pages_of, random_prompt, ticking


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
    assert engine.core.residency.device.evictions > 0
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
    assert engine.core.residency.device.evictions >= 4
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
    engine.mark(keys[1], pinned=True)
    engine.mark(keys[2], pinned=True)
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
        seen.append(engine.core.residency.device.count)
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
