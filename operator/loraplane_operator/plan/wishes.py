"""Which versions shall be warm on which replicas: the union of objects and of adapters made by REST alone.

An object that holds the claim is truth for pool, warmReplicas and pinned (design §3); without one the
registry's row is. An object that is being deleted wishes nothing. Warm shall be every version that gets
requests, and the one that shall become active once it is warm. Whether there is room for it, decides
`reservations`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from loraplane_core import placement
from loraplane_core.errors import InvalidName
from loraplane_core.identity import AdapterId, PoolRef, ReplicaId
from loraplane_core.resources.reasons import Reason
from loraplane_core.wire.registry import Adapter, Version
from loraplane_operator.plan.bases import base_digest_of
from loraplane_operator.plan.rollout import placement_ids
from loraplane_operator.words import AdapterKey, AdapterObject, PoolObject, World

Refusal = tuple[str, str]  # reason, message


@dataclass(frozen=True)
class Target:
    """One version that shall be warm. `replicas` and `pinned_on`: where it has got room, by `reservations`."""

    version: Version
    id: AdapterId
    weight: int  # percent of requests; 0 = it becomes active once it is warm
    refusal: Refusal | None = None
    replicas: tuple[ReplicaId, ...] = ()
    pinned_on: frozenset[ReplicaId] = frozenset()


@dataclass(frozen=True)
class Wish:
    """One adapter's. `replicas`: where each target should be warm, in placement order."""

    pool: PoolRef
    replicas: tuple[ReplicaId, ...]
    pinned: bool
    holder: AdapterObject | None
    adapter: Adapter
    targets: tuple[Target, ...]  # never empty; the active version first, a waiting one last

    @property
    def version(self) -> Version:
        return self.targets[0].version

    @property
    def id(self) -> AdapterId:
        return self.targets[0].id

    @property
    def weighted(self) -> tuple[Target, ...]:
        """The versions that get requests."""
        return tuple(target for target in self.targets if target.weight)

    @property
    def waiting(self) -> Target | None:
        """The version that gets all requests once it is warm; it may get some already."""
        return next((target for target in self.targets if target.id.version == self.adapter.intent_version), None)

    @property
    def refusal(self) -> Refusal | None:
        """Why a version that gets requests is not placed."""
        return next((target.refusal for target in self.weighted or self.targets if target.refusal), None)


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


def shares_of(adapter: Adapter) -> dict[int, int]:
    """Percent of requests by version, the active one first."""
    shares = {version.version: version.weight for version in adapter.versions if version.weight}
    if not shares:
        return {adapter.active_version: 100} if adapter.active_version else {}
    return dict(sorted(shares.items(), key=lambda share: (share[0] != adapter.active_version, -share[1], share[0])))


def wishes(world: World) -> dict[AdapterKey, Wish]:
    """All wishes, before anybody asked whether there is room."""
    if world.registry is None:
        return {}
    held = holders(world)
    made = ((key, _wish(world, adapter, held.get(key))) for key, adapter in world.registry.adapters.items())
    return {key: wish for key, wish in made if wish is not None}


def _wish(world: World, adapter: Adapter, holder: AdapterObject | None) -> Wish | None:
    if adapter.claim_uid in world.memory.released and adapter.claim_uid:
        return None  # the feed is about to say so
    if holder is not None and holder.meta.deleting_since is not None:
        return None
    ref = holder.pool if holder else _pool_ref(adapter.pool)
    if ref is None:
        return None
    pool = world.pools.get(ref)
    namespace = holder.meta.ref.namespace if holder else ""
    targets = tuple(_targets(world, adapter, ref, pool, namespace))
    if not targets:
        return None
    replicas: tuple[ReplicaId, ...] = ()
    if pool is not None and any(target.refusal is None for target in targets):
        count = holder.warm_replicas if holder else adapter.warm_replicas
        replicas = tuple(placement.order(adapter.tenant, adapter.adapter, placement_ids(world, pool))[:count])
    pinned = holder.pinned if holder else adapter.pinned
    return Wish(pool=ref, replicas=replicas, pinned=pinned, holder=holder, adapter=adapter, targets=targets)


def _targets(world: World, adapter: Adapter, ref: PoolRef, pool: PoolObject | None, namespace: str) -> Iterator[Target]:
    shares = shares_of(adapter)
    if adapter.intent_version and adapter.intent_version not in shares:
        shares[adapter.intent_version] = 0
    for number, weight in shares.items():
        version = version_of(adapter, number)
        if version is not None and version.state == "validated" and version.digest:
            id_ = AdapterId(version.tenant, version.adapter, number, version.digest)
            yield Target(version, id_, weight, refuse_placement(world, ref, pool, version, namespace))


def refuse_placement(
    world: World, ref: PoolRef, pool: PoolObject | None, version: Version, namespace: str
) -> Refusal | None:
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
        told = f"rank {version.rank} is above maxRank {pool.max_rank} of pool {ref}"
        return Reason.RANK_TOO_HIGH, f"{told}; {roomier_pool(world, pool, version.tenant, namespace, version.rank)}"
    return None


def roomier_pool(world: World, pool: PoolObject, tenant: str, namespace: str, rank: int) -> str:
    """Which other pool of this base takes an adapter of this rank from there, in words."""
    fitting = [
        other
        for other in world.pools.values()
        if other.max_rank >= rank and admits(other, tenant, namespace) is None and _same_base(world, pool, other)
    ]
    if not fitting:
        return f"no pool of {pool.base_model} that admits it takes rank {rank}"
    best = min(fitting, key=lambda other: (other.max_rank, other.ref))
    return f"pool {best.ref} of the same base takes up to rank {best.max_rank}"


def admits(pool: PoolObject, tenant: str, namespace: str) -> str | None:
    """Why the pool does not take adapters of this tenant from this namespace ("": from nobody's); None if it does."""
    if pool.meta.deleting_since is not None:
        return f"pool {pool.ref} is being deleted"
    if pool.allowed_tenants and tenant not in pool.allowed_tenants:
        return f"pool {pool.ref} does not admit tenant {tenant}"
    if namespace and pool.allowed_namespaces and namespace not in pool.allowed_namespaces:
        return f"pool {pool.ref} does not admit namespace {namespace}"
    return None


def _same_base(world: World, one: PoolObject, other: PoolObject) -> bool:
    digests = base_digest_of(world, one), base_digest_of(world, other)
    return digests[0] == digests[1] if all(digests) else one.base_model == other.base_model


def wished_replicas(found: Mapping[AdapterKey, Wish]) -> dict[tuple[ReplicaId, AdapterId], Target]:
    """What shall be warm where, as far as there is room."""
    return {
        (replica, target.id): target
        for wish in found.values()
        for target in wish.targets
        for replica in target.replicas
    }


def _pool_ref(text: str) -> PoolRef | None:
    try:
        return PoolRef.parse(text)
    except InvalidName:
        return None
