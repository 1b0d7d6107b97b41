"""A pool's workload, its report to the registry, and its status."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from loraplane_core.labels import LABEL_POOL
from loraplane_core.resources.pool import PoolAdapters, PoolCapacity, PoolStatus
from loraplane_core.resources.reasons import Reason
from loraplane_core.wire.engine import WARM
from loraplane_core.wire.registry import PoolReport
from loraplane_operator.actions import (
    Action,
    ApplyWorkload,
    DeleteWorkload,
    RemoveReport,
    ReportPool,
    RestartReplica,
    SetFinalizer,
    WorkloadSpec,
)
from loraplane_operator.plan.conditions import Verdict, render
from loraplane_operator.plan.status import ObjectPlan, status_action
from loraplane_operator.plan.warmth import is_warm
from loraplane_operator.plan.wishes import Wish, base_digest_of
from loraplane_operator.words import AdapterKey, Engine, PoolObject, Replica, World

#: Rotation of credentials raises it; engines accept it and the one before.
EPOCH = 1
#: A pool's finalizer goes at the latest this long after its deletion began.
DELETION_SECONDS = 60.0


def plan_pool(world: World, pool: PoolObject, found: Mapping[AdapterKey, Wish]) -> ObjectPlan:
    if pool.meta.deleting_since is not None:
        return _delete(world, pool)
    if not pool.meta.finalized:
        return ObjectPlan([SetFinalizer(pool.meta.ref, pool.meta.uid, present=True, why="new pool")])
    actions = _workload(world, pool) + _report(world, pool)
    status, due = status_action(world, pool.meta, pool.status, _status(world, pool, found, actions))
    return ObjectPlan(actions + status, due)


def plan_orphan_workloads(world: World) -> list[Action]:
    """Workloads of pools that no longer exist, for example because their state was lost."""
    return [
        DeleteWorkload(ref, why="its pool does not exist")
        for ref in sorted(world.workloads or {})
        if ref not in world.pools and world.watched(ref.namespace)
    ]


def _workload(world: World, pool: PoolObject) -> list[Action]:
    if world.workloads is None:
        return []
    spec = workload_spec(world, pool)
    if spec is None:
        return []
    running = world.workloads.get(pool.ref)
    if running is None:
        return [ApplyWorkload(spec, why="there is no workload yet")]
    if len(running) != spec.replicas:
        return [ApplyWorkload(spec, why=f"{len(running)} replicas, {spec.replicas} wished")]
    return _roll(spec, running)


def _roll(spec: WorkloadSpec, running: tuple[Replica, ...]) -> list[Action]:
    """One replica at a time, broken ones first; the next waits until all others are ready."""
    old = [replica for replica in running if replica.running and replica.revision != spec.revision]
    if not old:
        return []
    broken = [replica for replica in old if not replica.ready]
    if not broken and any(not replica.ready for replica in running):
        return []
    first = min(broken or old, key=lambda replica: replica.id)
    why = f"runs revision {first.revision}, {spec.revision} is wished"
    return [RestartReplica(spec, first.id.ordinal, why=why)]


def workload_spec(world: World, pool: PoolObject) -> WorkloadSpec | None:
    """None while the base's location is unknown or unusable."""
    base = world.bases.get(pool.ref)
    if base is None or base.reason:
        return None
    options = {**dict(pool.engine), "model": base.path, "artifacts-url": world.artifacts_url}
    engine = tuple(sorted((name, value) for name, value in options.items() if value))
    text = json.dumps([engine, EPOCH], separators=(",", ":"))
    revision = hashlib.sha256(text.encode()).hexdigest()[:12]
    return WorkloadSpec(pool.ref, pool.meta.uid, pool.replicas, engine, EPOCH, revision)


def _report(world: World, pool: PoolObject) -> list[Action]:
    if world.registry is None or not world.registry.live:
        return []
    report = pool_report(world, pool)
    known = world.memory.reports.get(pool.ref)
    if known == report:
        return []
    return [ReportPool(pool.ref, report, why="unknown to the registry" if known is None else "changed")]


def pool_report(world: World, pool: PoolObject) -> PoolReport:
    model = world.memory.models.get(pool.ref)
    return PoolReport(
        base_model=pool.base_model,
        aliases=list(pool.aliases),
        base_digest=model.base_digest if model else "",  # the registry keeps what it knows
        config=model.config if model else {},
        max_rank=pool.max_rank,
        max_model_len=model.max_model_len if model else 0,
        replicas=pool.replicas,
        allowed_tenants=list(pool.allowed_tenants),
        allowed_namespaces=list(pool.allowed_namespaces),
        credential_epoch=EPOCH,
    )


def _delete(world: World, pool: PoolObject) -> ObjectPlan:
    """Engines first, then the report, then the finalizer; past the deadline the finalizer goes anyway."""
    meta = pool.meta
    if not meta.finalized or meta.deleting_since is None:
        return ObjectPlan()
    actions: list[Action] = []
    if world.workloads is None or pool.ref in world.workloads:
        actions.append(DeleteWorkload(pool.ref, why="pool deleted"))
    elif world.memory.reports.get(pool.ref, ...) is not None:
        actions.append(RemoveReport(pool.ref, why="pool deleted"))
    deadline = meta.deleting_since + DELETION_SECONDS
    if not actions or world.now >= deadline:
        actions.append(SetFinalizer(meta.ref, meta.uid, present=False, why="nothing is left of the pool"))
    return ObjectPlan(actions, deadline)


def _status(world: World, pool: PoolObject, found: Mapping[AdapterKey, Wish], actions: list[Action]) -> dict[str, Any]:
    replicas = (world.workloads or {}).get(pool.ref, ())
    engines = [world.engines[id_] for id_ in pool.replica_ids if id_ in world.engines]
    wished = set(pool.replica_ids)
    ready = [each for each in replicas if each.ready and each.id in wished and each.id in world.engines]
    mine = {key: wish for key, wish in found.items() if wish.pool == pool.ref and wish.refusal is None}
    resident = {
        residence.ref for engine in engines for residence in engine.residences.values() if residence.residency in WARM
    }
    conditions = [
        _available(pool, ready),
        _progressing(world, pool, replicas, ready, actions),
        _degraded(world, pool, replicas, engines, actions),
    ]
    status = PoolStatus(
        observed_generation=pool.meta.generation,
        replicas=len(replicas),
        ready_replicas=len(ready),
        selector=f"{LABEL_POOL}={pool.ref.name}",
        base_digest=base_digest_of(world, pool) or None,
        capacity=_capacity(engines),
        adapters=PoolAdapters(
            registered=_registered(world, pool),
            ready=sum(all(_warm_on(world, wish)) for wish in mine.values()),
            resident=len(resident),
        ),
    ).to_wire()
    return {**status, "conditions": render(conditions, pool.status, pool.meta.generation, world.now)}


def _warm_on(world: World, wish: Wish) -> list[bool]:
    engines = [world.engines.get(replica) for replica in wish.replicas]
    return [engine is not None and is_warm(engine, wish.id) for engine in engines]


def _registered(world: World, pool: PoolObject) -> int:
    adapters = world.registry.adapters.values() if world.registry else ()
    return sum(adapter.pool == str(pool.ref) for adapter in adapters)


def _capacity(engines: list[Engine]) -> PoolCapacity:
    rows = [engine.capacity for engine in engines]
    return PoolCapacity(
        slots=sum(row.slots for row in rows),
        adapter_bytes=sum(row.adapter_bytes for row in rows),
        used_bytes=sum(row.used_bytes for row in rows),
        host_bytes=sum(row.host_bytes for row in rows),
        kv_tokens=sum(row.kv_tokens for row in rows),
        kv_tokens_displaced=sum(row.kv_tokens_displaced for row in rows),
    )


def _available(pool: PoolObject, ready: list[Replica]) -> Verdict:
    if ready:
        return Verdict("Available", "True", Reason.AVAILABLE, f"{len(ready)} of {pool.replicas} replicas serve")
    if pool.replicas == 0:
        return Verdict("Available", "False", Reason.SCALED_TO_ZERO, "no replica is wished")
    return Verdict("Available", "False", Reason.NO_REPLICA, f"none of {pool.replicas} replicas serves")


def _progressing(
    world: World, pool: PoolObject, replicas: tuple[Replica, ...], ready: list[Replica], actions: list[Action]
) -> Verdict:
    if any(isinstance(action, RestartReplica) for action in actions):
        return Verdict("Progressing", "True", Reason.ROLLING, "replicas are being replaced one by one")
    spec = workload_spec(world, pool)
    if spec and any(replica.running and replica.revision != spec.revision for replica in replicas):
        return Verdict("Progressing", "True", Reason.ROLLING, "the next replica waits for the others to be ready")
    if len(replicas) != pool.replicas or len(ready) < pool.replicas:
        return Verdict("Progressing", "True", Reason.STARTING, f"{len(ready)} of {pool.replicas} replicas are ready")
    return Verdict("Progressing", "False", Reason.READY, "")


def _degraded(
    world: World, pool: PoolObject, replicas: tuple[Replica, ...], engines: list[Engine], actions: list[Action]
) -> Verdict:
    base = world.bases.get(pool.ref)
    if base is not None and base.reason:
        return Verdict("Degraded", "True", base.reason, base.message)
    for action in actions:
        failure = world.failure(action)
        if failure is not None:
            return Verdict("Degraded", "True", failure.reason, failure.message)
    wrong = _wrong_base(world, pool, engines)
    if wrong is not None:
        return wrong
    troubles = [f"replica {replica.id.ordinal}: {replica.message}" for replica in replicas if replica.message]
    if troubles:
        return Verdict("Degraded", "True", Reason.CRASH_LOOP, "; ".join(troubles))
    return Verdict("Degraded", "False", Reason.HEALTHY, "")


def _wrong_base(world: World, pool: PoolObject, engines: list[Engine]) -> Verdict | None:
    expected = base_digest_of(world, pool)
    for engine in engines:
        if expected and engine.base_digest != expected:
            told = f"replica {engine.replica.ordinal} serves {engine.base_digest[:12]}, {expected[:12]} is expected"
            return Verdict("Degraded", "True", Reason.BASE_DIGEST_MISMATCH, told)
    return None
