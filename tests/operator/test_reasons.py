"""Every documented reason is given by something, and nothing gives one that is not documented.

A reason is either the planner's own (a world shows it), or the code of another component that the planner
passes on (the code must be one that a component gives, and a world shows where it ends up).
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

import loraplane_core
import loraplane_engine
import loraplane_gateway
import loraplane_operator
from loraplane_core import errors
from loraplane_core.identity import AdapterId, ReplicaId
from loraplane_core.resources.reasons import Reason, reason_for
from loraplane_operator.actions import (
    Action,
    ActivateVersion,
    ApplyWorkload,
    ClaimAdapter,
    Note,
    Register,
    ReportPool,
    SetFinalizer,
    SetStatus,
    SplitTraffic,
    Warm,
)
from loraplane_operator.plan import plan
from loraplane_operator.plan.last_words import last_words
from loraplane_operator.words import BaseLocation, Memory, World
from tests.operator.plans import HOME, failed, told, unclaimed, with_version
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

WARM = (ReplicaId(*HOME), AdapterId("acme", "pirate", 1, "1" * 64))


def healed() -> World:
    """The status still says that the engine restarted; it is warm again."""
    lost = world(memory=replace(world().memory, warmed={WARM: "boot-before"}))
    seen = told(lost)
    return replace(seen, memory=replace(seen.memory, lost_since={WARM: NOW - 1}), **everywhere(residence()))


def going(**changes: object) -> World:
    gone = adapter(meta=meta("LoRAAdapter", "pirate", deleting_since=NOW - 1))
    return world(adapters=(replace(gone, **changes),))  # type: ignore[arg-type]


def stuck() -> World:
    gone = adapter(meta=meta("LoRAAdapter", "pirate", deleting_since=NOW - 61))
    memory = replace(world().memory, waits={("delete", gone.meta.uid): NOW - 61})
    return world(adapters=(gone,), registry=None, memory=memory)


def crowded() -> World:
    small = msgspec.structs.replace(engine(0).capacity, host_bytes=10)
    return world(**with_engines(engine(0, capacity=small), engine(1, capacity=small)))


def two_bases() -> World:
    newer = pool("newer", base_digest="c" * 64, meta=meta("BaseModelPool", "newer", created_at=NOW - 1))
    return world(pools={POOL: pool(base_digest="b" * 64), newer.ref: newer})


#: The planner's own.
OWN: dict[Reason, Callable[[], World]] = {
    Reason.READY: lambda: world(**everywhere(residence())),
    Reason.PENDING: unclaimed,
    Reason.PROGRESSING: lambda: world(adapters=(adapter(source_hash="h2"),)),
    Reason.DELETING: going,
    Reason.DELETION_TIMED_OUT: stuck,
    Reason.CLAIMED: world,
    Reason.TENANT_UNKNOWN: lambda: world(registry=registry(tenants=frozenset())),
    Reason.CLAIMED_BY_OTHER: lambda: world(registry=registry(entry(claim_uid="other"))),
    Reason.POOL_NOT_FOUND: lambda: unclaimed(pools={}),
    Reason.POOL_NOT_ALLOWED: lambda: unclaimed(pools={POOL: pool(allowed_tenants=("globex",))}),
    Reason.PENDING_BASE: lambda: with_version(state="pending_base"),
    Reason.INGESTING: lambda: with_version(state="ingesting"),
    Reason.UNVERIFIED: lambda: with_version(state="unverified"),
    Reason.INGESTED: world,
    Reason.VALIDATED: world,
    Reason.BASE_MODEL_MISMATCH: lambda: world(pools={POOL: pool(base_digest="c" * 64)}),
    Reason.RANK_TOO_HIGH: lambda: world(pools={POOL: pool(max_rank=4)}),
    Reason.PLACED: world,
    Reason.LOADING: lambda: world(**everywhere(residence(residency="loading"))),
    Reason.LOAD_FAILED: lambda: world(**everywhere(residence(residency="absent", message="truncated"))),
    Reason.INSUFFICIENT_MEMORY: crowded,
    Reason.REPLICA_NOT_READY: lambda: world(engines={}),
    Reason.NO_REPLICA: lambda: world(adapters=(adapter(warm_replicas=3),)),
    Reason.NOT_WARM: world,
    Reason.NOT_ACTIVATED: lambda: world(registry=registry(entry(active_version=0))),
    Reason.NOT_ACTIVATABLE: lambda: world(adapters=(adapter(active_version=2),)),
    Reason.DRIFTED: lambda: world(memory=replace(world().memory, warmed={WARM: "boot-before"})),
    Reason.HEALED: healed,
    Reason.REGISTRY_UNAVAILABLE: lambda: world(registry=None),
    Reason.AVAILABLE: world,
    Reason.STARTING: lambda: world(workloads={POOL: (replica(0, ready=False), replica(1))}),
    Reason.POOL_NAMESPACE_NOT_HONOURED: lambda: world(pool_namespaces=frozenset()),
    Reason.SCALING: lambda: world(pools={POOL: pool(replicas=1)}),
    Reason.INVALID_EPOCH: lambda: world(pools={POOL: pool(epoch=None)}),
    Reason.ROLLOUT_STALLED: lambda: world(
        workloads={POOL: (replica(0, ready=False, message="exit 1"), replica(1, revision="old"))}
    ),
    Reason.BASE_NAME_CONFLICT: two_bases,
    Reason.ROLLING: lambda: world(workloads={POOL: (replica(0, revision="old"), replica(1))}),
    Reason.CRASH_LOOP: lambda: world(workloads={POOL: (replica(0, ready=False, message="exit 1"), replica(1))}),
    Reason.BASE_DIGEST_MISMATCH: lambda: world(pools={POOL: pool(base_digest="c" * 64)}),
    Reason.SCALED_TO_ZERO: lambda: world(pools={POOL: pool(replicas=0)}),
    Reason.HEALTHY: world,
}


def rejected(code: str) -> World:
    return with_version(state="rejected", reason=code, digest="")


def base(code: str) -> World:
    reason = reason_for(code)
    return world(bases={POOL: BaseLocation(reason=reason, message="no")}, workloads=None)


def refused(kind: type[Action], make: Callable[[], World]) -> Callable[[str], World]:
    return lambda code: failed(make(), kind, code)


def unregistered() -> World:
    return world(adapters=(adapter(source_hash="h2"),))


def splitting() -> World:
    both = entry("pirate", version(weight=100), version(number=2), activation_owner="object")
    return world(adapters=(adapter(traffic=((1, 90), (2, 10))),), registry=registry(both))


def moving() -> World:
    both = entry("pirate", version(), version(number=2), activation_owner="object")
    return world(adapters=(adapter(active_version=2),), registry=registry(both))


CLAIMING, REGISTERING = refused(ClaimAdapter, unclaimed), refused(Register, unregistered)
MOVING, SPLITTING, LOADING = refused(ActivateVersion, moving), refused(SplitTraffic, splitting), refused(Warm, world)
APPLYING = refused(ApplyWorkload, lambda: world(workloads={}))
REPORTING = refused(ReportPool, lambda: world(memory=Memory()))

#: Codes of others, by who tells the planner: a refused action, a rejected version, a base that cannot be used.
PASSED_ON: dict[str, Callable[[str], World]] = {
    **dict.fromkeys(("tenant_not_bound", "reserved_name", "immutable_field", "database_unavailable"), CLAIMING),
    **dict.fromkeys(("adapter_withdrawn", "source_not_allowed"), REGISTERING),
    **dict.fromkeys(("active_changed", "activation_not_owned"), MOVING),
    "traffic_changed": SPLITTING,
    **dict.fromkeys(
        (
            "artifact_unavailable",
            "conversion_failed",
            "deadline_exceeded",
            "digest_conflict",
            "engine_busy",
            "engine_failed",
            "engine_unreachable",
            "image_broken",
            "internal_error",
            "no_effect",
            "unavailable",
        ),
        LOADING,
    ),
    "protocol_mismatch": REPORTING,
    "cluster_unavailable": APPLYING,
    "name_taken": APPLYING,
    "pod_template_not_allowed": APPLYING,
    **dict.fromkeys(
        (
            "artifact_rejected",
            "dead_adapter",
            "digest_mismatch",
            "incomplete_pair",
            "invalid_peft_config",
            "malformed_config",
            "malformed_weights",
            "missing_file",
            "no_lora_tensors",
            "not_finite",
            "rank_mismatch",
            "shape_mismatch",
            "source_not_found",
            "source_unavailable",
            "too_large",
            "unknown_tensor",
            "unsafe_format",
            "unsafe_path",
            "unsupported_dtype",
            "unsupported_peft_field",
        ),
        rejected,
    ),
    "base_not_found": base,
}


def given(seen: World) -> set[str]:
    """All reasons in what a plan writes and emits."""
    reasons: set[str] = set()
    for action in plan(seen).actions:
        emitted: Iterable[Note] = getattr(action, "notes", ())
        reasons |= {str(note.reason) for note in emitted}
        if isinstance(action, SetStatus):
            reasons |= {each["reason"] for each in action.status["conditions"]}
    return reasons


@pytest.mark.parametrize("reason", Reason)
def test_reason_is_given_by_something(reason: Reason) -> None:
    if reason is Reason.REFUSED:
        assert reason in given(CLAIMING("a_code_that_nobody_documented"))
    elif reason is Reason.UNINSTALLED:
        assert reason in {each["reason"] for each in last_words("LoRAAdapter", {}, 1, NOW)["conditions"]}
    elif reason in OWN:
        assert reason in given(OWN[reason]())
    else:
        code = re.sub(r"(?<!^)(?=[A-Z])", "_", reason).lower()
        assert code in PASSED_ON, f"no test shows where {reason} comes from"
        assert reason in given(PASSED_ON[code](code))


def codes_of_components() -> set[str]:
    """What the error tree and the sources say; base_not_found is the cluster's word for a missing base."""
    packages = (loraplane_core, loraplane_engine, loraplane_gateway, loraplane_operator)
    sources = "".join(path.read_text() for package in packages for path in Path(package.__path__[0]).rglob("*.py"))
    constant = r"""(?:code=|code = |Failed\(|IMAGE_BROKEN = |NO_EFFECT, TOLD_TIMES = |Reason\.)"?([A-Za-z_]+)"""
    literal = set(re.findall(constant, sources))
    return {code.lower() for code in literal} | {kind.code for kind in errors.tree()}


@pytest.mark.parametrize("code", PASSED_ON)
def test_code_that_is_passed_on_is_one_that_a_component_gives(code: str) -> None:
    assert code in codes_of_components()


@pytest.mark.parametrize("make", [*OWN.values(), *(lambda code=code: PASSED_ON[code](code) for code in PASSED_ON)])
def test_no_plan_gives_a_reason_that_is_not_documented(make: Callable[[], World]) -> None:
    assert given(make()) <= set(Reason)


def test_finalizer_that_goes_tells_why() -> None:
    notes = [note for action in plan(stuck()).actions if isinstance(action, SetFinalizer) for note in action.notes]
    assert [note.reason for note in notes] == [Reason.DELETION_TIMED_OUT]
