"""A pool's workload, replica by replica, its report to the registry, and its end."""

from collections.abc import Mapping

from loraplane_core.identity import PoolRef
from loraplane_core.labels import POOL_KIND
from loraplane_core.resources.reasons import Reason
from loraplane_core.wire.registry import PoolReport
from loraplane_operator.actions import (
    Action,
    ApplyWorkload,
    DeleteWorkload,
    Note,
    ObjectRef,
    RemoveReport,
    ReportPool,
    RestartReplica,
    SetFinalizer,
    WorkloadSpec,
)
from loraplane_operator.plan.bases import model_of
from loraplane_operator.plan.departures import LEAVE_SECONDS, Departure, departure
from loraplane_operator.plan.pool_status import STALL_SECONDS, not_honoured_status, pool_notes, pool_status
from loraplane_operator.plan.rollout import next_down, report_epoch, sized, workload_spec
from loraplane_operator.plan.status import ObjectPlan, status_action
from loraplane_operator.plan.wishes import Wish
from loraplane_operator.words import AdapterKey, PoolObject, Replica, Wait, World

#: A pool's finalizer goes at the latest this long after its deletion began.
DELETION_SECONDS = 60.0
#: So many adapters are named in an Event.
_NAMED = 5


def plan_pool(world: World, pool: PoolObject, found: Mapping[AdapterKey, Wish]) -> ObjectPlan:
    if pool.meta.deleting_since is not None:
        return _delete(world, pool)
    if not world.honours(pool.ref):
        return ObjectPlan(*status_action(world, pool.meta, pool.status, not_honoured_status(world, pool)))
    if not pool.meta.finalized:
        return ObjectPlan([SetFinalizer(pool.meta.ref, pool.meta.uid, present=True, why="new pool")])
    work, waits = _workload(world, pool, found)
    actions = work + _report(world, pool)
    status = pool_status(world, pool, found, actions)
    notes = pool_notes(pool, status)
    writes, due = status_action(world, pool.meta, pool.status, status, notes)
    bounds = [world.memory.waits.get(wait, world.now) + _BOUNDS[wait[0]] for wait in waits]
    due_at = min((at for at in [due, *bounds] if at is not None and at > world.now), default=None)
    return ObjectPlan(actions + writes, due_at, waits=waits)


_BOUNDS = {"leave": LEAVE_SECONDS, "start": STALL_SECONDS}


def plan_orphan_workloads(world: World) -> list[Action]:
    """Workloads and reports of pools that no longer exist, for example because their state was lost."""

    def orphaned(ref: PoolRef) -> bool:
        exists = ref in world.pools or ObjectRef(POOL_KIND, *ref) in world.unreadable
        return not exists and world.watched(ref.namespace)

    gone: list[Action] = [
        DeleteWorkload(ref, why="its pool does not exist") for ref in sorted(world.workloads or {}) if orphaned(ref)
    ]
    if world.registry is not None and world.registry.live:
        gone += [
            RemoveReport(ref, why="its pool does not exist")
            for ref, report in sorted(world.memory.reports.items())
            if report is not None and orphaned(ref)
        ]
    return gone


def _workload(world: World, pool: PoolObject, found: Mapping[AdapterKey, Wish]) -> tuple[list[Action], frozenset[Wait]]:
    """One step: a replica goes down only when what was asked for before is in force."""
    wished = workload_spec(world, pool)
    if world.workloads is None or wished is None:
        return [], frozenset()
    running = world.workloads.get(pool.ref)
    if running is None:
        return [ApplyWorkload(wished, why="there is no workload yet")], frozenset()
    waits: set[Wait] = {("start", each.id) for each in running if each.revision == wished.revision and not each.ready}
    leaver = next_down(world, pool)
    surplus = leaver is not None and leaver.id.ordinal >= pool.replicas
    spec = sized(wished, max(pool.replicas, len(running)))
    notes: tuple[Note, ...] = ()
    if leaver is not None and leaver.ready:
        wait: Wait = "leave", leaver.id
        waits.add(wait)
        left = departure(world, pool, found, leaver)
        if not left.settled and world.now < world.memory.waits.get(wait, world.now) + LEAVE_SECONDS:
            return _apply(world, spec, running), frozenset(waits)
        notes = _cold(pool, leaver, left)
    if surplus and leaver is not None:
        return _apply(world, sized(wished, leaver.id.ordinal), running, notes), frozenset(waits)
    due = _apply(world, spec, running)
    if not due and leaver is not None:
        why = f"runs revision {leaver.revision}, {spec.revision} is wished"
        due = [RestartReplica(spec, leaver.id.ordinal, why, notes)]
    return due, frozenset(waits)


def _apply(
    world: World, spec: WorkloadSpec, running: tuple[Replica, ...], notes: tuple[Note, ...] = ()
) -> list[Action]:
    """Restarts nothing. Also where the cluster may have been told by an operator that did not live to the end of it."""
    if len(running) < spec.replicas:
        return [ApplyWorkload(spec, f"{len(running)} replicas, {spec.replicas} wished", notes)]
    if any(each.id.ordinal >= spec.replicas and not each.terminating for each in running):
        return [ApplyWorkload(spec, f"{len(running)} replicas, {spec.replicas} stay", notes)]
    if world.memory.applied.get(spec.pool) != spec:
        return [ApplyWorkload(spec, "not known to be applied as wished", notes)]
    if spec.pool in world.suspects:
        return [ApplyWorkload(spec, "somebody may have changed a part of it", notes)]
    return []


def _cold(pool: PoolObject, leaver: Replica, left: Departure) -> tuple[Note, ...]:
    """What the wait, or the room, was not enough for."""
    cold = [*left.waiting, *left.homeless]
    if not cold:
        return ()
    names = ", ".join(str(id_.ref) for id_ in cold[:_NAMED])
    more = f" and {len(cold) - _NAMED} more" if len(cold) > _NAMED else ""
    why = f"within {LEAVE_SECONDS:g} s" if left.waiting else "for want of room"
    told = f"replica {leaver.id.ordinal} goes down; not warm elsewhere {why}: {names}{more}"
    return (Note(pool.meta.ref, pool.meta.uid, "Warning", Reason.NOT_WARM, told),)


def _report(world: World, pool: PoolObject) -> list[Action]:
    if world.registry is None or not world.registry.live:
        return []
    report = pool_report(world, pool)
    known = world.memory.reports.get(pool.ref)
    if known == report:
        return []
    return [ReportPool(pool.ref, report, why="unknown to the registry" if known is None else "changed")]


def pool_report(world: World, pool: PoolObject) -> PoolReport:
    model = model_of(world, pool)
    return PoolReport(
        base_model=pool.base_model,
        aliases=list(pool.aliases),
        base_digest=model.base_digest if model else "",  # the registry keeps what it knows
        config=model.config if model else {},
        max_rank=pool.max_rank,
        max_model_len=model.max_model_len if model else 0,
        replicas=pool.replicas,
        allowed_tenants=list(pool.allowed_tenants),
        allowed_namespaces=list(pool.allowed_namespaces),
        credential_epoch=report_epoch(world, pool),
    )


def _delete(world: World, pool: PoolObject) -> ObjectPlan:
    """Engines first, then the report, then the finalizer; past the deadline the finalizer goes anyway."""
    meta = pool.meta
    if not meta.finalized:
        return ObjectPlan()
    wait: Wait = "delete", meta.uid
    actions: list[Action] = []
    if world.workloads is None or pool.ref in world.workloads:
        actions.append(DeleteWorkload(pool.ref, why="pool deleted"))
    elif world.memory.reports.get(pool.ref, ...) is not None:
        actions.append(RemoveReport(pool.ref, why="pool deleted"))
    deadline = world.memory.waits.get(wait, world.now) + DELETION_SECONDS
    if not actions:
        return ObjectPlan([SetFinalizer(meta.ref, meta.uid, present=False, why="nothing is left of the pool")])
    if world.now < deadline:
        return ObjectPlan(actions, deadline, waits=frozenset({wait}))
    left = "its engines may still run" if isinstance(actions[0], DeleteWorkload) else "the registry may still know it"
    told = f"the pool goes after {DELETION_SECONDS:g} s, though {left}"
    note = Note(meta.ref, meta.uid, "Warning", Reason.DELETION_TIMED_OUT, told)
    going = SetFinalizer(meta.ref, meta.uid, False, "the deadline is over", (note,))
    return ObjectPlan([*actions, going], waits=frozenset({wait}))
