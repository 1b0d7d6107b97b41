"""Room for what shall be warm: who gets it, who is refused with what arithmetic, and that nobody loses it again."""

import random
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loraplane_core.identity import AdapterId, ReplicaId
from loraplane_core.wire.engine import ModelInfo
from loraplane_operator.actions import Mark, SetStatus, Warm
from loraplane_operator.plan import plan
from loraplane_operator.plan.reservations import admit, shown
from loraplane_operator.plan.wishes import wishes
from loraplane_operator.words import AdapterObject, Engine, World
from tests.operator.fakes.engine import BASE_DIGEST, CAPACITY
from tests.operator.plans import of, told
from tests.operator.worlds import (
    NOW,
    POOL,
    adapter,
    engine,
    entry,
    meta,
    pool,
    registry,
    residence,
    version,
    with_engines,
    world,
)

MIB = 1 << 20


def aged(name: str, age: float, **changes: Any) -> AdapterObject:
    return adapter(name, meta=meta("LoRAAdapter", name, created_at=NOW - age), **changes)


def budget(host: int, device: int = 64) -> Any:
    return msgspec.structs.replace(CAPACITY, host_bytes=host * MIB, adapter_bytes=device * MIB)


def crowd(sizes: dict[str, int], *, host: int, device: int = 64, replicas: int = 1, **spec: Any) -> World:
    """One adapter per name, the first the oldest; `sizes` and budgets in MiB."""
    objects = [aged(name, 100 - nth, **spec) for nth, name in enumerate(sizes)]
    entries = [
        entry(name, version(name, bytes=size * MIB, digest=format(nth, "064x")), **spec)
        for nth, (name, size) in enumerate(sizes.items(), 1)
    ]
    engines = [engine(ordinal, capacity=budget(host, device)) for ordinal in range(replicas)]
    return world(
        pools={POOL: pool(replicas=replicas)},
        adapters=tuple(objects),
        registry=registry(*entries),
        memory=replace(world().memory, registered={}),
        **with_engines(*engines),
    )


def holding(seen: World, *names: str, ordinal: int = 0, pinned: bool = False) -> World:
    """These are warm there by our wish."""
    assert seen.registry is not None
    held = [
        residence(f"acme/{name}@1", digest=version_.digest, bytes=version_.bytes, pinned=pinned)
        for name in names
        for version_ in seen.registry.adapters["acme", name].versions
    ]
    known = seen.engines[ReplicaId(*POOL, ordinal)]
    there = engine(ordinal, *held, capacity=known.capacity)
    return replace(seen, engines={**seen.engines, there.replica: there})


def warmed(seen: World) -> set[str]:
    """Who gets room: is warm or is being loaded."""
    return {wish.id.adapter for wish in admit(seen, wishes(seen)).values() for _ in wish.targets[0].replicas}


def placed(seen: World, name: str) -> tuple[str, str, str]:
    for action in plan(seen).actions:
        if isinstance(action, SetStatus) and action.ref.name == name:
            for each in action.status["conditions"]:
                if each["type"] == "Placed":
                    return each["status"], each["reason"], each["message"]
    raise AssertionError("no status is written")


def test_who_does_not_fit_is_refused_with_the_arithmetic() -> None:
    seen = crowd({"old": 52, "new": 34}, host=64, replicas=2, warm_replicas=2)
    assert {each.id.adapter for each in of(Warm, seen)} == {"old"}
    state, reason, message = placed(seen, "new")
    assert (state, reason) == ("False", "InsufficientMemory")
    assert message.startswith("needs 34 MiB on each of 2 replicas; pool has 12 MiB free")
    assert placed(seen, "old")[0] == "True"


def test_one_replica_is_not_called_each() -> None:
    message = placed(crowd({"old": 52, "new": 34}, host=64), "new")[2]
    assert message.startswith("needs 34 MiB on 1 replica; pool has 12 MiB free")


def test_what_fits_exactly_is_placed() -> None:
    assert warmed(crowd({"old": 52, "new": 12}, host=64)) == {"old", "new"}


def test_room_goes_to_the_older_and_a_smaller_one_behind_a_refused_one_gets_what_is_left() -> None:
    assert warmed(crowd({"a": 40, "b": 40, "c": 20}, host=64)) == {"a", "c"}


def test_refused_one_is_placed_when_room_appears() -> None:
    full = crowd({"old": 52, "new": 34}, host=64)
    gone = replace(full, adapters=full.adapters[1:], registry=registry(entry_of(full, "new")))
    assert warmed(gone) == {"new"}
    assert warmed(replace(full, **with_engines(engine(0, capacity=budget(96))))) == {"old", "new"}


def entry_of(seen: World, name: str) -> Any:
    assert seen.registry is not None
    return seen.registry.adapters["acme", name]


def test_warm_one_is_not_displaced_by_an_older_newcomer() -> None:
    seen = holding(crowd({"older": 40, "younger": 40}, host=64), "younger")
    assert warmed(seen) == {"younger"}
    assert of(Mark, seen) == []


def test_what_a_request_brought_in_holds_no_place() -> None:
    seen = crowd({"older": 40, "younger": 40}, host=64)
    cached = residence("acme/younger@1", digest=format(2, "064x"), warm_wanted=False, bytes=40 * MIB)
    assert warmed(replace(seen, **with_engines(engine(0, cached, capacity=budget(64))))) == {"older"}


def test_engine_that_restarted_gives_nobody_elses_place_away() -> None:
    seen = crowd({"older": 40, "younger": 40}, host=64)
    by_memory = {(ReplicaId(*POOL, 0), AdapterId("acme", "younger", 1, format(2, "064x"))): "boot-before"}
    assert warmed(replace(seen, memory=replace(seen.memory, warmed=by_memory))) == {"younger"}


def test_operator_that_restarted_with_the_engine_knows_places_by_the_status() -> None:
    seen = told(told(holding(crowd({"older": 40, "younger": 40}, host=64), "younger")))
    restarted = replace(seen, **with_engines(engine(0, boot="another", capacity=budget(64))))
    assert warmed(restarted) == {"younger"}
    assert warmed(replace(restarted, adapters=crowd({"older": 40, "younger": 40}, host=64).adapters)) == {"older"}


def test_new_version_takes_the_place_of_the_one_before_it() -> None:
    seen = holding(crowd({"older": 40, "younger": 40}, host=64), "younger")
    assert seen.registry is not None
    versions = [*entry_of(seen, "younger").versions, version("younger", 2, bytes=40 * MIB)]
    flipped = msgspec.structs.replace(entry_of(seen, "younger"), versions=versions, active_version=2)
    assert warmed(replace(seen, registry=registry(entry_of(seen, "older"), flipped))) == {"younger"}


def test_newcomer_gets_room_on_all_its_replicas_or_on_none() -> None:
    seen = holding(crowd({"big": 40, "wide": 40}, host=64, replicas=2), "big", ordinal=0)
    wide = aged("wide", 1, warm_replicas=2)
    assert warmed(replace(seen, adapters=(seen.adapters[0], wide))) == {"big"}


def test_pinned_ones_need_device_memory_too() -> None:
    seen = crowd({"old": 10, "new": 10}, host=64, device=16, pinned=True)
    assert [(each.id.adapter, each.pinned) for each in of(Warm, seen)] == [("old", True)]
    assert placed(seen, "new")[2].startswith("needs 10 MiB on 1 replica; pool has 6 MiB free (device memory")
    assert warmed(crowd({"old": 10, "new": 10}, host=64, device=16)) == {"old", "new"}  # pinned is what needs it


def test_warm_one_that_becomes_pinned_without_room_stays_warm() -> None:
    seen = crowd({"old": 10, "new": 10}, host=64, device=16, pinned=True)
    seen = holding(seen, "new", "old")
    assert [(each.id.adapter, each.pinned) for each in of(Mark, seen)] == [("old", True)]
    assert placed(seen, "new")[:2] == ("False", "InsufficientMemory")
    assert of(Warm, seen) == []


def test_pinned_one_is_not_displaced_by_another_that_becomes_pinned() -> None:
    seen = crowd({"older": 10, "younger": 10}, host=64, device=16, pinned=True)
    young = residence("acme/younger@1", digest=format(2, "064x"), bytes=10 * MIB, pinned=True)
    old = residence("acme/older@1", digest=format(1, "064x"), bytes=10 * MIB)
    seen = replace(seen, **with_engines(engine(0, young, old, capacity=budget(64, 16))))
    assert of(Mark, seen) == []


def test_equal_bytes_are_reserved_once() -> None:
    seen = crowd({"a": 40, "b": 40}, host=64)
    twins = [entry(name, version(name, bytes=40 * MIB, digest="d" * 64)) for name in ("a", "b")]
    assert warmed(replace(seen, registry=registry(*twins))) == {"a", "b"}


@pytest.mark.parametrize(
    ("size", "fits"),
    [
        ({"bytes": 40 * MIB, "parameters": 10 * MIB}, True),  # 10 Mi parameters of 2 bytes
        ({"bytes": 10 * MIB, "parameters": 40 * MIB}, False),
        ({"bytes": 40 * MIB, "parameters": 0}, False),  # not counted: the artifact's size stands in
    ],
)
def test_size_is_counted_from_parameters_before_an_engine_tells_it(size: dict[str, int], fits: bool) -> None:
    seen = crowd({"a": 1}, host=32)
    half = ModelInfo(base="b", base_digest=BASE_DIGEST, config={}, dtype="float16", max_model_len=8, max_rank=8)
    seen = replace(
        seen,
        memory=replace(seen.memory, models={seen.pools[POOL].meta.uid: half}),
        registry=registry(entry("a", version("a", **size))),
    )
    assert (warmed(seen) == {"a"}) is fits


def test_replica_that_does_not_answer_is_counted_like_the_others_of_its_pool() -> None:
    seen = crowd({"a": 40, "b": 40}, host=64, replicas=2, warm_replicas=2)
    one = replace(seen, engines={id_: each for id_, each in seen.engines.items() if id_.ordinal == 0})
    assert warmed(one) == {"a"}


def test_nothing_is_refused_while_no_engine_has_told_its_memory() -> None:
    seen = crowd({"a": 40, "b": 40}, host=0)  # an engine whose core has not answered yet
    assert warmed(seen) == {"a", "b"}
    gone = told(replace(seen, engines={}))
    back = replace(gone, **with_engines(engine(0, capacity=budget(64))))
    assert warmed(back) == {"a"}  # and what was said meanwhile is no place


def test_adapters_made_by_rest_alone_come_in_order_of_their_first_version() -> None:
    early, late = "2026-01-01T00:00:00Z", "2026-01-02T00:00:00Z"
    made = [
        entry(name, version(name, bytes=40 * MIB, created_at=at, digest=name * 64), claim_uid="", claim_ref="")
        for name, at in (("a", late), ("b", early))
    ]
    seen = replace(crowd({}, host=64), adapters=(), registry=registry(*made))
    assert warmed(seen) == {"b"}


@pytest.mark.parametrize(
    ("count", "up", "text"),
    [
        (34 * MIB, True, "34 MiB"),
        (34 * MIB + 1, True, "34.1 MiB"),
        (34 * MIB - 1, False, "33.9 MiB"),
        (0, False, "0 bytes"),
        (1536, False, "1.5 KiB"),
        (3 << 30, False, "3 GiB"),
    ],
)
def test_bytes_are_told_so_that_a_need_never_looks_as_if_it_fitted(count: int, up: bool, text: str) -> None:
    assert shown(count, up=up) == text


# -- properties


@st.composite
def crowds(draw: st.DrawFn) -> World:
    sizes = draw(st.dictionaries(st.sampled_from("abcdefgh"), st.integers(1, 40), min_size=1))
    seen = crowd(
        sizes, host=draw(st.integers(1, 96)), device=draw(st.integers(1, 64)), replicas=draw(st.integers(1, 3))
    )
    objects = tuple(
        replace(obj, warm_replicas=draw(st.integers(0, 3)), pinned=draw(st.booleans())) for obj in seen.adapters
    )
    return replace(seen, adapters=objects)


def carried_out(seen: World) -> World:
    """All loads and marks of one plan succeed, and the statuses are written."""
    engines: dict[ReplicaId, Engine] = dict(seen.engines)
    for action in plan(seen).actions:
        if isinstance(action, Warm | Mark):
            known = engines[action.replica]
            held = dict(known.residences)
            size = action.bytes if isinstance(action, Warm) else held[action.id.ref].bytes
            held[action.id.ref] = residence(
                str(action.id.ref), digest=action.id.digest, bytes=size, pinned=action.pinned
            )
            engines[action.replica] = replace(known, residences=held)
    return replace(told(seen), engines=engines)


def reserved(seen: World) -> dict[ReplicaId, tuple[int, int]]:
    used: dict[ReplicaId, tuple[int, int]] = dict.fromkeys(seen.engines, (0, 0))
    for known in seen.engines.values():
        host = sum(each.bytes for each in known.residences.values())
        device = sum(each.bytes for each in known.residences.values() if each.pinned)
        used[known.replica] = (host, device)
    return used


@settings(max_examples=60, deadline=None)
@given(crowds())
def test_sums_stay_within_the_budgets_and_the_second_plan_changes_nothing(seen: World) -> None:
    after = carried_out(seen)
    for replica, (host, device) in reserved(after).items():
        assert host <= seen.engines[replica].capacity.host_bytes
        assert device <= seen.engines[replica].capacity.adapter_bytes
    assert [action for action in plan(after).actions if isinstance(action, Warm | Mark)] == []
    assert carried_out(after) == replace(told(after), engines=after.engines)


@settings(max_examples=60, deadline=None)
@given(crowds(), crowds())
def test_newcomers_of_whatever_age_displace_nobody(seen: World, others: World) -> None:
    before = carried_out(seen)
    assert others.registry is not None and before.registry is not None
    older = tuple(
        replace(obj, adapter=f"x{obj.adapter}", meta=replace(obj.meta, uid=f"x{obj.meta.uid}", created_at=0.0))
        for obj in others.adapters
    )
    entries = [
        msgspec.structs.replace(
            each,
            adapter=f"x{each.adapter}",
            claim_uid=f"x{each.claim_uid}",
            versions=[
                msgspec.structs.replace(v, adapter=f"x{v.adapter}", digest="f" + v.digest[1:]) for v in each.versions
            ],
        )
        for each in others.registry.adapters.values()
    ]
    crowded = replace(
        before,
        adapters=before.adapters + older,
        registry=registry(*before.registry.adapters.values(), *entries),
    )
    was = {key: wish.targets[0].replicas for key, wish in admit(before, wishes(before)).items()}
    now = {key: wish.targets[0].replicas for key, wish in admit(crowded, wishes(crowded)).items()}
    assert {key: now[key] for key in was} == was


@settings(max_examples=40, deadline=None)
@given(crowds(), st.randoms(use_true_random=False))
def test_room_does_not_depend_on_the_order_in_which_things_are_seen(seen: World, order: random.Random) -> None:
    assert seen.registry is not None
    objects, entries, engines = list(seen.adapters), list(seen.registry.adapters.values()), list(seen.engines.items())
    for each in (objects, entries, engines):
        order.shuffle(each)
    again = replace(seen, adapters=tuple(objects), registry=registry(*entries), engines=dict(engines))
    assert admit(seen, wishes(seen)) == admit(again, wishes(again))
