"""The phases of an adapter and the reasons they give. A table over one small world."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from loraplane_core.identity import AdapterRef
from loraplane_core.resources.adapter import AdapterStatus
from loraplane_core.resources.pool import PoolStatus
from loraplane_core.wire.registry import Source
from loraplane_operator.actions import (
    ActivateVersion,
    ClaimAdapter,
    Mark,
    Register,
    SetFinalizer,
    Warm,
    Withdraw,
)
from loraplane_operator.plan import plan
from loraplane_operator.plan.adapters import claim_request
from loraplane_operator.words import Memory, World
from tests.operator.plans import condition, failed, of, status, unclaimed, with_version
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
    residence,
    version,
    with_engines,
    world,
)

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
    "version not in the feed": (
        lambda: world(registry=registry(entry("pirate", version(number=7), active_version=0))),
        "Ingested",
        ("False", "Progressing"),
        "Progressing",
    ),
    "version removed": (
        lambda: failed(
            world(registry=registry(entry("pirate", version(number=7), active_version=0))),
            Register,
            "adapter_withdrawn",
        ),
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
        lambda: world(adapters=(adapter(traffic=((1, 90), (2, 10))),)),
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


def test_a_version_that_left_the_feed_is_asked_for_and_never_registered_anew() -> None:
    """It may have become another one, with the same bytes; or somebody removed it, and it must not come back."""
    gone = AdapterRef("acme", "pirate", 1)
    seen = world(registry=registry(entry("pirate", version(number=7), active_version=7), withdrawn=frozenset({gone})))
    at_once = replace(seen, memory=replace(seen.memory, registered_at=dict.fromkeys(seen.memory.registered, NOW)))
    (asked,) = of(Register, at_once)
    assert asked.request.known_only
    twin = replace(
        seen, memory=replace(seen.memory, registered=dict.fromkeys(seen.memory.registered, version(number=7)))
    )
    assert of(Register, twin) == []
    assert condition(twin, "Ingested")[0] == "True"


def test_a_source_that_the_object_returns_to_is_told_as_such() -> None:
    seen = world(adapters=(adapter(source_hash="h2"),))
    (asked,) = of(Register, seen)  # "h1" is what it named before
    assert asked.request.returned
    (first,) = of(Register, replace(seen, memory=replace(seen.memory, registered={})))
    assert not first.request.returned
