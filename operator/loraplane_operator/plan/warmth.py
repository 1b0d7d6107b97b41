"""From wishes and the engines' own words to PUT, DELETE and marks. What an engine holds beyond the wish
is its cache and no drift, except what the registry withdrew or what bears a wrong digest.
"""

from collections.abc import Iterator

from loraplane_core.identity import AdapterId, AdapterRef
from loraplane_core.wire.engine import WARM, Residence
from loraplane_operator.actions import Action, Mark, Warm, Withdraw
from loraplane_operator.plan.wishes import Wish, holds_claim, version_of, wished_replicas
from loraplane_operator.words import AdapterKey, Engine, Plan, RegistryView, Residue, World

#: An old version stays warm this long after it lost its place, so that a rollback finds it there.
KEEP_SECONDS = 60.0
#: A version that the feed does not know may be newer than our view of the feed; wait before deleting it.
UNKNOWN_GRACE_SECONDS = 10.0
#: Requests on a withdrawn version may finish within this.
DRAIN_SECONDS = 30.0


def plan_warmth(world: World, found: dict[AdapterKey, Wish]) -> Plan:
    actions: list[Action] = []
    for (replica, _), wish in sorted(wished_replicas(found).items()):
        engine = world.engines.get(replica)
        if engine is not None and not base_differs(engine, wish):
            actions += _warm(engine, wish, (replica, wish.id) in world.memory.warmed)
    residues, due = _residues(world, found, actions)
    return Plan(tuple(actions), residues, due)


def base_differs(engine: Engine, wish: Wish) -> bool:
    return bool(wish.version.base_digest) and engine.base_digest != wish.version.base_digest


def residence_of(engine: Engine, id_: AdapterId) -> Residence | None:
    """The engine's residence of exactly these bytes; another digest under the same name does not count."""
    residence = engine.residences.get(id_.ref)
    return residence if residence is not None and residence.digest == id_.digest else None


def is_warm(engine: Engine, id_: AdapterId) -> bool:
    residence = residence_of(engine, id_)
    return residence is not None and residence.residency in WARM


def _warm(engine: Engine, wish: Wish, was_warm: bool) -> Iterator[Action]:
    residence = engine.residences.get(wish.id.ref)
    if residence is not None and residence.digest != wish.id.digest and residence.residency != "absent":
        return  # the wrong bytes go first, by _residues
    warm = is_warm(engine, wish.id)
    if warm and residence and residence.warm_wanted:
        if residence.pinned != wish.pinned:
            why = "pinned changed"
            yield Mark(engine.replica, engine.boot, wish.id, pinned=wish.pinned, warm=True, why=why)
        return
    drift = was_warm and not warm
    yield Warm(
        replica=engine.replica,
        boot=engine.boot,
        id=wish.id,
        bytes=wish.version.bytes,
        rank=wish.version.rank,
        pinned=wish.pinned,
        drift=drift,
        why=_why(residence, drift),
    )


def _why(residence: Residence | None, drift: bool) -> str:
    where = residence.residency if residence else "absent"
    if where in WARM:
        return "cached, not yet marked warm"
    return f"drifted to {where}" if drift else f"is {where}"


def _residues(
    world: World, found: dict[AdapterKey, Wish], actions: list[Action]
) -> tuple[frozenset[Residue], float | None]:
    """Appends what is due to `actions`; returns all residues, so that their age can be kept, and the next due time."""
    registry = world.registry
    if registry is None:
        return frozenset(), None
    wished = wished_replicas(found)
    leaving = {obj.key for obj in world.adapters if obj.meta.deleting_since is not None and holds_claim(world, obj)}
    residues, due = set(), []
    for engine in world.engines.values():
        for ref, residence in engine.residences.items():
            if residence.residency == "absent" or (ref.tenant, ref.adapter) in leaving:
                continue
            if (engine.replica, AdapterId(*ref, residence.digest)) in wished:
                continue
            residue = _residue(registry, engine, ref, residence)
            if residue.known and not residence.warm_wanted:
                continue
            residues.add(residue)
            at = world.memory.residue_since.get(residue, world.now) + _patience(registry, residue)
            if at == float("inf"):
                continue
            if at > world.now:
                due.append(at)
            else:
                actions.append(_remove(residue, residence))
    return frozenset(residues), min(due, default=None)


def _residue(registry: RegistryView, engine: Engine, ref: AdapterRef, residence: Residence) -> Residue:
    version = version_of(registry.adapters.get((ref.tenant, ref.adapter)), ref.version)
    known = version is not None and version.digest == residence.digest
    return Residue(engine.replica, engine.boot, AdapterId(*ref, residence.digest), known)


def _patience(registry: RegistryView, residue: Residue) -> float:
    if residue.known:
        return KEEP_SECONDS
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
