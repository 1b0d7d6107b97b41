"""What shall be warm where, what an engine may keep, and how an adapter leaves."""

from dataclasses import replace
from typing import Any

import pytest

from loraplane_core.identity import AdapterId
from loraplane_core.wire.registry import Activate
from loraplane_operator.actions import (
    ActivateVersion,
    Mark,
    ReleaseClaim,
    SetFinalizer,
    Warm,
    Withdraw,
)
from loraplane_operator.plan import plan
from loraplane_operator.plan.deletion import GATEWAYS_SECONDS
from loraplane_operator.plan.warmth import KEEP_SECONDS, UNKNOWN_GRACE_SECONDS
from loraplane_operator.words import Residue, World
from tests.operator.plans import HOME, condition, failed, of
from tests.operator.worlds import (
    NOW,
    adapter,
    engine,
    entry,
    everywhere,
    meta,
    pool,
    registry,
    residence,
    version,
    with_engines,
    world,
)

# -- warmth


def test_warms_the_first_replicas_in_order() -> None:
    assert [action.replica for action in of(Warm, world())] == [HOME]
    both = of(Warm, world(adapters=(adapter(warm_replicas=2),)))
    assert {action.replica for action in both} == set(pool().replica_ids)


@pytest.mark.parametrize(
    ("held", "warms"),
    [
        (residence(), False),
        (residence(residency="host"), False),
        (residence(warm_wanted=False), True),
        (residence(residency="disk"), True),
        (residence(residency="loading"), True),
        (residence(residency="absent", message="failed"), True),
    ],
)
def test_below_host_or_unmarked_is_warmed(held: Any, warms: bool) -> None:
    assert bool(of(Warm, world(**everywhere(held)))) is warms


def test_wrong_bytes_are_withdrawn_before_the_right_ones_are_loaded() -> None:
    seen = world(**everywhere(residence(digest="e" * 64)))
    assert {action.id.digest for action in of(Withdraw, seen)} == {"e" * 64}
    assert of(Warm, seen) == []


def test_pin_follows_the_object() -> None:
    pinned = adapter(pinned=True)
    seen = world(adapters=(pinned,), registry=registry(entry(pinned=True)), **everywhere(residence()))
    assert [(mark.pinned, mark.warm) for mark in of(Mark, seen)] == [(True, True)]


def test_drift_is_told_from_a_first_load() -> None:
    assert [action.drift for action in of(Warm, world())] == [False]
    was = {(HOME, AdapterId("acme", "pirate", 1, "1" * 64)): "boot-before"}
    seen = world()
    again = replace(seen, memory=replace(seen.memory, warmed=was))
    assert [(action.drift, action.why) for action in of(Warm, again)] == [(True, "drifted to absent")]


def aged(seen: World, seconds: float) -> World:
    since: dict[Residue, float] = dict.fromkeys(plan(seen).residues, NOW - seconds)
    return replace(seen, memory=replace(seen.memory, residue_since=since))


def test_old_version_becomes_cache_after_the_keep_time() -> None:
    both = entry("pirate", version(), version(number=2), active_version=2)
    seen = world(registry=registry(both), **everywhere(residence()))
    assert of(Mark, seen) == []
    assert plan(seen).due_at == NOW + KEEP_SECONDS
    marks = of(Mark, aged(seen, KEEP_SECONDS))
    assert [(mark.warm, mark.id.version) for mark in marks] == [(False, 1), (False, 1)]
    assert of(Withdraw, aged(seen, KEEP_SECONDS)) == []


def test_old_version_is_unpinned_at_once_and_leaves_when_another_finds_no_room() -> None:
    both = entry("pirate", version(), version(number=2), active_version=2)
    seen = world(registry=registry(both), **everywhere(residence(pinned=True)))
    marks = of(Mark, seen)
    assert [(mark.pinned, mark.warm, mark.id.version) for mark in marks] == [(False, True, 1), (False, True, 1)]
    crowded = failed(world(registry=registry(both), **everywhere(residence())), Warm, "insufficient_memory")
    (mark,) = of(Mark, crowded)
    assert (mark.replica, mark.warm, mark.id.version) == (HOME, False, 1)


def test_cache_of_an_engine_is_no_drift() -> None:
    both = entry("pirate", version(), version(number=2))
    seen = world(registry=registry(both), **everywhere(residence("acme/pirate@2", warm_wanted=False), residence()))
    aged_ = aged(seen, 10 * KEEP_SECONDS)
    assert [action for action in plan(aged_).actions if isinstance(action, Withdraw) and action.id.version == 2] == []


def test_withdrawn_version_goes_at_once_and_an_unknown_one_after_a_grace() -> None:
    stray = residence("acme/pirate@9", warm_wanted=False)
    seen = world(**with_engines(engine(0, stray)))
    assert of(Withdraw, seen) == []
    assert [action.id.version for action in of(Withdraw, aged(seen, UNKNOWN_GRACE_SECONDS))] == [9]
    told = registry(entry(), withdrawn=frozenset({AdapterId("acme", "pirate", 9, "9" * 64).ref}))
    assert [action.id.version for action in of(Withdraw, replace(seen, registry=told))] == [9]


def test_nothing_unknown_is_deleted_while_the_feed_is_down() -> None:
    stray = residence("acme/pirate@9", warm_wanted=False)
    seen = world(registry=registry(entry(), live=False), **with_engines(engine(0, stray)))
    assert of(Withdraw, aged(seen, 10 * UNKNOWN_GRACE_SECONDS)) == []


def test_feed_entries_without_an_object_are_warmed_too() -> None:
    seen = world(adapters=(), registry=registry(entry(claim_uid="", claim_ref="", warm_replicas=2)))
    assert len(of(Warm, seen)) == 2


# -- deletion


def deleting(**changes: Any) -> World:
    gone = adapter(meta=meta("LoRAAdapter", "pirate", deleting_since=NOW - 1), deletion_policy="delete")
    return world(adapters=(gone,), **changes)


def test_deletion_stops_serving_drains_releases_and_goes() -> None:
    serving = deleting(**everywhere(residence()))
    (stop,) = of(ActivateVersion, serving)
    assert stop.request == Activate(version=0)
    assert of(Withdraw, serving) == of(Warm, serving) == []
    refused = failed(serving, ActivateVersion, "conflict")
    assert len(of(Withdraw, aged(refused, GATEWAYS_SECONDS))) == 2
    stopped = registry(entry(active_version=0))
    told = replace(serving, registry=stopped)
    assert of(Withdraw, told) == []
    assert plan(told).due_at == NOW + GATEWAYS_SECONDS
    seen = aged(told, GATEWAYS_SECONDS)
    assert len(of(Withdraw, seen)) == 2
    assert of(ReleaseClaim, seen) == of(SetFinalizer, seen) == of(Warm, seen) == []
    assert condition(seen, "Deleting") == ("True", "Deleting")
    drained = deleting(registry=stopped)
    assert [(each.uid, each.versions) for each in of(ReleaseClaim, drained)] == [("uid-pirate", "delete")]
    assert of(Warm, drained) == []
    released = replace(drained, registry=registry())
    assert [each.present for each in of(SetFinalizer, released)] == [False]


def test_object_without_the_claim_touches_no_engine_when_it_goes() -> None:
    seen = deleting(registry=registry(entry(claim_uid="other")), **everywhere(residence()))
    assert of(Withdraw, seen) == of(ReleaseClaim, seen)[:0]
    assert [each.present for each in of(SetFinalizer, seen)] == [False]


def test_past_the_deadline_the_finalizer_goes_anyway_with_an_event() -> None:
    gone = adapter(meta=meta("LoRAAdapter", "pirate", deleting_since=NOW - 61))
    memory = replace(world().memory, waits={("delete", gone.meta.uid): NOW - 61})
    (last,) = of(SetFinalizer, world(adapters=(gone,), registry=None, memory=memory, **everywhere(residence())))
    assert (last.present, [note.reason for note in last.notes]) == (False, ["DeletionTimedOut"])


def test_released_claim_is_not_served_while_the_feed_lags() -> None:
    seen = deleting()
    after = replace(seen, memory=replace(seen.memory, released=frozenset({"uid-pirate"})))
    assert of(Warm, after) == []
    assert [each.present for each in of(SetFinalizer, after)] == [False]


def test_claims_of_vanished_objects_are_released_only_where_the_operator_looks() -> None:
    seen = world(adapters=())
    assert [(each.uid, each.versions) for each in of(ReleaseClaim, seen)] == [("uid-pirate", "retain")]
    assert of(ReleaseClaim, replace(seen, namespaces=frozenset({"prod"}))) == []
    assert of(ReleaseClaim, replace(seen, registry=registry(entry(), live=False))) == []
