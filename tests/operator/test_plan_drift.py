"""What engines do by themselves: lose, restart, fail, lie. What is told about it, what is done, and when again."""

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from loraplane_core.identity import AdapterId, ReplicaId
from loraplane_core.wire.registry import Adapter
from loraplane_operator.actions import Action, Note, SetStatus, Warm
from loraplane_operator.plan import plan
from loraplane_operator.words import Engine, Failure, World
from tests.operator.plans import condition, of, status, told
from tests.operator.worlds import (
    NOW,
    POOL,
    adapter,
    engine,
    entry,
    everywhere,
    pool,
    registry,
    residence,
    version,
    with_engines,
    world,
)

ID = AdapterId("acme", "pirate", 1, "1" * 64)
R0, R1 = ReplicaId(*POOL, 0), ReplicaId(*POOL, 1)


def serving() -> World:
    """Warm on both replicas for a while, and told so."""
    both = {(R0, ID): "boot-0", (R1, ID): "boot-1"}
    seen = world(adapters=(adapter(warm_replicas=2),), registry=registry(entry(warm_replicas=2)))
    seen = replace(seen, memory=replace(seen.memory, warmed=both), **everywhere(residence()))
    return told(seen)


def then(seen: World, *engines: Engine, seconds: float = 0.0, since: float | None = None) -> World:
    """Later, with these engines; `since`: when the operator first saw the loss on replica 0."""
    lost = {} if since is None else {(R0, ID): since}
    memory = replace(seen.memory, lost_since=lost)
    return replace(told(seen), now=seen.now + seconds, memory=memory, **with_engines(*engines))


def events(seen: World) -> list[Note]:
    return [
        note
        for action in plan(seen).actions
        if isinstance(action, SetStatus) and action.ref.kind == "LoRAAdapter"
        for note in action.notes
    ]


def told_of(seen: World, reason: str) -> list[str]:
    return [note.message for note in events(seen) if note.reason == reason]


def test_nothing_is_told_while_all_is_well() -> None:
    assert events(serving()) == []
    assert plan(serving()).lost == frozenset()


def test_engine_that_dropped_it_is_named_o2_o7() -> None:
    seen = then(serving(), engine(0), engine(1, residence()))
    assert told_of(seen, "Drifted") == ["default/pool/0: the engine dropped it; it is being loaded again"]
    assert condition(seen, "Ready") == ("False", "Drifted")
    assert [(each.replica, each.drift) for each in of(Warm, seen)] == [(R0, True)]
    assert plan(seen).lost == {(R0, ID)}


def test_engine_that_restarted_is_named_as_such_o1() -> None:
    away = then(serving(), engine(1, residence()))
    assert told_of(away, "Drifted") == []  # not known yet: it may be back with all it had
    assert told_of(away, "ReplicaNotReady") == ["default/pool/0 is absent: the replica does not answer"]
    back = then(away, engine(0, boot="boot-new"), engine(1, residence()))
    assert told_of(back, "Drifted") == ["default/pool/0: the engine restarted and lost it; it is being loaded again"]
    assert [each.boot for each in of(Warm, back)] == ["boot-new"]


def test_loss_is_told_once() -> None:
    gone = then(serving(), engine(0), engine(1, residence()))
    assert events(then(gone, engine(0), engine(1, residence()))) == []


@pytest.mark.parametrize(
    ("boot", "why"),
    [("boot-0", "its engine had dropped it"), ("boot-new", "its engine had restarted and lost it")],
)
def test_recovery_tells_how_long_it_took_and_why(boot: str, why: str) -> None:
    gone = then(serving(), engine(0, boot=boot), engine(1, residence()))
    healed = then(gone, engine(0, residence(), boot=boot), engine(1, residence()), seconds=0.8, since=NOW)
    assert told_of(healed, "Healed") == [f"default/pool/0 holds it again after 0.8 s: {why}"]
    assert condition(healed, "Ready") == ("True", "Ready")
    assert plan(healed).lost == {(R0, ID)}  # until the status tells it
    assert plan(told(healed)).lost == frozenset()


def test_replica_that_answers_again_with_all_it_had_has_lost_nothing() -> None:
    away = then(serving(), engine(1, residence()))
    back = then(away, engine(0, residence()), engine(1, residence()), seconds=1.2, since=NOW)
    assert told_of(back, "Drifted") == []
    assert told_of(back, "Healed") == ["default/pool/0 holds it again after 1.2 s: it had not answered"]
    assert of(Warm, back) == []


def test_loss_while_the_operator_was_down_is_told_without_a_cause() -> None:
    seen = serving()
    restarted = replace(seen, memory=replace(seen.memory, warmed={}), **with_engines(engine(0), engine(1, residence())))
    assert told_of(restarted, "Drifted") == ["default/pool/0 no longer holds it; it is being loaded again"]


def test_change_of_version_is_no_loss() -> None:
    seen = serving()
    flipped = registry(entry("pirate", version(), version(number=2), active_version=2, warm_replicas=2))
    after = replace(seen, registry=flipped)
    assert told_of(after, "Drifted") == []


# -- failures: bounded, per replica, over when something changes


def failing(seen: World, replica: ReplicaId, code: str, message: str = "no") -> World:
    failures: dict[Action, Failure] = {
        action: Failure(code, message, 7, NOW + 30)
        for action in plan(seen).actions
        if isinstance(action, Warm) and action.replica == replica
    }
    assert failures
    return replace(seen, memory=replace(seen.memory, failures=failures))


def test_reason_is_given_per_replica_and_the_other_one_serves_o5() -> None:
    seen = world(adapters=(adapter(warm_replicas=2),), registry=registry(entry(warm_replicas=2)))
    seen = failing(replace(seen, **with_engines(engine(0), engine(1, residence()))), R0, "artifact_unavailable", "gone")
    rows = {row["name"]: (row["residency"], row["message"]) for row in status(seen)["replicas"]}
    assert rows == {"default/pool/0": ("absent", "gone"), "default/pool/1": ("device", "")}
    assert condition(seen, "Ready") == ("False", "ArtifactUnavailable")
    assert status(seen)["resident"] == "1/2"


def test_one_bad_adapter_leaves_the_others_alone_o17() -> None:
    names = ("a", "b", "c")
    seen = world(adapters=tuple(adapter(name) for name in names), registry=registry(*(entry(name) for name in names)))
    assert {each.id.adapter for each in of(Warm, seen)} == set(names)
    (bad,) = [each for each in of(Warm, seen) if each.id.adapter == "a"]
    seen = replace(seen, memory=replace(seen.memory, failures={bad: Failure("load_failed", "no", 3, NOW + 9)}))
    lanes = {each.id.adapter: each.lane for each in of(Warm, seen)}
    assert len(set(lanes.values())) == 3  # each has its own, so none waits for another


def test_engine_that_restarted_is_asked_anew_at_once_o4() -> None:
    seen = world(adapters=(adapter(warm_replicas=2),), registry=registry(entry(warm_replicas=2)))
    seen = failing(seen, R0, "insufficient_memory")
    assert seen.failure(next(each for each in of(Warm, seen) if each.replica == R0)) is not None
    anew = replace(seen, **with_engines(engine(0, boot="boot-new"), engine(1)))
    assert seen.failure(next(each for each in of(Warm, anew) if each.replica == R0)) is None
    rows = {row["name"]: row["message"] for row in status(anew)["replicas"]}
    assert rows["default/pool/0"] == ""


def other_version(seen: World) -> World:
    return replace(seen, registry=registry(entry("pirate", version(), version(number=2), active_version=2)))


def other_pinning(seen: World) -> World:
    return replace(seen, adapters=(adapter(pinned=True),), registry=registry(entry(pinned=True)))


@pytest.mark.parametrize("change", [other_version, other_pinning])
def test_edit_is_not_held_back_by_the_failures_before_it_o4(change: Any) -> None:
    home = of(Warm, world())[0].replica
    seen = failing(world(), home, "insufficient_memory")
    (warm,) = of(Warm, change(seen))
    assert seen.failure(warm) is None


def test_ready_moves_both_ways_with_its_time_o11() -> None:
    def ready(seen: World) -> tuple[str, str]:
        (found,) = [each for each in seen.adapters[0].status["conditions"] if each["type"] == "Ready"]
        return found["status"], found["lastTransitionTime"]

    good = serving()
    bad = told(then(good, engine(0), engine(1, residence()), seconds=60))
    still = told(then(bad, engine(0), engine(1, residence()), seconds=60))
    healed = told(then(still, engine(0, residence()), engine(1, residence()), seconds=60))
    assert [ready(each)[0] for each in (good, bad, still, healed)] == ["True", "False", "False", "True"]
    times = [ready(each)[1] for each in (good, bad, still, healed)]
    assert times[0] < times[1] == times[2] < times[3]


def test_load_whose_answer_was_lost_is_published_by_the_engines_own_state_o56() -> None:
    """Loaded and published are two things: the engine's state is what counts, whatever its answer was."""
    failed = failing(world(), of(Warm, world())[0].replica, "deadline_exceeded")
    there = replace(failed, **everywhere(residence()))
    assert of(Warm, there) == []
    assert condition(there, "Ready") == ("True", "Ready")


def test_load_that_was_answered_and_is_not_there_is_asked_for_again_o56() -> None:
    """An engine that says "loaded" and is not: the answer is in no part of the world, so it cannot mislead."""
    assert len(of(Warm, world())) == 1
    assert condition(world(), "Ready") == ("False", "NotWarm")


# -- rank


def ranked(*others: Any, **spec: Any) -> World:
    low = pool(max_rank=16)
    shown: Adapter = entry("pirate", version(rank=32))
    pools = {each.ref: each for each in (low, *others)}
    return world(pools=pools, registry=registry(shown), **spec)


def message(seen: World, type_: str = "Placed") -> str:
    (found,) = [each for each in status(seen)["conditions"] if each["type"] == type_]
    assert (found["status"], found["reason"]) == ("False", "RankTooHigh")
    return str(found["message"])


def test_rank_above_the_pools_names_the_pool_that_takes_it_o14() -> None:
    seen = ranked(pool("wide", max_rank=64), pool("wider", max_rank=128), pool("narrow", max_rank=8))
    assert message(seen) == (
        "rank 32 is above maxRank 16 of pool default/pool; pool default/wide of the same base takes up to rank 64"
    )
    assert of(Warm, seen) == []


@pytest.mark.parametrize(
    "other",
    [
        pool("wide", max_rank=64, base_model="base-b"),
        pool("wide", max_rank=64, base_digest="c" * 64),
        pool("wide", max_rank=64, allowed_tenants=("globex",)),
        pool("wide", max_rank=64, allowed_namespaces=("prod",)),
        pool("wide", max_rank=31),
    ],
)
def test_pool_that_would_not_take_it_is_not_named_o14(other: Any) -> None:
    seen = ranked(other)
    seen = replace(seen, pools={**seen.pools, POOL: replace(seen.pools[POOL], base_digest="b" * 64)})
    assert message(seen).endswith("; no pool of base-a that admits it takes rank 32")


def test_rank_that_preflight_refused_names_the_pool_as_well_o14() -> None:
    refused = version(state="rejected", reason="rank_too_high", message="rank 32; at most 16", rank=0, digest="")
    seen = ranked(pool("wide", max_rank=64))
    seen = replace(seen, registry=registry(entry("pirate", refused, active_version=0)))
    assert message(seen, "Validated").endswith("; pool default/wide of the same base takes up to rank 64")


def test_rows_follow_weights_of_several_versions() -> None:
    """A row of a split names the version that was lost."""
    shown = entry("pirate", version(weight=90), version(number=2, weight=10), activation_owner="object")
    obj = adapter(traffic=((1, 90), (2, 10)))
    home = of(Warm, world())[0].replica
    second = AdapterId("acme", "pirate", 2, "2" * 64)
    both = (residence(), residence("acme/pirate@2"))
    seen = world(adapters=(obj,), registry=registry(shown), **everywhere(*both))
    boots = {(home, each): f"boot-{home.ordinal}" for each in (ID, second)}
    seen = told(replace(seen, memory=replace(seen.memory, warmed=boots)))
    lost = replace(told(seen), **everywhere(residence()))
    assert told_of(lost, "Drifted") == [f"{home}: version 2: the engine dropped it; it is being loaded again"]
    again = told(lost)
    again = replace(again, now=NOW + 2, memory=replace(again.memory, lost_since={(home, second): NOW}))
    assert told_of(replace(again, **everywhere(*both)), "Healed") == [
        f"{home} holds it again after 2.0 s: its engine had dropped it"
    ]


def test_claim_that_is_being_released_does_not_make_the_next_object_lose() -> None:
    """Deleted and created again under one name: the feed still shows the claim of the one before."""
    before = msgspec.structs.replace(entry(), claim_uid="uid-before")
    seen = world(registry=registry(before), memory=replace(world().memory, released=frozenset({"uid-before"})))
    assert condition(seen, "Claimed") == ("Unknown", "Pending")
