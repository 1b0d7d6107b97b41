"""What the planner makes of a world: phases and reasons, warmth, deletion, pools. Tables over one small world."""

import importlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from loraplane_core import placement
from loraplane_core.identity import AdapterId
from loraplane_core.resources.adapter import AdapterStatus
from loraplane_core.resources.pool import PoolStatus
from loraplane_core.wire.registry import Activate, Source
from loraplane_operator.actions import (
    Action,
    ActivateVersion,
    ApplyWorkload,
    ClaimAdapter,
    DeleteWorkload,
    Mark,
    Register,
    ReleaseClaim,
    RemoveReport,
    ReportPool,
    RestartReplica,
    SetFinalizer,
    SetStatus,
    Warm,
    Withdraw,
)
from loraplane_operator.plan import plan
from loraplane_operator.plan.adapters import claim_request
from loraplane_operator.plan.conditions import rfc3339
from loraplane_operator.plan.warmth import KEEP_SECONDS, UNKNOWN_GRACE_SECONDS
from loraplane_operator.words import BaseLocation, Failure, Memory, Residue, World
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
    version,
    with_engines,
    world,
)

HOME = placement.order("acme", "pirate", pool().replica_ids)[0]


def of(kind: type[Action], seen: World) -> list[Any]:
    return [action for action in plan(seen).actions if isinstance(action, kind)]


def status(seen: World, kind: str = "LoRAAdapter") -> dict[str, Any]:
    found = [dict(action.status) for action in of(SetStatus, seen) if action.ref.kind == kind]
    assert found, "no status is written"
    return found[0]


def condition(seen: World, type_: str, kind: str = "LoRAAdapter") -> tuple[str, str]:
    found = {each["type"]: (each["status"], each["reason"]) for each in status(seen, kind)["conditions"]}
    return found[type_]


def unclaimed(**changes: Any) -> World:
    return world(registry=registry(), **changes)


def failed(seen: World, kind: type[Action], code: str) -> World:
    failures = {action: Failure(code, "no", 1, NOW + 5) for action in of(kind, seen)}
    assert failures
    return replace(seen, memory=replace(seen.memory, failures=failures))


def with_version(number: int = 1, **changes: Any) -> World:
    seen = version(number=number, **changes)
    return world(registry=registry(entry("pirate", seen, active_version=0)))


#: (what the world is like, condition, its status and reason, Ready's reason)
PHASES: dict[str, tuple[Callable[[], World], str, tuple[str, str], str]] = {
    "registry never answered": (
        lambda: world(registry=None),
        "Claimed",
        ("Unknown", "RegistryUnavailable"),
        "RegistryUnavailable",
    ),
    "tenant unknown": (
        lambda: world(registry=registry(tenants=frozenset())),
        "Claimed",
        ("False", "TenantUnknown"),
        "TenantUnknown",
    ),
    "claimed by other": (
        lambda: world(registry=registry(entry(claim_uid="other", claim_ref="default/first"))),
        "Claimed",
        ("False", "ClaimedByOther"),
        "ClaimedByOther",
    ),
    "pool missing": (lambda: unclaimed(pools={}), "Claimed", ("False", "PoolNotFound"), "PoolNotFound"),
    "pool not reported": (
        lambda: unclaimed(memory=Memory()),
        "Claimed",
        ("Unknown", "Pending"),
        "Pending",
    ),
    "pool of other tenants": (
        lambda: unclaimed(pools={POOL: pool(allowed_tenants=("globex",))}),
        "Claimed",
        ("False", "PoolNotAllowed"),
        "PoolNotAllowed",
    ),
    "pool of other namespaces": (
        lambda: unclaimed(pools={POOL: pool(allowed_namespaces=("prod",))}),
        "Claimed",
        ("False", "PoolNotAllowed"),
        "PoolNotAllowed",
    ),
    "namespace not bound": (
        lambda: failed(unclaimed(), ClaimAdapter, "tenant_not_bound"),
        "Claimed",
        ("False", "TenantNotBound"),
        "TenantNotBound",
    ),
    "claim under way": (unclaimed, "Claimed", ("Unknown", "Pending"), "Pending"),
    "source not registered": (
        lambda: world(adapters=(adapter(source_hash="h2"),)),
        "Ingested",
        ("False", "Progressing"),
        "Progressing",
    ),
    "source refused": (
        lambda: failed(world(adapters=(adapter(source_hash="h2"),)), Register, "source_not_allowed"),
        "Ingested",
        ("False", "SourceNotAllowed"),
        "SourceNotAllowed",
    ),
    "base not known yet": (
        lambda: with_version(state="pending_base"),
        "Ingested",
        ("False", "PendingBase"),
        "PendingBase",
    ),
    "ingesting": (lambda: with_version(state="ingesting"), "Ingested", ("False", "Ingesting"), "Ingesting"),
    "inserted by hand": (lambda: with_version(state="unverified"), "Ingested", ("False", "Unverified"), "Unverified"),
    "version removed": (
        lambda: world(registry=registry(entry("pirate", version(number=7), active_version=0))),
        "Ingested",
        ("False", "AdapterWithdrawn"),
        "AdapterWithdrawn",
    ),
    "source without artifact": (
        lambda: with_version(state="rejected", reason="source_not_found", digest=""),
        "Ingested",
        ("False", "SourceNotFound"),
        "SourceNotFound",
    ),
    "rejected": (
        lambda: with_version(state="rejected", reason="base_model_mismatch"),
        "Validated",
        ("False", "BaseModelMismatch"),
        "BaseModelMismatch",
    ),
    "nothing active": (
        lambda: world(registry=registry(entry(active_version=0))),
        "Placed",
        ("False", "NotActivated"),
        "NotActivated",
    ),
    "pool gone after the claim": (
        lambda: world(pools={}, bases={}, workloads={}),
        "Placed",
        ("False", "PoolNotFound"),
        "PoolNotFound",
    ),
    "rank above the pool's": (
        lambda: world(pools={POOL: pool(max_rank=4)}),
        "Placed",
        ("False", "RankTooHigh"),
        "RankTooHigh",
    ),
    "other base": (
        lambda: world(pools={POOL: pool(base_digest="c" * 64)}),
        "Placed",
        ("False", "BaseModelMismatch"),
        "BaseModelMismatch",
    ),
    "more warm replicas than replicas": (
        lambda: world(adapters=(adapter(warm_replicas=3),)),
        "Placed",
        ("False", "NoReplica"),
        "NoReplica",
    ),
    "activeVersion that does not exist": (
        lambda: world(adapters=(adapter(active_version=2),)),
        "Placed",
        ("False", "NotActivatable"),
        "NotActivatable",
    ),
    "weights over several versions": (
        lambda: world(adapters=(adapter(splits_traffic=True),)),
        "Placed",
        ("False", "NotActivatable"),
        "NotActivatable",
    ),
    "not warm yet": (world, "Ready", ("False", "NotWarm"), "NotWarm"),
    "loading": (
        lambda: world(**everywhere(residence(residency="loading"))),
        "Ready",
        ("False", "Loading"),
        "Loading",
    ),
    "replica does not answer": (
        lambda: world(engines={}),
        "Ready",
        ("False", "ReplicaNotReady"),
        "ReplicaNotReady",
    ),
    "replica of another base": (
        lambda: world(**with_engines(engine(0, base_digest="c" * 64), engine(1, base_digest="c" * 64))),
        "Ready",
        ("False", "BaseModelMismatch"),
        "BaseModelMismatch",
    ),
    "load refused": (
        lambda: failed(world(), Warm, "insufficient_memory"),
        "Ready",
        ("False", "InsufficientMemory"),
        "InsufficientMemory",
    ),
    "load failed before": (
        lambda: world(**everywhere(residence(residency="absent", message="truncated"))),
        "Ready",
        ("False", "LoadFailed"),
        "LoadFailed",
    ),
    "warm": (lambda: world(**everywhere(residence())), "Ready", ("True", "Ready"), "Ready"),
    "warm at host": (lambda: world(**everywhere(residence(residency="host"))), "Ready", ("True", "Ready"), "Ready"),
    "warm nowhere by choice": (
        lambda: world(adapters=(adapter(warm_replicas=0),)),
        "Ready",
        ("True", "Ready"),
        "Ready",
    ),
}


@pytest.mark.parametrize("case", PHASES)
def test_phase_tells_its_reason(case: str) -> None:
    make, type_, expected, ready = PHASES[case]
    seen = make()
    assert condition(seen, type_) == expected
    assert condition(seen, "Ready")[1] == ready


def test_every_reason_a_planner_gives_itself_is_documented() -> None:
    from loraplane_core.resources.reasons import Reason

    known = {reason.value for reason in Reason}
    for make, *_ in PHASES.values():
        for each in status(make())["conditions"]:
            assert each["reason"] in known


@pytest.mark.parametrize("case", PHASES)
def test_status_follows_the_resource_model(case: str) -> None:
    written = status(PHASES[case][0]())
    parsed = AdapterStatus.model_validate(written)
    assert parsed.to_wire() == written
    assert PoolStatus.model_validate(status(world(), "BaseModelPool")).replicas == 2


def test_finalizer_comes_before_anything_else() -> None:
    fresh = adapter(meta=meta("LoRAAdapter", "pirate", finalized=False))
    seen = unclaimed(adapters=(fresh,))
    assert [action for action in plan(seen).actions if action.lane == "object/uid-pirate"] == [
        SetFinalizer(fresh.meta.ref, fresh.meta.uid, present=True, why="")
    ]


def test_claim_carries_the_object_and_follows_an_edit() -> None:
    assert [claim.request for claim in of(ClaimAdapter, unclaimed())] == [claim_request(adapter())]
    assert of(ClaimAdapter, world()) == []
    edited = adapter(warm_replicas=2)
    assert [claim.request for claim in of(ClaimAdapter, world(adapters=(edited,)))] == [claim_request(edited)]


def test_registering_is_keyed_by_object_and_source() -> None:
    (asked,) = of(Register, world(adapters=(adapter(source_hash="h2", source_uri="file:v2"),)))
    assert (asked.uid, asked.request.source_hash) == ("uid-pirate", "h2")
    assert asked.request.source == Source(uri="file:v2")


def test_object_that_owns_activation_moves_the_pointer_by_compare_and_set() -> None:
    owned = entry("pirate", version(), version(number=2), activation_owner="object")
    (moved,) = of(ActivateVersion, world(adapters=(adapter(active_version=2),), registry=registry(owned)))
    assert (moved.request.version, moved.request.expect_active) == (2, 1)


def test_new_source_under_way_leaves_the_old_version_warm() -> None:
    seen = world(adapters=(adapter(source_hash="h2"),), **everywhere(residence()))
    assert condition(seen, "Ready") == ("False", "Progressing")
    assert status(seen)["resident"] == "1/1"
    assert of(Withdraw, seen) == of(Mark, seen) == []


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
    was = frozenset({(HOME, AdapterId("acme", "pirate", 1, "1" * 64))})
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
    assert len(of(Withdraw, refused)) == 2
    stopped = registry(entry(active_version=0))
    seen = replace(serving, registry=stopped)
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
    (last,) = of(SetFinalizer, world(adapters=(gone,), registry=None, **everywhere(residence())))
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
