"""Planning converges: whatever state things are in, a world that carries out the actions, one by one and in
any order, reaches a state for which nothing is left to do; and that state does not depend on the order."""

import random
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from loraplane_core import placement
from loraplane_core.identity import AdapterRef, ReplicaId
from loraplane_core.wire.engine import WARM, Residence
from loraplane_core.wire.registry import Adapter
from loraplane_operator.actions import (
    Action,
    ActivateVersion,
    ApplyWorkload,
    ClaimAdapter,
    ConfirmWarm,
    Mark,
    Register,
    ReleaseClaim,
    ReportPool,
    SetFinalizer,
    SetStatus,
    SplitTraffic,
    Warm,
    Withdraw,
)
from loraplane_operator.plan import plan
from loraplane_operator.plan.warmth import KEEP_SECONDS
from loraplane_operator.words import AdapterObject, Engine, Memory, PoolObject, World
from tests.operator.worlds import NOW, POOL, adapter, engine, meta, pool, registry, replica, version, world

NAMES = ("pirate", "json", "haiku")
STEPS = 400
#: How an object decides which version serves: not at all, one, several, one that may not exist.
ACTIVATIONS: tuple[dict[str, Any], ...] = (
    {},
    {"active_version": 1},
    {"active_version": 2},
    {"traffic": ((1, 70), (2, 30))},
)


def weighted(known: Adapter, shares: dict[int, int]) -> Adapter:
    """With these weights, and no version that waits, as the registry does it."""
    versions = [msgspec.structs.replace(each, weight=shares.get(each.version, 0)) for each in known.versions]
    active = min(shares, key=lambda number: (-shares[number], number), default=0)
    return msgspec.structs.replace(known, versions=versions, active_version=active, intent_version=0)


@dataclass
class Simulation:
    """The rest of the system, played by dicts: each action has the effect that the real one has."""

    objects: dict[str, AdapterObject]
    pool: PoolObject
    entries: dict[str, Adapter]
    engines: dict[ReplicaId, Engine]
    memory: Memory = field(default_factory=Memory)
    now: float = NOW

    def world(self) -> World:
        return world(
            now=self.now,
            pools={POOL: self.pool},
            adapters=tuple(self.objects.values()),
            workloads={POOL: tuple(replica(each.ordinal) for each in self.pool.replica_ids)},
            engines=self.engines,
            registry=registry(*self.entries.values()),
            memory=self.memory,
        )

    def do(self, action: Action) -> None:
        memory = self.memory
        match action:
            case ApplyWorkload(spec=spec):
                self.memory = replace(memory, applied={spec.pool: spec})
            case ReportPool():
                self.memory = replace(memory, reports={action.pool: action.report})
            case SetFinalizer(ref=ref, present=present):
                obj = self.objects[ref.name]
                self.objects[ref.name] = replace(obj, meta=replace(obj.meta, finalized=present))
                if not present:
                    del self.objects[ref.name]
            case SetStatus(ref=ref, status=status):
                if ref.name in self.objects:
                    self.objects[ref.name] = replace(self.objects[ref.name], status=status)
                elif ref.name == "pool":
                    self.pool = replace(self.pool, status=status)
            case ClaimAdapter(uid=uid, request=request):
                name = request.adapter
                known = self.entries.get(name, Adapter(tenant="acme", adapter=name))
                self.entries[name] = msgspec.structs.replace(
                    known,
                    claim_uid=uid,
                    claim_ref=request.ref,
                    pool=request.pool,
                    warm_replicas=request.warm_replicas,
                    pinned=request.pinned,
                    activation_owner="object" if request.owns_activation else "registry",
                )
            case Register(uid=uid, request=asked):
                name = next(name for name, each in self.entries.items() if each.claim_uid == uid)
                known = self.entries[name]
                number = 1 if asked.source_hash == "h1" else 2
                made = version(name, number)
                made = next((each for each in known.versions if each.version == number), made)
                versions = [*(each for each in known.versions if each.version != number), made]
                known = msgspec.structs.replace(known, versions=sorted(versions, key=lambda each: each.version))
                owned = known.activation_owner == "object"
                self.entries[name] = known if owned else weighted(known, {number: 100})
                key = (uid, asked.source_hash)
                self.memory = replace(memory, registered={**memory.registered, key: made})
            case ActivateVersion(uid=uid, request=wanted):
                name = next(name for name, each in self.entries.items() if each.claim_uid == uid)
                self.entries[name] = weighted(self.entries[name], {wanted.version: 100} if wanted.version else {})
            case SplitTraffic(uid=uid, request=split):
                name = next(name for name, each in self.entries.items() if each.claim_uid == uid)
                shares = {each.version: each.weight for each in split.shares}
                self.entries[name] = weighted(self.entries[name], shares)
            case ConfirmWarm(adapter=name, request=warmed):
                known = self.entries[name]
                assert known.intent_version == warmed.version
                flipped = known if warmed.refusal else weighted(known, {warmed.version: 100})
                self.entries[name] = msgspec.structs.replace(flipped, intent_version=0)
            case ReleaseClaim(uid=uid, versions=kept):
                name = next(name for name, each in self.entries.items() if each.claim_uid == uid)
                if kept == "delete":
                    del self.entries[name]
                else:
                    stopped = weighted(self.entries[name], {})
                    self.entries[name] = msgspec.structs.replace(stopped, claim_uid="", claim_ref="")
            case Warm() | Mark() | Withdraw():
                self._engine(action)
            case _:
                raise AssertionError(f"unexpected {action}")

    def _engine(self, action: Warm | Mark | Withdraw) -> None:
        known = self.engines[action.replica]
        held = dict(known.residences)
        match action:
            case Warm(id=id_, pinned=pinned):
                held[id_.ref] = Residence(
                    ref=str(id_.ref), digest=id_.digest, residency="device", pinned=pinned, warm_wanted=True
                )
            case Mark(id=id_, pinned=pinned, warm=warm):
                held[id_.ref] = msgspec.structs.replace(held[id_.ref], pinned=pinned, warm_wanted=warm)
            case Withdraw(id=id_):
                held.pop(id_.ref, None)
        self.engines[action.replica] = replace(known, residences=held)

    def run(self, order: random.Random) -> None:
        """Carry out one action at a time until nothing is left; time passes only when there is nothing to do."""
        for _ in range(STEPS):
            planned = plan(self.world())
            assert not planned.broken
            since = {each: self.memory.residue_since.get(each, self.now) for each in planned.residues}
            self.memory = replace(self.memory, residue_since=since)
            actions = sorted(set(planned.actions), key=repr)
            if actions:
                self.do(order.choice(actions))
            elif planned.due_at is not None and self.now < NOW + 2 * KEEP_SECONDS:
                self.now = max(planned.due_at, self.now)
            else:
                return
        raise AssertionError(f"still busy after {STEPS} actions: {plan(self.world()).actions}")

    def outcome(self) -> Any:
        held = {
            (str(id_), str(ref), each.digest, each.pinned)
            for id_, known in self.engines.items()
            for ref, each in known.residences.items()
            if each.residency in WARM and each.warm_wanted
        }
        claims = {
            (name, each.claim_uid, each.intent_version, tuple((v.version, v.weight) for v in each.versions))
            for name, each in self.entries.items()
        }
        ready = {name: _ready(each) for name, each in self.objects.items()}
        return held, claims, ready


def _ready(obj: AdapterObject) -> Any:
    return [(each["type"], each["status"], each["reason"]) for each in obj.status["conditions"]]


@st.composite
def residences(draw: st.DrawFn) -> list[Residence]:
    found = {}
    for name in draw(st.lists(st.sampled_from([*NAMES, "stray"]), max_size=4)):
        number = draw(st.integers(1, 2))
        found[f"acme/{name}@{number}"] = Residence(
            ref=f"acme/{name}@{number}",
            digest=draw(st.sampled_from([format(number, "x") * 64, "e" * 64])),
            residency=draw(st.sampled_from(["device", "host", "disk", "loading"])),
            pinned=draw(st.booleans()),
            warm_wanted=draw(st.booleans()),
        )
    return list(found.values())


@st.composite
def entries(draw: st.DrawFn) -> dict[str, Adapter]:
    found = {}
    for name in draw(st.sets(st.sampled_from(NAMES))):
        versions = [version(name, number) for number in range(1, draw(st.integers(0, 2)) + 1)]
        uid = draw(st.sampled_from(["", f"uid-{name}", "uid-of-a-lost-object"]))
        made = Adapter(
            tenant="acme",
            adapter=name,
            pool=str(POOL),
            warm_replicas=draw(st.integers(0, 2)),
            claim_uid=uid,
            claim_ref="default/x" if uid else "",
            versions=versions,
        )
        active = draw(st.integers(0, len(versions)))
        shares = draw(st.sampled_from([{active: 100} if active else {}, {1: 60, 2: 40}]))
        made = weighted(made, shares if max(shares, default=0) <= len(versions) else {})
        found[name] = msgspec.structs.replace(made, intent_version=draw(st.integers(0, len(versions))))
    return found


@st.composite
def simulations(draw: st.DrawFn) -> dict[str, Any]:
    objects = {}
    for name in draw(st.sets(st.sampled_from(NAMES))):
        deleted = draw(st.sampled_from([None, None, NOW - 1]))
        finalized = True if deleted else draw(st.booleans())
        objects[name] = adapter(
            name,
            meta=meta("LoRAAdapter", name, finalized=finalized, deleting_since=deleted),
            source_hash=draw(st.sampled_from(["h1", "h2"])),
            warm_replicas=draw(st.integers(0, 3)),
            pinned=draw(st.booleans()),
            **draw(st.sampled_from(ACTIVATIONS)),
            deletion_policy=draw(st.sampled_from(["retain", "delete"])),
        )
    replicas = draw(st.integers(1, 3))
    engines = [engine(ordinal, *draw(residences())) for ordinal in range(replicas)]
    return {
        "objects": objects,
        "pool": pool(replicas=replicas),
        "entries": draw(entries()),
        "engines": {each.replica: each for each in engines},
    }


def simulation(parts: dict[str, Any]) -> Simulation:
    """A copy of its own: running one must not change the parts."""
    return Simulation(dict(parts["objects"]), parts["pool"], dict(parts["entries"]), dict(parts["engines"]))


@settings(max_examples=40, deadline=None)
@given(simulations(), st.randoms(use_true_random=False), st.randoms(use_true_random=False))
def test_every_order_of_actions_reaches_the_same_end_o23(
    parts: dict[str, Any], one: random.Random, other: random.Random
) -> None:
    first, second = simulation(parts), simulation(parts)
    first.run(one)
    second.run(other)
    assert first.outcome() == second.outcome()


@settings(max_examples=40, deadline=None)
@given(simulations(), st.randoms(use_true_random=False))
def test_the_end_is_what_the_objects_and_the_registry_wish_o23(parts: dict[str, Any], order: random.Random) -> None:
    end = simulation(parts)
    end.run(order)
    deleted = {name for name, obj in parts["objects"].items() if obj.meta.deleting_since is not None}
    assert end.objects.keys() == parts["objects"].keys() - deleted
    for name, known in end.entries.items():
        obj = end.objects.get(name)
        assert known.claim_uid == (obj.meta.uid if obj else "")
        serving = {each.version for each in known.versions if each.weight}
        if obj is not None and obj.owns_activation and set(obj.wanted_shares) <= {v.version for v in known.versions}:
            assert serving == set(obj.wanted_shares)
        count = obj.warm_replicas if obj else known.warm_replicas
        chosen = placement.order("acme", name, end.pool.replica_ids)[:count]
        for number in serving:
            ref = AdapterRef("acme", name, number)
            marked = {
                id_ for id_, each in end.engines.items() if ref in each.residences and each.residences[ref].warm_wanted
            }
            assert marked == set(chosen)
        assert not known.intent_version or not serving  # nothing waits for what has become warm
    for known_engine in end.engines.values():
        for ref in known_engine.residences:
            entry = end.entries.get(ref.adapter)
            assert entry and ref.version in {each.version for each in entry.versions}


@settings(max_examples=40, deadline=None)
@given(simulations(), st.randoms(use_true_random=False))
def test_planning_twice_gives_the_same_plan_whatever_the_order_of_what_is_seen_o23(
    parts: dict[str, Any], order: random.Random
) -> None:
    seen = simulation(parts).world()
    shuffled = list(seen.adapters)
    order.shuffle(shuffled)
    engines = list(seen.engines.items())
    order.shuffle(engines)
    again = replace(seen, adapters=tuple(shuffled), engines=dict(engines))
    assert set(plan(seen).actions) == set(plan(again).actions)
