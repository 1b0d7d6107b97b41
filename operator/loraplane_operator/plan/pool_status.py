"""What a pool's status says, and the Events that tell its changes."""

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from loraplane_core.labels import ANNOTATION_EPOCH, LABEL_POOL
from loraplane_core.resources.pool import PoolAdapters, PoolCapacity, PoolStatus
from loraplane_core.resources.reasons import Reason
from loraplane_core.wire.engine import WARM
from loraplane_operator.actions import Action, Note
from loraplane_operator.plan.bases import base_digest_of, serves
from loraplane_operator.plan.conditions import Verdict, raw_conditions, render
from loraplane_operator.plan.rollout import next_down, outdated, workload_spec
from loraplane_operator.plan.warmth import is_warm
from loraplane_operator.plan.wishes import Wish
from loraplane_operator.words import AdapterKey, Engine, PoolObject, Replica, World

#: A replica that is not ready this long after its start does not become so by itself. A large base takes minutes.
STALL_SECONDS = 600.0


def pool_status(
    world: World, pool: PoolObject, found: Mapping[AdapterKey, Wish], actions: list[Action]
) -> dict[str, Any]:
    replicas = (world.workloads or {}).get(pool.ref, ())
    engines = [world.engines[each.id] for each in replicas if each.id in world.engines]
    serving = [each for each in replicas if serves(world, each)]
    mine = [wish for wish in found.values() if wish.pool == pool.ref and wish.refusal is None and wish.weighted]
    resident = {
        (ref.tenant, ref.adapter)
        for engine in engines
        for ref, residence in engine.residences.items()
        if residence.residency in WARM
    }
    degraded = _degraded(world, pool, replicas, engines, actions)
    conditions = [_available(pool, serving, degraded), _progressing(world, pool, replicas, serving), degraded]
    status = PoolStatus(
        observed_generation=pool.meta.generation,
        replicas=len(replicas),
        ready_replicas=len(serving),
        selector=f"{LABEL_POOL}={pool.ref.name}",
        base_digest=base_digest_of(world, pool) or None,
        capacity=_capacity(engines),
        adapters=PoolAdapters(
            registered=_registered(world, pool),
            ready=sum(_is_warm_everywhere(world, wish) for wish in mine),
            resident=len(resident),
        ),
    ).to_wire()
    return {**status, "conditions": render(conditions, pool.status, pool.meta.generation, world.now)}


def not_honoured_status(world: World, pool: PoolObject) -> dict[str, Any]:
    told = f"the release does not honour pools in namespace {pool.ref.namespace} (pools.namespaces)"
    verdicts = [
        Verdict("Available", "False", Reason.POOL_NAMESPACE_NOT_HONOURED, told),
        Verdict("Progressing", "False", Reason.POOL_NAMESPACE_NOT_HONOURED, told),
        Verdict("Degraded", "True", Reason.POOL_NAMESPACE_NOT_HONOURED, told),
    ]
    status = PoolStatus(observed_generation=pool.meta.generation).to_wire()
    return {**status, "conditions": render(verdicts, pool.status, pool.meta.generation, world.now)}


def pool_notes(pool: PoolObject, status: Mapping[str, Any]) -> tuple[Note, ...]:
    """One per condition whose truth or reason changed; a new pool's good news is no news, and one trouble, told by two
    conditions, is one."""
    before, meta = raw_conditions(pool.status), pool.meta
    told: dict[str, Note] = {}
    for type_, now in raw_conditions(status).items():
        was = before.get(type_)
        bad = (type_ == "Degraded") == (now["status"] == "True") and type_ != "Progressing"
        if (was["status"], was["reason"]) == (now["status"], now["reason"]) if was else not bad or type_ == "Available":
            continue
        kind: Literal["Normal", "Warning"] = "Warning" if bad else "Normal"
        text = now["message"] or f"{type_} is {now['status']}"
        told[now["reason"]] = Note(meta.ref, meta.uid, kind, now["reason"], text)
    return tuple(told.values())


def _is_warm_everywhere(world: World, wish: Wish) -> bool:
    engines = [world.engines.get(replica) for replica in wish.replicas]
    return all(engine is not None and is_warm(engine, target.id) for engine in engines for target in wish.weighted)


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


def _available(pool: PoolObject, serving: list[Replica], degraded: Verdict) -> Verdict:
    """Its reason is a column of `kubectl get`: where nothing serves, what Degraded tells, if it tells anything."""
    if pool.replicas == 0:
        return Verdict("Available", "False", Reason.SCALED_TO_ZERO, "no replica is wished")
    if serving:
        return Verdict("Available", "True", Reason.AVAILABLE, f"{len(serving)} of {pool.replicas} replicas serve")
    told = f"none of {pool.replicas} replicas serves"
    if degraded.holds:
        return Verdict("Available", "False", degraded.reason, f"{told}; {degraded.message}")
    return Verdict("Available", "False", Reason.NO_REPLICA, told)


def _progressing(world: World, pool: PoolObject, replicas: tuple[Replica, ...], serving: list[Replica]) -> Verdict:
    spec = workload_spec(world, pool)
    old = outdated(replicas, spec) if spec else []
    leaver = next_down(world, pool)
    if len(replicas) > pool.replicas:
        told = f"{len(replicas)} replicas become {pool.replicas}; each leaves once its adapters are warm elsewhere"
        return Verdict("Progressing", "True", Reason.SCALING, told)
    if old and leaver is not None and leaver.ready:
        told = f"replica {leaver.id.ordinal} is replaced once its adapters are warm elsewhere"
        return Verdict("Progressing", "True", Reason.ROLLING, told)
    if old:
        told = "broken replicas are replaced" if leaver else "the next replica waits for the others to be ready"
        return Verdict("Progressing", "True", Reason.ROLLING, told)
    if len(replicas) != pool.replicas or len(serving) < pool.replicas:
        return Verdict("Progressing", "True", Reason.STARTING, f"{len(serving)} of {pool.replicas} replicas serve")
    return Verdict("Progressing", "False", Reason.READY, "")


def _degraded(
    world: World, pool: PoolObject, replicas: tuple[Replica, ...], engines: list[Engine], actions: list[Action]
) -> Verdict:
    """The first trouble in this order; the later ones often follow from the earlier."""
    troubles = [
        *_base_troubles(world, pool),
        *_action_troubles(world, actions),
        *_wrong_base(world, pool, engines),
        *_replica_troubles(world, pool, replicas),
        *_name_troubles(world, pool),
    ]
    if pool.epoch is None:
        told = f"the annotation {ANNOTATION_EPOCH} is no whole number from 1 on; the credentials stay as they are"
        troubles.append((Reason.INVALID_EPOCH, told))
    if troubles:
        return Verdict("Degraded", "True", *troubles[0])
    return Verdict("Degraded", "False", Reason.HEALTHY, "")


Trouble = tuple[str, str]


def _base_troubles(world: World, pool: PoolObject) -> Iterator[Trouble]:
    base = world.bases.get(pool.ref)
    if base is not None and base.reason:
        yield base.reason, base.message


def _action_troubles(world: World, actions: list[Action]) -> Iterator[Trouble]:
    for action in actions:
        failure = world.failure(action)
        if failure is not None:
            yield failure.reason, failure.message


def _wrong_base(world: World, pool: PoolObject, engines: list[Engine]) -> Iterator[Trouble]:
    expected = base_digest_of(world, pool)
    for engine in engines:
        if expected and engine.base_digest != expected:
            told = f"replica {engine.replica.ordinal} serves {engine.base_digest[:12]}, {expected[:12]} is expected"
            yield Reason.BASE_DIGEST_MISMATCH, told


def _replica_troubles(world: World, pool: PoolObject, replicas: tuple[Replica, ...]) -> Iterator[Trouble]:
    """A replacement that fails stops the rollout; without a rollout it is simply a replica that fails."""
    spec = workload_spec(world, pool)
    old = outdated(replicas, spec) if spec else []
    failed, slow = [], []
    for each in replicas:
        since = world.memory.waits.get(("start", each.id), world.now)
        if each.message:
            failed.append(f"replica {each.id.ordinal}: {each.message}")
        elif not each.ready and world.now - since >= STALL_SECONDS:
            slow.append(f"replica {each.id.ordinal} is not ready after {STALL_SECONDS:g} s")
    replaced = spec is not None and any(not each.ready and each.revision == spec.revision for each in replicas)
    if (failed or slow) and replaced and any(each.ready for each in old):
        yield Reason.ROLLOUT_STALLED, f"{len(old)} replicas keep the old revision; " + "; ".join([*failed, *slow])
    if failed:
        yield Reason.CRASH_LOOP, "; ".join(failed)
    if slow:
        yield Reason.REPLICA_NOT_READY, "; ".join(slow)


def _name_troubles(world: World, pool: PoolObject) -> Iterator[Trouble]:
    """Clients name a base; under one name there must be one set of weights. The older pool keeps the name."""
    mine, digest = {pool.base_model, *pool.aliases}, base_digest_of(world, pool)
    for other in sorted(world.pools.values(), key=_age):
        theirs = base_digest_of(world, other)
        shared = mine & {other.base_model, *other.aliases}
        if shared and digest and theirs and digest != theirs and _age(other) < _age(pool):
            told = f"{', '.join(sorted(shared))} names {theirs[:12]} in the older pool {other.ref}, here {digest[:12]}"
            yield Reason.BASE_NAME_CONFLICT, told


def _age(pool: PoolObject) -> tuple[float, str]:
    return pool.meta.created_at, str(pool.ref)
