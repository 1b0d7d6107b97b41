"""What a pass of the operator costs: 1,000 adapters over 8 engines, planned without any I/O.

Prints JSON lines: {"case", "adapters", "engines", "seconds", "actions"}. CPU seconds of this process, the best of
some runs, because other processes on the machine are not the subject. `python -m bench.operator_scale`
"""

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import replace

from loraplane_core import placement
from loraplane_core.identity import AdapterRef, ReplicaId
from loraplane_core.wire.engine import Residence
from loraplane_operator.actions import ApplyWorkload, ReportPool, SetStatus
from loraplane_operator.plan import plan
from loraplane_operator.words import Memory, Plan, World
from tests.operator import worlds

RUNS = 5
#: Planned until quiet: statuses are written by one pass and seen by the next.
PASSES_MAX = 8


def fresh(adapters: int, engines: int) -> World:
    """All claimed, registered and warm; no status written, no pool reported."""
    pool = worlds.pool(replicas=engines)
    names = [f"a{number:04d}" for number in range(adapters)]
    held: dict[ReplicaId, dict[AdapterRef, Residence]] = {replica: {} for replica in pool.replica_ids}
    for name in names:
        home = placement.order("acme", name, pool.replica_ids)[0]
        residence = worlds.residence(f"acme/{name}@1")
        held[home][AdapterRef.parse(residence.ref)] = residence
    roomy = {"host_bytes": 1 << 40}
    made = {each.ordinal: worlds.engine(each.ordinal, *held[each].values()) for each in pool.replica_ids}
    return worlds.world(
        pools={worlds.POOL: pool},
        adapters=tuple(worlds.adapter(name) for name in names),
        workloads={worlds.POOL: tuple(worlds.replica(each.ordinal) for each in pool.replica_ids)},
        engines={
            each.replica: replace(each, capacity=type(each.capacity)(**{**_fields(each.capacity), **roomy}))
            for each in made.values()
        },
        registry=worlds.registry(*(worlds.entry(name, source_hash="h1", source_version=1) for name in names)),
        memory=Memory(),
    )


def _fields(capacity: object) -> dict[str, int]:
    return {name: getattr(capacity, name) for name in capacity.__struct_fields__}  # type: ignore[attr-defined]


def carried_out(world: World, planned: Plan) -> World:
    """The world in which a plan was carried out."""
    statuses = {each.uid: each.status for each in planned.actions if isinstance(each, SetStatus)}
    applied = {each.spec.pool: each.spec for each in planned.actions if isinstance(each, ApplyWorkload)}
    reports = {each.pool: each.report for each in planned.actions if isinstance(each, ReportPool)}
    return replace(
        world,
        adapters=tuple(replace(each, status=statuses.get(each.meta.uid, each.status)) for each in world.adapters),
        pools={
            ref: replace(each, status=statuses.get(each.meta.uid, each.status)) for ref, each in world.pools.items()
        },
        memory=replace(
            world.memory,
            reports={**world.memory.reports, **reports},
            applied={**world.memory.applied, **applied},
        ),
    )


def quiet(world: World) -> World:
    for _ in range(PASSES_MAX):
        planned = plan(world)
        if planned.broken:
            raise RuntimeError(f"planning broke: {planned.broken[0]}")
        if not planned.actions:
            return world
        world = carried_out(world, planned)
    raise RuntimeError(f"still not quiet: {[type(each).__name__ for each in plan(world).actions][:5]}")


def edited(world: World) -> World:
    """One adapter asks for another number of warm replicas."""
    first, *others = world.adapters
    meta = replace(first.meta, generation=first.meta.generation + 1)
    return replace(world, adapters=(replace(first, meta=meta, warm_replicas=2), *others))


def seconds(run: Callable[[], Plan]) -> float:
    def once() -> float:
        began = time.process_time()
        run()
        return time.process_time() - began

    return min(once() for _ in range(RUNS))


def main() -> None:
    parser = argparse.ArgumentParser(description="What a pass of the operator costs.")
    parser.add_argument("--adapters", type=int, default=1000)
    parser.add_argument("--engines", type=int, default=8)
    options = parser.parse_args()
    first = fresh(options.adapters, options.engines)
    still = quiet(first)
    for case, world in {"first pass": first, "pass in quiet": still, "one edit": edited(still)}.items():
        line = {
            "case": case,
            "adapters": options.adapters,
            "engines": options.engines,
            "seconds": round(seconds(lambda world=world: plan(world)), 4),  # type: ignore[misc]
            "actions": len(plan(world).actions),
        }
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
