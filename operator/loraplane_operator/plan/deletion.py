"""Deleting a LoRAAdapter: served no more, gateways learn it, engines drain and free it, the claim is released,
the finalizer goes.

Past the deadline the finalizer goes anyway; the claim it leaves behind is released by the rule for
claims whose object no longer exists.
"""

from collections.abc import Iterable
from dataclasses import replace

from loraplane_core.resources.adapter import AdapterStatus
from loraplane_core.resources.reasons import Reason
from loraplane_core.wire.registry import Activate
from loraplane_operator.actions import Action, ActivateVersion, Note, ReleaseClaim, SetFinalizer, Withdraw
from loraplane_operator.plan.conditions import Verdict, raw_conditions, render
from loraplane_operator.plan.status import ObjectPlan, status_action
from loraplane_operator.plan.warmth import Warmth
from loraplane_operator.plan.wishes import holds_claim
from loraplane_operator.words import AdapterObject, Residue, Wait, World

#: Gateways have the flip to "no version" by then: they get a notice at once, and poll every second without one.
GATEWAYS_SECONDS = 1.0
#: Requests in flight may finish within this.
DRAIN_SECONDS = 20.0
DEADLINE_SECONDS = 60.0


def plan_deletion(world: World, obj: AdapterObject, warmth: Warmth) -> ObjectPlan:
    """Also where somebody took our finalizer off and another's still holds the object: it must not be served on."""
    wait: Wait = "delete", obj.meta.uid
    if not obj.meta.finalized and not holds_claim(world, obj):
        return ObjectPlan()  # it goes by itself
    since = world.memory.waits.get(wait, world.now)
    return replace(_step(world, obj, warmth, since + DEADLINE_SECONDS), waits=frozenset({wait}))


def _step(world: World, obj: AdapterObject, warmth: Warmth, deadline: float) -> ObjectPlan:
    meta = obj.meta
    if world.now >= deadline and meta.finalized:
        note = Note(meta.ref, meta.uid, "Warning", Reason.DELETION_TIMED_OUT, "draining reached its deadline")
        return ObjectPlan([SetFinalizer(meta.ref, meta.uid, present=False, why=note.message, notes=(note,))])
    if world.registry is None:
        return _wait(world, obj, "waits for the registry", [], deadline)
    if not holds_claim(world, obj):
        return ObjectPlan([SetFinalizer(meta.ref, meta.uid, present=False, why="nothing is left of it")])
    stop = _stop_serving(world, obj)
    if stop and world.failure(stop[0]) is None:  # a refusal must not hold up the rest
        return _wait(world, obj, "asks the registry to serve it no more", stop, deadline)
    leaving = frozenset(warmth.leaving.get(obj.key, ()))
    if leaving:
        told = min(world.memory.residue_since.get(residue, world.now) for residue in leaving) + GATEWAYS_SECONDS
        if told > world.now:
            waits = _wait(world, obj, "gateways learn that it is served no more", [], min(told, deadline))
        else:
            waits = _wait(world, obj, f"draining {len(leaving)} residences", _withdrawals(leaving), deadline)
        return replace(waits, residues=leaving)
    release = ReleaseClaim(meta.uid, obj.deletion_policy, why="object deleted")
    failure = world.failure(release)
    return _wait(world, obj, failure.message if failure else "releasing the claim", [release], deadline)


def _stop_serving(world: World, obj: AdapterObject) -> list[Action]:
    """Weights to 0 first, so that gateways send no new requests while engines drain."""
    entry = world.registry.adapters.get(obj.key) if world.registry else None
    if entry is None or entry.active_version == 0:
        return []
    return [ActivateVersion(obj.meta.uid, obj.tenant, Activate(version=0), why="object deleted")]


def _withdrawals(leaving: Iterable[Residue]) -> list[Action]:
    """Every version of it on every live engine. An engine that does not answer is not waited for: when it
    comes back, what it still holds is known as withdrawn, or it is empty."""
    return [
        Withdraw(each.replica, each.boot, each.id, drain_s=DRAIN_SECONDS, why="object deleted")
        for each in sorted(leaving, key=lambda each: (each.replica, each.id))
    ]


def _wait(world: World, obj: AdapterObject, message: str, actions: list[Action], deadline: float) -> ObjectPlan:
    kept = [
        Verdict(type_, known["status"], known["reason"], known["message"])
        for type_, known in raw_conditions(obj.status).items()
        if type_ not in ("Ready", "Deleting")
    ]
    verdicts = [
        *kept,
        Verdict("Ready", "False", Reason.DELETING, message),
        Verdict("Deleting", "True", Reason.DELETING, message),
    ]
    rendered = render(verdicts, obj.status, obj.meta.generation, world.now)
    before = AdapterStatus.model_validate({**obj.status, "conditions": []}).to_wire()
    status = {**before, "observedGeneration": obj.meta.generation, "conditions": rendered}
    write, due = status_action(world, obj.meta, obj.status, status)
    return ObjectPlan(actions + write, min((at for at in (due, deadline) if at and at > world.now), default=None))


def plan_orphan_claims(world: World) -> list[Action]:
    """Claims whose object no longer exists in the namespaces that this operator sees."""
    registry = world.registry
    if registry is None or not registry.live:
        return []
    alive = {obj.meta.uid for obj in world.adapters} | set(world.unreadable.values())
    return [
        ReleaseClaim(entry.claim_uid, "retain", why=f"object {entry.claim_ref} no longer exists")
        for _, entry in sorted(registry.adapters.items())
        if entry.claim_uid
        and entry.claim_uid not in alive
        and entry.claim_uid not in world.memory.released
        and world.watched(entry.claim_ref.partition("/")[0])
    ]
