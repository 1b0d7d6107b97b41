"""Which version shall be warm on which replicas: the union of objects and of adapters made by REST alone.

An object that holds the claim is truth for pool, warmReplicas and pinned (design §3); without one the
registry's row is. An object that is being deleted wishes nothing.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from loraplane_core import placement
from loraplane_core.errors import InvalidName
from loraplane_core.identity import AdapterId, PoolRef, ReplicaId
from loraplane_core.resources.reasons import Reason
from loraplane_core.wire.registry import Adapter, Version
from loraplane_operator.words import AdapterKey, AdapterObject, PoolObject, World


@dataclass(frozen=True)
class Wish:
    """`replicas` in placement order. A wish with a `refusal` (reason, message) has none."""

    version: Version
    id: AdapterId
    pool: PoolRef
    replicas: tuple[ReplicaId, ...]
    pinned: bool
    holder: AdapterObject | None
    refusal: tuple[str, str] | None = None


def holds_claim(world: World, obj: AdapterObject) -> bool:
    """Whether this object has the claim on its adapter, by the feed or by an answer the feed has yet to show."""
    uid = obj.meta.uid
    if uid in world.memory.released:
        return False
    entry = world.registry.adapters.get(obj.key) if world.registry else None
    return uid in world.memory.claims or (entry is not None and entry.claim_uid == uid)


def holders(world: World) -> dict[AdapterKey, AdapterObject]:
    return {obj.key: obj for obj in world.adapters if holds_claim(world, obj)}


def version_of(adapter: Adapter | None, number: int) -> Version | None:
    if adapter is None:
        return None
    return next((version for version in adapter.versions if version.version == number), None)


def wishes(world: World) -> dict[AdapterKey, Wish]:
    if world.registry is None:
        return {}
    held = holders(world)
    found = {}
    for key, adapter in world.registry.adapters.items():
        holder = held.get(key)
        version = version_of(adapter, adapter.active_version)
        if version is None or version.state != "validated" or not version.digest:
            continue
        if adapter.claim_uid in world.memory.released:
            continue  # the feed is about to say so
        if holder is not None and holder.meta.deleting_since is not None:
            continue
        pool_ref = holder.pool if holder else _pool_ref(adapter.pool)
        if pool_ref is not None:
            found[key] = _wish(world, adapter, version, pool_ref, holder)
    return found


def _wish(world: World, adapter: Adapter, version: Version, ref: PoolRef, holder: AdapterObject | None) -> Wish:
    pool = world.pools.get(ref)
    refusal = refuse_placement(world, ref, pool, version)
    replicas: list[ReplicaId] = []
    if pool is not None and refusal is None:
        count = holder.warm_replicas if holder else adapter.warm_replicas
        replicas = placement.order(version.tenant, version.adapter, pool.replica_ids)[:count]
    return Wish(
        version=version,
        id=AdapterId(version.tenant, version.adapter, version.version, version.digest),
        pool=ref,
        replicas=tuple(replicas),
        pinned=holder.pinned if holder else adapter.pinned,
        holder=holder,
        refusal=refusal,
    )


def refuse_placement(world: World, ref: PoolRef, pool: PoolObject | None, version: Version) -> tuple[str, str] | None:
    """Why this version may not run in this pool at all; None when it may."""
    if pool is None:
        return Reason.POOL_NOT_FOUND, f"there is no BaseModelPool {ref}"
    if pool.meta.deleting_since is not None:
        return Reason.POOL_NOT_FOUND, f"pool {ref} is being deleted"
    base_digest = base_digest_of(world, pool)
    if version.base_digest and base_digest and version.base_digest != base_digest:
        return (
            Reason.BASE_MODEL_MISMATCH,
            f"version {version.version} was made for base {version.base_digest[:12]}; "
            f"pool {ref} serves {base_digest[:12]} ({pool.base_model})",
        )
    if version.rank > pool.max_rank:
        return Reason.RANK_TOO_HIGH, f"rank {version.rank} is above the pool's maxRank {pool.max_rank}"
    return None


def base_digest_of(world: World, pool: PoolObject) -> str:
    """What the pool's base is known to be: declared, else told by an engine; "" while unknown."""
    model = world.memory.models.get(pool.ref)
    return pool.base_digest or (model.base_digest if model else "")


def wished_replicas(found: Mapping[AdapterKey, Wish]) -> dict[tuple[ReplicaId, AdapterId], Wish]:
    return {(replica, wish.id): wish for wish in found.values() for replica in wish.replicas}


def _pool_ref(text: str) -> PoolRef | None:
    try:
        return PoolRef.parse(text)
    except InvalidName:
        return None
