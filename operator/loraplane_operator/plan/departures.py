"""Warm before leaving: before a replica goes down by our doing, its warm adapters are warm where requests go then.

Gateways skip a replica that is not routable and take the next in placement order. So the next in order is the
extra home of an adapter whose home goes down, until that home serves again; and one that leaves for good is out
of the placement already, so that its adapters' homes are the next in order anyway.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from loraplane_core import placement
from loraplane_core.identity import AdapterId, ReplicaId
from loraplane_operator.plan.bases import serves
from loraplane_operator.plan.rollout import next_down, placement_ids
from loraplane_operator.plan.warmth import is_warm, residence_of
from loraplane_operator.plan.wishes import Target, Wish
from loraplane_operator.words import AdapterKey, PoolObject, Replica, World

#: A replica waits this long at most for its adapters to be warm elsewhere; then it goes, and an Event names the cold.
LEAVE_SECONDS = 60.0


@dataclass(frozen=True)
class Departure:
    """What would be cold if the replica went now. `waiting`: on its way to be warm; `homeless`: there is no room."""

    waiting: tuple[AdapterId, ...] = ()
    homeless: tuple[AdapterId, ...] = ()
    unheard: bool = False  # what it, or a replica that would take over, holds is not known yet

    @property
    def settled(self) -> bool:
        return not self.waiting and not self.unheard


def departure(world: World, pool: PoolObject, found: Mapping[AdapterKey, Wish], leaver: Replica) -> Departure:
    running = (world.workloads or {}).get(pool.ref, ())
    others = frozenset(each.id for each in running if each.id != leaver.id and serves(world, each))
    if len(running) == 1:
        return Departure()  # nobody could take over
    unheard = world.registry is None or any(each.ready and each.id not in world.engines for each in running)
    waiting, homeless = [], []
    for wish, target in _held(world, pool, found, leaver):
        homes = [id_ for id_ in _order(world, pool, wish) if id_ in others][: len(wish.replicas)]
        cold = [id_ for id_ in homes if not is_warm(world.engines[id_], target.id)]
        if not homes or any(id_ in target.replicas for id_ in cold):
            waiting.append(target.id)
        elif cold:
            homeless.append(target.id)
    return Departure(tuple(sorted(waiting)), tuple(sorted(homeless)), unheard)


def _held(
    world: World, pool: PoolObject, found: Mapping[AdapterKey, Wish], leaver: Replica
) -> Iterator[tuple[Wish, Target]]:
    """What is warm on the replica and shall be warm somewhere."""
    engine = world.engines.get(leaver.id)
    if engine is None:
        return
    for wish in found.values():
        if wish.pool == pool.ref and wish.replicas:
            for target in wish.targets:
                if is_warm(engine, target.id):
                    yield wish, target


def with_extra_homes(world: World, found: Mapping[AdapterKey, Wish]) -> dict[AdapterKey, Wish]:
    """The wishes, each target's `replicas` extended where a home is about to go down, or is down and was covered."""
    absent = {ref: _absent(world, pool) for ref, pool in world.pools.items()}
    if not any(absent.values()):
        return dict(found)
    rooms = _Rooms(world, found)
    return {key: _extended(world, wish, absent.get(wish.pool, frozenset()), rooms) for key, wish in found.items()}


def _absent(world: World, pool: PoolObject) -> frozenset[ReplicaId]:
    """Replicas in the placement that do not serve, or are next not to."""
    running = (world.workloads or {}).get(pool.ref)
    if running is None:
        return frozenset()
    leaver = next_down(world, pool)
    serving = {each.id for each in running if serves(world, each) and (leaver is None or each.id != leaver.id)}
    return frozenset(placement_ids(world, pool)) - serving


def _extended(world: World, wish: Wish, absent: frozenset[ReplicaId], rooms: "_Rooms") -> Wish:
    gone = [id_ for id_ in wish.replicas if id_ in absent]
    pool = world.pools.get(wish.pool)
    if not gone or pool is None:
        return wish
    order = [id_ for id_ in _order(world, pool, wish) if id_ not in absent and id_ not in wish.replicas]
    leaver = next_down(world, pool)
    going = world.engines.get(leaver.id) if leaver is not None and leaver.id in gone else None
    targets = []
    for target in wish.targets:
        held = target.refusal is None and going is not None and is_warm(going, target.id)
        extra = [id_ for id_ in order[: len(gone)] if _covers(world, target, id_) or (held and rooms.take(target, id_))]
        targets.append(replace(target, replicas=(*target.replicas, *extra)))
    return replace(wish, targets=tuple(targets))


def _covers(world: World, target: Target, id_: ReplicaId) -> bool:
    """By our wish, though it was no home: the home went down, or is still to come. It stays until that serves."""
    residence = residence_of(world.engines[id_], target.id)
    return residence is not None and residence.warm_wanted


class _Rooms:
    """Host memory that reservations leave free, replica by replica."""

    def __init__(self, world: World, found: Mapping[AdapterKey, Wish]) -> None:
        self._sizes: dict[AdapterId, int] = {}
        for engine in world.engines.values():
            for ref, residence in engine.residences.items():
                self._sizes[AdapterId(*ref, residence.digest)] = residence.bytes
        self._free = {id_: engine.capacity.host_bytes for id_, engine in world.engines.items()}
        for wish in found.values():
            for target in wish.targets:
                for id_ in target.replicas:
                    self._reserve(target, id_)

    def take(self, target: Target, id_: ReplicaId) -> bool:
        if self._free.get(id_, 0) < self._size(target):
            return False
        self._reserve(target, id_)
        return True

    def _reserve(self, target: Target, id_: ReplicaId) -> None:
        self._free[id_] = self._free.get(id_, 0) - self._size(target)

    def _size(self, target: Target) -> int:
        return self._sizes.get(target.id) or target.version.bytes


def _order(world: World, pool: PoolObject, wish: Wish) -> tuple[ReplicaId, ...]:
    return _placed(wish.adapter.tenant, wish.adapter.adapter, tuple(placement_ids(world, pool)))


@lru_cache(maxsize=1 << 14)
def _placed(tenant: str, adapter: str, replicas: tuple[ReplicaId, ...]) -> tuple[ReplicaId, ...]:
    return tuple(placement.order(tenant, adapter, replicas))
