"""Whether there is room for what shall be warm: a warm version holds host memory on each of its replicas, a
pinned one device memory, too. The sums stay within what each engine says that adapters may take.

What is not pinned takes turns on the device, so there must be a place for its turn: it fits beside the pinned ones,
and a pin leaves room for the largest that is not pinned; with `slots`, one slot. Else pins of some would end the
service of all others.

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
from loraplane_operator.plan.bases import model_of
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
    passing: bool  # is not wished pinned: on the device by turns


def admit(world: World, found: Mapping[AdapterKey, Wish]) -> dict[AdapterKey, Wish]:
    """The wishes with the room they got. A wish that got none for something says so in its target's refusal."""
    ledger = Ledger(world, found)
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
                yield Need(level, age, key, index, tuple(group), size, target.id.digest, not wish.pinned)


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
    pool = world.pools.get(wish.pool)
    model = model_of(world, pool) if pool is not None else None
    item = _ITEM_BYTES.get(model.dtype, 0) if model else 0
    return target.version.parameters * item or target.version.bytes


@dataclass(frozen=True)
class _Budget:
    """Of one tier of one replica: bytes, and how many hold them."""

    total: int
    reserved: int = 0
    count: int = 0

    @property
    def free(self) -> int:
        return self.total - self.reserved


class _Short(NamedTuple):
    """What one place lacks for a need, the worst first when sorted; `slots` instead of bytes where these are short."""

    free: int
    why: str
    slots: bool = False


class Ledger:
    """What is reserved in one pass."""

    def __init__(self, world: World, found: Mapping[AdapterKey, Wish]) -> None:
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
        self._slots = {ref: int(dict(pool.engine).get("slots", 0)) for ref, pool in world.pools.items()}
        self._passing = self._largest_passing(world, found)

    def _largest_passing(self, world: World, found: Mapping[AdapterKey, Wish]) -> dict[PoolRef, int]:
        """By pool, the bytes of the largest that is not wished pinned; one larger than the device never has a turn."""
        pinned = {(wish.pool, each.id.digest) for wish in found.values() if wish.pinned for each in wish.targets}
        largest: dict[PoolRef, int] = {}
        for wish in found.values():
            most = self._least.get((wish.pool, "device"), math.inf)
            for target in wish.targets:
                if target.refusal is None and (wish.pool, target.id.digest) not in pinned:
                    size = _size(world, wish, target)
                    largest[wish.pool] = max(largest.get(wish.pool, 0), size if size <= most else 0)
        return largest

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
        new = [place for place in need.places if (place, need.digest) not in self._taken]
        short = [lack for place in new for lack in self._lacks(need, place, pool)]
        if not short:
            return None
        worst = min(short)
        count = len({replica for replica, _ in need.places})
        where = "on 1 replica" if count == 1 else f"on each of {count} replicas"
        needed, free = ("a slot", "0") if worst.slots else (shown(need.bytes, up=True), shown(max(0, worst.free)))
        return Reason.INSUFFICIENT_MEMORY, f"needs {needed} {where}; pool has {free} free ({worst.why})"

    def _lacks(self, need: Need, place: Place, pool: PoolRef) -> Iterator[_Short]:
        replica, tier = place
        device = self._budget((replica, "device"))
        if tier == "host":
            host = self._budget(place)
            if host is not None and host.free < need.bytes:
                yield _Short(host.free, _reserved("host", pool, host))
            if device is not None and ((replica, "device"), need.digest) not in self._taken:
                yield from self._no_turn(need, pool, device)
        elif device is not None:
            yield from self._no_pin(need, pool, device)

    def _no_turn(self, need: Need, pool: PoolRef, device: _Budget) -> Iterator[_Short]:
        """Beside what is pinned; a pinned one's own place is a need of its own."""
        if need.bytes > device.total:
            yield _Short(device.total, f"device memory of {pool}: adapters may take {shown(device.total)} per replica")
        elif need.passing and device.free < need.bytes:
            yield _Short(device.free, _reserved("device", pool, device))
        elif need.passing and 0 < self._slots.get(pool, 0) <= device.count:
            yield _Short(0, f"slots of {pool}: pinned adapters hold {device.count} of {device.count} per replica", True)

    def _no_pin(self, need: Need, pool: PoolRef, device: _Budget) -> Iterator[_Short]:
        """One that had its pin does not lose it to a newcomer that is to have its turns."""
        kept = 0 if need.level == REMEMBERED else self._passing.get(pool, 0)
        slots, kept_slots = self._slots.get(pool, 0), 1 if kept else 0
        if device.free - kept < need.bytes:
            told = f"; {shown(kept, up=True)} stay free for the largest adapter that is not pinned" if kept else ""
            yield _Short(device.free - kept, _reserved("device", pool, device) + told)
        elif 0 < slots <= device.count + kept_slots:
            told = "; 1 stays free for adapters that are not pinned" if kept else ""
            yield _Short(0, f"slots of {pool}: pinned adapters hold {device.count} of {slots} per replica{told}", True)

    def take(self, need: Need) -> None:
        for place in need.places:
            budget = self._budget(place)
            if budget is not None and (place, need.digest) not in self._taken:
                self._budgets[place] = replace(budget, reserved=budget.reserved + need.bytes, count=budget.count + 1)
            self._taken.add((place, need.digest))


def _reserved(tier: Tier, pool: PoolRef, budget: _Budget) -> str:
    return f"{tier} memory of {pool}: {shown(budget.reserved)} of {shown(budget.total)} per replica are reserved"


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
