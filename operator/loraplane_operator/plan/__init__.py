"""The pure part of reconciling: a World in, a Plan out. No I/O, no clock, no memory."""

from loraplane_operator.actions import Action
from loraplane_operator.plan.adapters import plan_adapter
from loraplane_operator.plan.deletion import plan_orphan_claims
from loraplane_operator.plan.pools import plan_orphan_workloads, plan_pool
from loraplane_operator.plan.warmth import plan_warmth
from loraplane_operator.plan.wishes import wishes
from loraplane_operator.words import AdapterObject, Plan, World


def plan(world: World) -> Plan:
    found = wishes(world)
    warmth = plan_warmth(world, found)
    objects = [plan_pool(world, pool, found) for _, pool in sorted(world.pools.items())]
    objects += [plan_adapter(world, obj, found, warmth.actions) for obj in _in_order(world)]
    actions: list[Action] = [action for part in objects for action in part.actions]
    actions += [*warmth.actions, *plan_orphan_claims(world), *plan_orphan_workloads(world)]
    due = [at for at in (warmth.due_at, *(part.due_at for part in objects)) if at is not None]
    return Plan(tuple(actions), warmth.residues, min(due, default=None))


def _in_order(world: World) -> list[AdapterObject]:
    return sorted(world.adapters, key=lambda obj: (obj.meta.created_at, obj.meta.ref))
