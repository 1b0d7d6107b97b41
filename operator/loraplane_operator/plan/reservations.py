"""Whether there is room for what shall be warm: a warm version holds host memory on each of its replicas, a
pinned one device memory, too. The sums stay within what each engine says that adapters may take.

Room goes, in this order, to
  held        what is warm there by our wish: it is there, so it fits;
  remembered  what was warm there, by the operator's memory or by the object's last status: an engine that
              restarted, or an operator that did, changes nothing about who has a place;
  replacing   another version of an adapter that is warm there;
  new         all else, on all its replicas or on none, so that two half-placed adapters cannot block each other;
and among equals to the older. So nobody loses a place to a newcomer, and one who was refused gets the next room
without anybody's doing. A version whose bytes are reserved on a replica already costs nothing there. While no
engine of a pool has told what it has, nothing is refused.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from loraplane_core.identity import AdapterRef, PoolRef, ReplicaId
from loraplane_core.resources.reasons import Reason
from loraplane_core.wire.engine import WARM, Residence
from loraplane_operator.plan.conditions import from_rfc3339, raw_conditions
from loraplane_operator.plan.readiness import DROPPED, RESTARTED
from loraplane_operator.plan.wishes import Refusal, Target, Wish
from loraplane_operator.words import AdapterKey, Engine, World

HELD, REMEMBERED, REPLACING, NEW = range(4)
Tier = Literal["host", "device"]
Place = tuple[ReplicaId, Tier]
_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class Need(NamedTuple):
    """Places that one target needs together. Needs are sorted into the order in which room is given."""

    level: int
    age: float
    key: AdapterKey
    nth: int  # of its wish's targets
    places: tuple[Place, ...]
    bytes: int
    digest: str


def admit(world: World, found: Mapping[AdapterKey, Wish]) -> dict[AdapterKey, Wish]:
    """The wishes with the room they got. A wish that got none for something says so in its target's refusal."""
    ledger = Ledger(world)
    granted: dict[tuple[AdapterKey, int], set[Place]] = {}
    refused: dict[tuple[AdapterKey, int], Refusal] = {}
    for need in sorted(need for key, wish in found.items() for need in _needs(world, key, wish)):
        target = need.key, need.nth
        refusal = ledger.refuse(need, found[need.key].pool) if need.level != HELD else None
        if refusal is None:
            ledger.take(need)
            granted.setdefault(target, set()).update(need.places)
        else:
            refused.setdefault(target, refusal)
    return {key: _with_room(key, wish, granted, refused) for key, wish in found.items()}


def _with_room(
    key: AdapterKey,
    wish: Wish,
    granted: Mapping[tuple[AdapterKey, int], set[Place]],
    refused: Mapping[tuple[AdapterKey, int], Refusal],
) -> Wish:
    def target_with_room(index: int, target: Target) -> Target:
        places = granted.get((key, index), set())
        replicas = tuple(id_ for id_ in wish.replicas if (id_, "host") in places)
        pinned_on = frozenset(id_ for id_ in replicas if (id_, "device") in places)
        refusal = target.refusal or refused.get((key, index))
        return replace(target, replicas=replicas, pinned_on=pinned_on, refusal=refusal)

    return replace(wish, targets=tuple(target_with_room(*each) for each in enumerate(wish.targets)))


def _needs(world: World, key: AdapterKey, wish: Wish) -> Iterator[Need]:
    tiers: tuple[Tier, ...] = ("host", "device") if wish.pinned else ("host",)
    age = _age(wish)
    for index, target in enumerate(wish.targets):
        if target.refusal is not None:
            continue
        levels: dict[int, list[Place]] = {}
        for replica in wish.replicas:
            for tier in tiers:
                levels.setdefault(_level(world, wish, target, replica, tier), []).append((replica, tier))
        size = _size(world, wish, target)
        for level, places in levels.items():
            together = [places] if level == NEW else [[place] for place in places]
            for group in together:
                yield Need(level, age, key, index, tuple(group), size, target.id.digest)


def _age(wish: Wish) -> float:
    if wish.holder is not None:
        return wish.holder.meta.created_at
    told = wish.adapter.versions[0].created_at
    return from_rfc3339(told) if told else 0.0


def _level(world: World, wish: Wish, target: Target, replica: ReplicaId, tier: Tier) -> int:
    engine = world.engines.get(replica)
    residence = engine.residences.get(target.id.ref) if engine else None
    if residence is not None and residence.digest == target.id.digest and _holds(residence, tier):
        return HELD
    if tier == "host" and (replica, target.id) in world.memory.warmed:
        return REMEMBERED
    if _placed_before(wish, target, replica, tier):
        return REMEMBERED
    return REPLACING if engine is not None and _holds_other(engine, wish, tier) else NEW


def _holds(residence: Residence, tier: Tier) -> bool:
    """By our wish; what a request brought in is the engine's cache and goes when room is needed."""
    return residence.residency in WARM and residence.warm_wanted and (tier == "host" or residence.pinned)


def _holds_other(engine: Engine, wish: Wish, tier: Tier) -> bool:
    refs = (AdapterRef(each.tenant, each.adapter, each.version) for each in wish.adapter.versions)
    return any(ref in engine.residences and _holds(engine.residences[ref], tier) for ref in refs)


def _placed_before(wish: Wish, target: Target, replica: ReplicaId, tier: Tier) -> bool:
    """By the object's status: the one record that outlives both the engine and the operator."""
    if wish.holder is None or not target.weight:
        return False
    status = wish.holder.status
    placed = raw_conditions(status).get("Placed")
    if placed is None or placed["status"] != "True":
        return False
    same_spec = placed.get("observedGeneration") == wish.holder.meta.generation
    if target is wish.targets[0]:
        known = status.get("activeVersion") == target.id.version and (tier == "host" or same_spec)
    else:
        known = same_spec
    return known and any(_was_there(row) for row in status.get("replicas") or [] if row["name"] == str(replica))


def _was_there(row: Mapping[str, Any]) -> bool:
    return row.get("residency") != "absent" or row.get("message") in (RESTARTED, DROPPED)


def _size(world: World, wish: Wish, target: Target) -> int:
    """Bytes in memory: as an engine has it, else by its parameters, else as the artifact has them."""
    for replica in wish.replicas:
        engine = world.engines.get(replica)
        residence = engine.residences.get(target.id.ref) if engine else None
        if residence is not None and residence.bytes and residence.digest == target.id.digest:
            return residence.bytes
    model = world.memory.models.get(wish.pool)
    item = _ITEM_BYTES.get(model.dtype, 0) if model else 0
    return target.version.parameters * item or target.version.bytes


@dataclass(frozen=True)
class _Budget:
    total: int
    reserved: int = 0

    @property
    def free(self) -> int:
        return self.total - self.reserved


class Ledger:
    """What is reserved in one pass."""

    def __init__(self, world: World) -> None:
        self._engines = world.engines
        self._least: dict[tuple[PoolRef, Tier], int] = {}
        for engine in world.engines.values():
            for tier in ("host", "device"):
                known = self._least.get((engine.replica.pool_ref, tier), math.inf)
                total = _total(engine, tier)
                if 0 < total < known:
                    self._least[engine.replica.pool_ref, tier] = total
        self._budgets: dict[Place, _Budget] = {}
        self._taken: set[tuple[Place, str]] = set()

    def _budget(self, place: Place) -> _Budget | None:
        """None while neither this replica nor another of its pool has told."""
        if place not in self._budgets:
            replica, tier = place
            engine = self._engines.get(replica)
            total = _total(engine, tier) if engine else 0
            total = total or self._least.get((replica.pool_ref, tier), 0)
            if not total:
                return None
            self._budgets[place] = _Budget(total)
        return self._budgets[place]

    def refuse(self, need: Need, pool: PoolRef) -> Refusal | None:
        short: list[tuple[Tier, _Budget]] = []
        for place in need.places:
            if (place, need.digest) in self._taken:
                continue
            budget = self._budget(place)
            if budget is not None and budget.free < need.bytes:
                short.append((place[1], budget))
        if not short:
            return None
        tier, budget = min(short, key=lambda each: each[1].free)
        count = len({replica for replica, _ in need.places})
        where = "on 1 replica" if count == 1 else f"on each of {count} replicas"
        return (
            Reason.INSUFFICIENT_MEMORY,
            f"needs {shown(need.bytes, up=True)} {where}; pool has {shown(max(0, budget.free))} free "
            f"({tier} memory of {pool}: {shown(budget.reserved)} of {shown(budget.total)} per replica are reserved)",
        )

    def take(self, need: Need) -> None:
        for place in need.places:
            budget = self._budget(place)
            if budget is not None and (place, need.digest) not in self._taken:
                self._budgets[place] = replace(budget, reserved=budget.reserved + need.bytes)
            self._taken.add((place, need.digest))


def _total(engine: Engine, tier: Tier) -> int:
    """0 until its core has told."""
    return engine.capacity.host_bytes if tier == "host" else engine.capacity.adapter_bytes


def shown(count: int, *, up: bool = False) -> str:
    """Bytes for people, with at most one digit after the point: needs are rounded up, room is rounded down."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            tenths = math.ceil(count * 10 / size) if up else count * 10 // size
            return f"{tenths / 10:g} {unit}"
    return f"{count} bytes"
