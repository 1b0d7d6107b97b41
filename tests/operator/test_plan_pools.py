"""Pools, and when a status is worth a write."""

import importlib
from dataclasses import replace
from typing import Any

import pytest

from loraplane_operator.actions import (
    ApplyWorkload,
    DeleteWorkload,
    RemoveReport,
    ReportPool,
    RestartReplica,
    SetFinalizer,
    SetStatus,
)
from loraplane_operator.plan import plan
from loraplane_operator.plan.conditions import rfc3339
from loraplane_operator.words import BaseLocation, Memory, World
from tests.operator.plans import condition, of, status
from tests.operator.worlds import (
    NOW,
    POOL,
    adapter,
    everywhere,
    meta,
    pool,
    replica,
    residence,
    world,
)

# -- pools


def test_pool_without_workload_gets_one_and_a_changed_count_scales_it() -> None:
    assert len(of(ApplyWorkload, world(workloads={}))) == 1
    assert len(of(ApplyWorkload, world(workloads={POOL: (replica(0),)}))) == 1
    assert of(ApplyWorkload, world()) == of(ApplyWorkload, world(workloads=None)) == []


def test_new_revision_replaces_one_replica_at_a_time() -> None:
    old = world(workloads={POOL: (replica(0, revision="old"), replica(1, revision="old"))})
    assert [each.ordinal for each in of(RestartReplica, old)] == [0]
    waiting = world(workloads={POOL: (replica(0, ready=False), replica(1, revision="old"))})
    assert of(RestartReplica, waiting) == []
    broken = world(workloads={POOL: (replica(0, revision="old"), replica(1, revision="old", ready=False))})
    assert [each.ordinal for each in of(RestartReplica, broken)] == [1]


def test_pool_is_reported_until_the_registry_knows_it() -> None:
    assert len(of(ReportPool, world(memory=Memory()))) == 1
    reported = {POOL: of(ReportPool, world(memory=Memory()))[0].report}
    assert of(ReportPool, world(memory=Memory(reports=reported))) == []


def test_pool_goes_after_its_engines_and_its_report() -> None:
    gone = pool(meta=meta("BaseModelPool", "pool", deleting_since=NOW - 1))
    seen = world(pools={POOL: gone})
    assert len(of(DeleteWorkload, seen)) == 1
    assert of(RemoveReport, seen) == of(SetFinalizer, seen) == []
    stopped = replace(seen, workloads={}, engines={})
    assert len(of(RemoveReport, stopped)) == 1
    unreported = replace(stopped, memory=Memory(reports={POOL: None}))
    assert [each.present for each in of(SetFinalizer, unreported)] == [False]


def test_workload_without_a_pool_is_stopped() -> None:
    assert [each.pool for each in of(DeleteWorkload, world(pools={}))] == [POOL]


POOL_CONDITIONS: dict[str, tuple[dict[str, Any], str, tuple[str, str]]] = {
    "serves": ({}, "Available", ("True", "Available")),
    "no replica": ({"engines": {}}, "Available", ("False", "NoReplica")),
    "by choice": ({"pools": {POOL: pool(replicas=0)}}, "Available", ("False", "ScaledToZero")),
    "starting": ({"workloads": {POOL: (replica(0), replica(1, ready=False))}}, "Progressing", ("True", "Starting")),
    "rolling": ({"workloads": {POOL: (replica(0), replica(1, revision="old"))}}, "Progressing", ("True", "Rolling")),
    "stable": ({}, "Progressing", ("False", "Ready")),
    "healthy": ({}, "Degraded", ("False", "Healthy")),
    "base missing": (
        {"bases": {POOL: BaseLocation(reason="BaseNotFound", message="no")}},
        "Degraded",
        ("True", "BaseNotFound"),
    ),
    "replica dies": ({"workloads": {POOL: (replica(0, message="exit 1"),)}}, "Degraded", ("True", "CrashLoop")),
    "wrong base": ({"pools": {POOL: pool(base_digest="c" * 64)}}, "Degraded", ("True", "BaseDigestMismatch")),
}


@pytest.mark.parametrize("case", POOL_CONDITIONS)
def test_pool_condition(case: str) -> None:
    changes, type_, expected = POOL_CONDITIONS[case]
    assert condition(world(**changes), type_, "BaseModelPool") == expected


def test_pool_capacity_is_the_sum_of_its_live_replicas() -> None:
    assert status(world(), "BaseModelPool")["capacity"]["slots"] == 16


# -- status writes


def settled(seen: World) -> World:
    """The same world after its statuses were written."""
    written = {action.uid: action.status for action in of(SetStatus, seen)}
    adapters = tuple(replace(each, status=written.get(each.meta.uid, each.status)) for each in seen.adapters)
    pools = {ref: replace(each, status=written.get(each.meta.uid, each.status)) for ref, each in seen.pools.items()}
    at = dict.fromkeys(written, seen.now)
    return replace(seen, adapters=adapters, pools=pools, memory=replace(seen.memory, status_written=at))


def test_unchanged_status_is_not_written_again() -> None:
    assert of(SetStatus, settled(world(**everywhere(residence())))) == []


def test_volatile_numbers_wait_and_a_change_of_class_does_not() -> None:
    seen = settled(world(**everywhere(residence())))
    moved = replace(seen, now=NOW + 1, **everywhere(residence(residency="host", since=NOW)))
    assert of(SetStatus, moved) == []
    assert plan(moved).due_at == NOW + 30
    assert len(of(SetStatus, replace(moved, now=NOW + 30))) == 1
    lost = replace(seen, now=NOW + 1, **everywhere())
    assert [action.ref.kind for action in of(SetStatus, lost)] == ["LoRAAdapter"]


def test_transition_time_moves_only_with_the_truth() -> None:
    first = settled(world())
    later = replace(first, now=NOW + 60, **everywhere(residence()))
    times = {each["type"]: each["lastTransitionTime"] for each in status(later)["conditions"]}
    assert times["Ready"] == rfc3339(NOW + 60)
    assert times["Claimed"] == rfc3339(NOW)


def test_events_tell_a_loss_and_the_recovery_once() -> None:
    ready = settled(world(**everywhere(residence())))
    lost = replace(ready, now=NOW + 1, **everywhere())
    (told,) = of(SetStatus, lost)
    assert [note.reason for note in told.notes] == ["NotWarm", "Drifted"]
    again = [each for each in of(SetStatus, settled(lost)) if each.ref.kind == "LoRAAdapter"]
    assert again == []
    healed = replace(settled(lost), now=NOW + 2, **everywhere(residence()))
    (told,) = [each for each in of(SetStatus, healed) if each.ref.kind == "LoRAAdapter"]
    assert [(note.kind, note.reason) for note in told.notes] == [("Normal", "Ready")]


def test_a_defect_in_one_object_leaves_the_plans_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    planner: Any = importlib.import_module("loraplane_operator.plan")

    def break_one(seen: World, obj: Any, *rest: Any) -> Any:
        if obj.meta.ref.name == "bad":
            raise RuntimeError("defect")
        return real(seen, obj, *rest)

    real = planner.plan_adapter
    monkeypatch.setattr(planner, "plan_adapter", break_one)
    planned = plan(world(adapters=(adapter("bad"), adapter())))
    assert [ref.name for ref, _ in planned.broken] == ["bad"]
    assert any(isinstance(action, SetStatus) and action.ref.name == "pirate" for action in planned.actions)
