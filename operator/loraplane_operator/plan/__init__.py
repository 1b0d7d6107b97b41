"""The pure part of reconciling: a World in, a Plan out. No I/O, no clock, no memory."""

from collections.abc import Callable
from functools import partial

from loraplane_operator.actions import Action, ObjectRef
from loraplane_operator.plan.adapters import plan_adapter
from loraplane_operator.plan.deletion import plan_orphan_claims
from loraplane_operator.plan.departures import with_extra_homes
from loraplane_operator.plan.pools import plan_orphan_workloads, plan_pool
from loraplane_operator.plan.readiness import load_failures
from loraplane_operator.plan.reservations import admit
from loraplane_operator.plan.status import ObjectPlan
from loraplane_operator.plan.warmth import plan_warmth
from loraplane_operator.plan.wishes import wishes
from loraplane_operator.words import AdapterObject, Plan, PoolObject, Wait, World


def plan(world: World) -> Plan:
    found = with_extra_homes(world, admit(world, wishes(world)))
    warmth, troubles = plan_warmth(world, found), load_failures(world)
    residues = set(warmth.residues)
    waits: set[Wait] = set()
    actions: list[Action] = []
    due = [warmth.due_at]
    broken: list[tuple[ObjectRef, Exception]] = []

    def take(ref: ObjectRef, planned: Callable[[], ObjectPlan]) -> None:
        """A defect that one object brings out must not stop the others."""
        try:
            part = planned()
        except Exception as error:
            broken.append((ref, error))
        else:
            actions.extend(part.actions)
            due.append(part.due_at)
            residues.update(part.residues)
            waits.update(part.waits)

    for pool in sorted(world.pools.values(), key=_age):
        take(pool.meta.ref, partial(plan_pool, world, pool, found))
    for obj in sorted(world.adapters, key=_age):
        take(obj.meta.ref, partial(plan_adapter, world, obj, found.get(obj.key), warmth, troubles))
    actions += [*warmth.actions, *plan_orphan_claims(world), *plan_orphan_workloads(world)]
    due_at = min((at for at in due if at is not None), default=None)
    return Plan(
        actions=tuple(actions),
        residues=frozenset(residues),
        lost=warmth.lost,
        waits=frozenset(waits),
        due_at=due_at,
        broken=tuple(broken),
    )


def _age(obj: PoolObject | AdapterObject) -> tuple[float, ObjectRef]:
    return obj.meta.created_at, obj.meta.ref
