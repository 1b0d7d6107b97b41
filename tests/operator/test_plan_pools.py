"""Pools, and when a status is worth a write."""

import importlib
from dataclasses import replace
from typing import Any

import pytest

from loraplane_core import placement
from loraplane_core.labels import ANNOTATION_EPOCH
from loraplane_core.resources.documents import parse_document
from loraplane_core.resources.pool import BaseModelPool
from loraplane_operator.actions import (
    ApplyWorkload,
    DeleteWorkload,
    RemoveReport,
    ReportPool,
    RestartReplica,
    SetFinalizer,
    SetStatus,
    Warm,
)
from loraplane_operator.objects import pool_object
from loraplane_operator.plan import plan
from loraplane_operator.plan.conditions import rfc3339
from loraplane_operator.plan.departures import LEAVE_SECONDS
from loraplane_operator.plan.rollout import workload_spec
from loraplane_operator.words import BaseLocation, Memory, Wait, World
from tests.operator.plans import HOME, condition, of, status
from tests.operator.system import pool_manifest
from tests.operator.worlds import (
    NOW,
    POOL,
    adapter,
    engine,
    entry,
    everywhere,
    meta,
    pool,
    registry,
    replica,
    residence,
    wished,
    with_engines,
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


DEAD = replica(0, ready=False, message="exit 1")
POOL_CONDITIONS: dict[str, tuple[dict[str, Any], str, tuple[str, str]]] = {
    "serves": ({}, "Available", ("True", "Available")),
    "no replica": ({"engines": {}}, "Available", ("False", "NoReplica")),
    "no replica, and why": ({"workloads": {POOL: (DEAD,)}}, "Available", ("False", "CrashLoop")),
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


def test_one_trouble_of_a_pool_is_told_once_and_a_lost_last_replica_although_that_was_known() -> None:
    def told(seen: World) -> list[str]:
        writes = [each for each in of(SetStatus, seen) if each.ref.kind == "BaseModelPool"]
        return [note.reason for each in writes for note in each.notes if note.kind == "Warning"]

    serving = settled(world())
    assert told(replace(serving, now=NOW + 1, workloads={POOL: (DEAD,)})) == ["CrashLoop"]
    half = replace(serving, now=NOW + 1, workloads={POOL: (replica(0), replica(1, ready=False, message="exit 1"))})
    assert told(half) == ["CrashLoop"]
    assert told(replace(settled(half), now=NOW + 2, workloads={POOL: (DEAD,)})) == ["CrashLoop"]


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


# -- changes of a pool


def test_replica_waits_until_its_adapters_are_warm_on_the_next_in_order() -> None:
    home, other = HOME.ordinal, 1 - HOME.ordinal
    old = (replica(home, revision="old"), replica(other))
    seen = world(workloads={POOL: old}, **with_engines(engine(home, residence()), engine(other)))
    assert of(RestartReplica, seen) == []
    assert [each.replica.ordinal for each in of(Warm, seen)] == [other]
    assert plan(seen).due_at == NOW + LEAVE_SECONDS
    warm = replace(seen, **everywhere(residence()))
    assert [each.ordinal for each in of(RestartReplica, warm)] == [home]


def test_replica_that_waited_for_long_enough_goes_and_an_event_names_what_is_cold() -> None:
    old = (replica(HOME.ordinal, revision="old"), replica(1 - HOME.ordinal))
    seen = world(workloads={POOL: old}, **with_engines(engine(HOME.ordinal, residence()), engine(1 - HOME.ordinal)))
    waits: dict[Wait, float] = {("leave", HOME): NOW - LEAVE_SECONDS}
    (restart,) = of(RestartReplica, replace(seen, memory=replace(seen.memory, waits=waits)))
    (note,) = restart.notes
    assert (note.kind, note.reason) == ("Warning", "NotWarm")
    assert "acme/pirate@1" in note.message


def test_covered_adapter_keeps_its_extra_home_until_its_own_serves_again() -> None:
    """Case O1: nothing is unmarked on the stand-in while the restarted engine is not there, or holds nothing."""
    home, other = HOME.ordinal, 1 - HOME.ordinal
    running = (replica(home, ready=False), replica(other))
    down = world(workloads={POOL: running}, **with_engines(engine(other, residence())))
    assert plan(down).residues == frozenset()
    back = world(**with_engines(engine(home), engine(other, residence())))
    assert [each.replica.ordinal for each in of(Warm, back)] == [home]


def test_surplus_replica_leaves_last_of_all_first_once_its_adapters_are_warm_on_those_that_stay() -> None:
    three = pool(replicas=3)
    name = next(
        name
        for name in map("a{}".format, range(99))
        if placement.order("acme", name, three.replica_ids)[0].ordinal == 2
    )
    held = residence(f"acme/{name}@1")
    running = tuple(replica(ordinal) for ordinal in range(3))
    seen = world(
        pools={POOL: pool(replicas=2)},
        adapters=(),
        workloads={POOL: running},
        registry=registry(entry(name, claim_uid="")),
        memory=replace(world().memory, applied={POOL: wished(three)}),
        **with_engines(engine(0), engine(1), engine(2, held)),
    )
    assert of(ApplyWorkload, seen) == []
    (warm,) = of(Warm, seen)
    there = {warm.replica: engine(warm.replica.ordinal, held)}
    (scaled,) = of(ApplyWorkload, replace(seen, engines={**seen.engines, **there}))
    assert (scaled.spec.replicas, scaled.notes) == (2, ())


def test_what_is_not_known_to_be_applied_is_applied_before_a_replica_goes_down() -> None:
    seen = world(workloads={POOL: (replica(0, revision="old"), replica(1))}, **everywhere(residence()))
    forgotten = replace(seen, memory=replace(seen.memory, applied={}))
    assert len(of(ApplyWorkload, forgotten)) == 1
    assert of(RestartReplica, forgotten) == []


@pytest.mark.parametrize(
    "changes", [{"image": "x"}, {"resources": (("limits", "cpu", "1"),)}, {"pod_template": "{}"}, {"epoch": 2}]
)
def test_change_that_engines_must_be_replaced_for_is_another_revision(changes: dict[str, Any]) -> None:
    spec = workload_spec(world(pools={POOL: pool(**changes)}), pool(**changes))
    assert spec is not None
    assert spec.revision != wished().revision


def test_registry_learns_an_epoch_before_engines_use_it_and_gateways_after_all_accept_it() -> None:
    rotated = world(pools={POOL: pool(epoch=2)}, memory=Memory())
    (told,) = of(ReportPool, rotated)
    assert told.report.credential_epoch == 2
    (applied,) = of(ApplyWorkload, rotated)
    assert (applied.spec.epoch, applied.spec.accepted_epoch) == (2, 1)
    done = (replica(0, epoch=2), replica(1, epoch=2))
    (applied,) = of(ApplyWorkload, replace(rotated, workloads={POOL: done}))
    assert applied.spec.accepted_epoch == 2


def test_pool_in_a_namespace_that_is_not_honoured_gets_a_reason_and_nothing_else() -> None:
    seen = world(pool_namespaces=frozenset({"platform"}), adapters=(), workloads={}, engines={})
    told = [action for action in plan(seen).actions if getattr(action, "ref", None) == pool().meta.ref]
    assert [type(action) for action in told] == [SetStatus]
    assert condition(seen, "Available", "BaseModelPool") == ("False", "PoolNamespaceNotHonoured")
    assert of(ReportPool, seen) == of(ApplyWorkload, seen) == []


def test_newer_pool_of_other_weights_under_one_name_says_so_o64() -> None:
    newer = pool("newer", base_digest="c" * 64, meta=meta("BaseModelPool", "newer", created_at=NOW - 1))
    seen = world(pools={POOL: pool(base_digest="b" * 64), newer.ref: newer})
    degraded = {
        action.ref.name: each["reason"]
        for action in of(SetStatus, seen)
        if action.ref.kind == "BaseModelPool"
        for each in action.status["conditions"]
        if each["type"] == "Degraded"
    }
    assert degraded == {"pool": "Healthy", "newer": "BaseNameConflict"}


def test_pool_goes_at_its_deadline_whatever_is_left_of_it_and_says_so() -> None:
    gone = pool(meta=meta("BaseModelPool", "pool", deleting_since=NOW - 61))
    seen = world(pools={POOL: gone}, memory=replace(world().memory, waits={("delete", gone.meta.uid): NOW - 61}))
    (last,) = [each for each in of(SetFinalizer, seen) if each.ref.kind == "BaseModelPool"]
    assert not last.present
    assert [note.reason for note in last.notes] == ["DeletionTimedOut"]


def test_adapter_stays_available_while_one_replica_goes_o58() -> None:
    """Availability comes from the replicas that are left."""
    seen = world(workloads={POOL: (replica(0, ready=False), replica(1))}, **with_engines(engine(1)))
    assert condition(seen, "Available", "BaseModelPool") == ("True", "Available")


def test_nothing_is_loaded_on_a_replica_that_does_not_answer_yet_o61() -> None:
    seen = world(workloads={POOL: (replica(0, ready=False), replica(1, ready=False))}, engines={})
    assert of(Warm, seen) == []
    assert condition(seen, "Progressing", "BaseModelPool") == ("True", "Starting")


@pytest.mark.parametrize(("text", "epoch"), [(None, 1), ("2", 2), ("0", None), ("two", None), ("02", None)])
def test_epoch_comes_from_the_annotation_of_the_pool(text: str | None, epoch: int | None) -> None:
    annotations = {} if text is None else {ANNOTATION_EPOCH: text}
    manifest = pool_manifest(image="x", resources={"limits": {"cpu": 2}}, podTemplate={"spec": {"nodeName": "n"}})
    manifest["metadata"]["annotations"] = annotations
    resource = parse_document(manifest, where="test")
    assert isinstance(resource, BaseModelPool)
    seen = pool_object(resource, {})
    assert seen.epoch == epoch
    assert (seen.image, seen.resources) == ("x", (("limits", "cpu", "2"),))
    assert seen.pod_template == '{"spec": {"nodeName": "n"}}'


def test_epoch_that_cannot_be_read_changes_no_credentials() -> None:
    running = (replica(0, epoch=3), replica(1, epoch=3))
    seen = world(pools={POOL: pool(epoch=None)}, workloads={POOL: running})
    spec = workload_spec(seen, pool(epoch=None))
    assert spec is not None
    assert (spec.epoch, spec.accepted_epoch) == (3, 3)
    assert condition(seen, "Degraded", "BaseModelPool") == ("True", "InvalidEpoch")
