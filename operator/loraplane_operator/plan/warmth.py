"""From wishes and the engines' own words to PUT, DELETE and marks. What an engine holds beyond the wish
is its cache and no drift, except what the registry withdrew or what bears a wrong digest.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from loraplane_core.errors import InsufficientMemory
from loraplane_core.identity import AdapterId, AdapterRef, ReplicaId
from loraplane_core.wire.engine import WARM, Residence
from loraplane_core.wire.registry import Warmed
from loraplane_operator.actions import Action, ConfirmWarm, Mark, Warm, Withdraw
from loraplane_operator.plan.status import residency_class
from loraplane_operator.plan.wishes import Target, Wish, holds_claim, version_of, wished_replicas
from loraplane_operator.words import AdapterKey, Engine, RegistryView, Residue, World

#: An old version stays warm this long after it lost its place, so that a rollback finds it there; no longer than
#: until another one needs the room, and never pinned.
KEEP_SECONDS = 60.0
#: A version that the feed does not know may be newer than our view of the feed; wait before deleting it.
UNKNOWN_GRACE_SECONDS = 10.0
#: Requests on a withdrawn version may finish within this.
DRAIN_SECONDS = 30.0


@dataclass(frozen=True)
class Warmth:
    """`leaving`: what engines still hold of adapters whose object is being deleted."""

    actions: tuple[Action, ...] = ()
    residues: frozenset[Residue] = frozenset()
    lost: frozenset[tuple[ReplicaId, AdapterId]] = frozenset()
    leaving: Mapping[AdapterKey, tuple[Residue, ...]] = field(default_factory=dict)
    due_at: float | None = None


def plan_warmth(world: World, found: Mapping[AdapterKey, Wish]) -> Warmth:
    actions: list[Action] = []
    wished = wished_replicas(found)
    for (replica, id_), target in sorted(wished.items(), key=lambda item: item[0]):
        engine = world.engines.get(replica)
        if engine is not None and not base_differs(engine, target):
            actions += _warm(engine, target, (replica, id_) in world.memory.warmed)
    actions += _confirmations(world, found)
    residues, leaving, due = _residues(world, wished, actions)
    return Warmth(tuple(actions), residues, _lost(world, found, wished), leaving, due)


def base_differs(engine: Engine, target: Target) -> bool:
    return bool(target.version.base_digest) and engine.base_digest != target.version.base_digest


def residence_of(engine: Engine, id_: AdapterId) -> Residence | None:
    """The engine's residence of exactly these bytes; another digest under the same name does not count."""
    residence = engine.residences.get(id_.ref)
    return residence if residence is not None and residence.digest == id_.digest else None


def is_warm(engine: Engine, id_: AdapterId) -> bool:
    residence = residence_of(engine, id_)
    return residence is not None and residence.residency in WARM


def _warm(engine: Engine, target: Target, was_warm: bool) -> Iterator[Action]:
    id_, pinned = target.id, engine.replica in target.pinned_on
    residence = engine.residences.get(id_.ref)
    if residence is not None and residence.digest != id_.digest and residence.residency != "absent":
        return  # the wrong bytes go first, by _residues
    warm = is_warm(engine, id_)
    if warm and residence and residence.warm_wanted:
        if residence.pinned != pinned:
            yield Mark(engine.replica, engine.boot, id_, pinned=pinned, warm=True, why="pinned changed")
        return
    drift = was_warm and not warm
    yield Warm(
        replica=engine.replica,
        boot=engine.boot,
        id=id_,
        bytes=target.version.bytes,
        rank=target.version.rank,
        pinned=pinned,
        drift=drift,
        why=_why(residence, drift),
    )


def _why(residence: Residence | None, drift: bool) -> str:
    where = residence.residency if residence else "absent"
    if where in WARM:
        return "cached, not yet marked warm"
    return f"drifted to {where}" if drift else f"is {where}"


def _confirmations(world: World, found: Mapping[AdapterKey, Wish]) -> Iterator[Action]:
    """The registry flips to a version that waits for it once that is warm wherever it should be, and whoever waits
    learns at once when there is no place for it."""
    for (tenant, adapter), wish in sorted(found.items()):
        target = wish.waiting
        if target is None:
            continue
        if target.refusal is not None:
            reason, message = target.refusal
            refused = Warmed(version=target.id.version, digest="", refusal=message)
            yield ConfirmWarm(tenant, adapter, refused, why=f"is refused a place: {reason}")
            continue
        engines = [world.engines.get(replica) for replica in wish.replicas]
        if all(engine is not None and is_warm(engine, target.id) for engine in engines):
            warmed = Warmed(version=target.id.version, digest=target.id.digest)
            yield ConfirmWarm(tenant, adapter, warmed, why=f"warm on {len(engines)} replicas")


def _lost(
    world: World, found: Mapping[AdapterKey, Wish], wished: Mapping[tuple[ReplicaId, AdapterId], Target]
) -> frozenset[tuple[ReplicaId, AdapterId]]:
    missing = set()
    for replica, id_ in world.memory.warmed:
        if (replica, id_) in wished:
            engine = world.engines.get(replica)
            if engine is None or not is_warm(engine, id_):
                missing.add((replica, id_))
    for replica, id_ in world.memory.lost_since:
        wish = found.get((id_.tenant, id_.adapter))
        if (replica, id_) in wished and wish is not None and not _told_warm(wish, replica):
            missing.add((replica, id_))
    return frozenset(missing)


def _told_warm(wish: Wish, replica: ReplicaId) -> bool:
    """Whether the object's status says that the replica is warm; without an object there is nobody to tell."""
    rows = wish.holder.status.get("replicas") or [] if wish.holder else []
    told = {row["name"]: row.get("residency") for row in rows}
    return wish.holder is None or residency_class(told.get(str(replica))) == "resident"


def _residues(
    world: World, wished: Mapping[tuple[ReplicaId, AdapterId], Target], actions: list[Action]
) -> tuple[frozenset[Residue], dict[AdapterKey, tuple[Residue, ...]], float | None]:
    """Appends what is due to `actions`; returns all residues, so that their age can be kept, those of adapters
    that are being deleted (their deletion's business), and the next due time."""
    registry = world.registry
    if registry is None:
        return frozenset(), {}, None
    leaving: dict[AdapterKey, tuple[Residue, ...]] = {
        obj.key: () for obj in world.adapters if obj.meta.deleting_since is not None and holds_claim(world, obj)
    }
    residues, due = set(), []
    crowded = _crowded(world)
    for engine in world.engines.values():
        for ref, residence in engine.residences.items():
            if residence.residency == "absent" or (engine.replica, AdapterId(*ref, residence.digest)) in wished:
                continue
            residue = _residue(registry, engine, ref, residence)
            if (ref.tenant, ref.adapter) in leaving:
                leaving[ref.tenant, ref.adapter] += (residue,)
                continue
            if residue.known and not residence.warm_wanted:
                continue
            residues.add(residue)
            at = world.memory.residue_since.get(residue, world.now) + _patience(registry, residue, crowded)
            if at == float("inf"):
                continue
            if at > world.now:
                due.append(at)
                if residence.pinned:
                    why = "no longer active here"
                    actions.append(Mark(residue.replica, residue.boot, residue.id, pinned=False, warm=True, why=why))
            else:
                actions.append(_remove(residue, residence))
    return frozenset(residues), leaving, min(due, default=None)


def _residue(registry: RegistryView, engine: Engine, ref: AdapterRef, residence: Residence) -> Residue:
    version = version_of(registry.adapters.get((ref.tenant, ref.adapter)), ref.version)
    known = version is not None and version.digest == residence.digest
    return Residue(engine.replica, engine.boot, AdapterId(*ref, residence.digest), known)


def _crowded(world: World) -> frozenset[ReplicaId]:
    """Where a wish found no room."""
    failures = world.memory.failures.items()
    return frozenset(
        action.replica
        for action, failure in failures
        if isinstance(action, Warm) and failure.code == InsufficientMemory.code
    )


def _patience(registry: RegistryView, residue: Residue, crowded: frozenset[ReplicaId]) -> float:
    if residue.known:
        return 0.0 if residue.replica in crowded else KEEP_SECONDS
    if residue.id.ref in registry.withdrawn:
        return 0.0
    entry = registry.adapters.get((residue.id.tenant, residue.id.adapter))
    if version_of(entry, residue.id.version) is not None:
        return 0.0  # the version is known with another digest: these bytes are wrong
    return UNKNOWN_GRACE_SECONDS if registry.live else float("inf")


def _remove(residue: Residue, residence: Residence) -> Action:
    if residue.known:
        why = "no longer active here, and kept for long enough"
        return Mark(residue.replica, residue.boot, residue.id, pinned=False, warm=False, why=why)
    why = f"not a version of the registry, yet {residence.residency}"
    return Withdraw(residue.replica, residue.boot, residue.id, drain_s=DRAIN_SECONDS, why=why)
