"""What the reconciler relies on, whatever the cluster is: run against the local one by test_port_local.py and
against the real API server by tests/cluster/test_port.py.
"""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol

from loraplane_core.identity import PoolRef
from loraplane_core.labels import ADAPTER_KIND, FINALIZER
from loraplane_core.wire.supervisor import EngineCredentials
from loraplane_operator.actions import Note, ObjectRef, WorkloadSpec
from loraplane_operator.cluster.port import Cluster, Observation
from loraplane_operator.words import AdapterObject, PoolObject, Replica
from tests.operator.eventually import eventually
from tests.operator.system import adapter_manifest, pool_manifest

CREDENTIALS = EngineCredentials(epoch=1, data=["d"], state=["s"], admin=["a"], fetch="f")


class Bench(Protocol):
    """A cluster under test, and what its user sees and does."""

    namespace: str
    wakes: int

    @property
    def cluster(self) -> Cluster:
        """Watching."""

    def fresh(self) -> Cluster:
        """Another one over the same state, which has not begun to watch."""

    async def put(self, manifest: Mapping[str, Any]) -> None:
        """Create or edit an object."""

    async def remove(self, ref: ObjectRef) -> None: ...

    async def raw(self, ref: ObjectRef) -> dict[str, Any] | None: ...

    async def events(self, ref: ObjectRef) -> list[tuple[str, str]]:
        """(reason, message), one per record."""


Check = Callable[[Bench], Awaitable[None]]


async def observed(bench: Bench) -> Observation:
    seen = await bench.cluster.observe()
    assert seen is not None
    return seen


async def adapter(bench: Bench, name: str = "pirate") -> AdapterObject | None:
    return next((each for each in (await observed(bench)).adapters if each.meta.ref.name == name), None)


async def replicas(bench: Bench, pool: str = "pool") -> tuple[Replica, ...] | None:
    workloads = (await observed(bench)).workloads
    return None if workloads is None else workloads.get(PoolRef(bench.namespace, pool))


async def created(bench: Bench, name: str = "pirate", **spec: Any) -> AdapterObject:
    await bench.put(adapter_manifest(name, **spec))

    async def there() -> AdapterObject | None:
        return await adapter(bench, name)

    return await eventually(there)


async def created_pool(bench: Bench) -> PoolObject:
    await bench.put(pool_manifest())

    async def there() -> PoolObject | None:
        return (await observed(bench)).pools.get(PoolRef(bench.namespace, "pool"))

    return await eventually(there)


def status(reason: str = "Pending", **more: Any) -> dict[str, Any]:
    condition = {
        "type": "Ready",
        "status": "False",
        "reason": reason,
        "message": "",
        "lastTransitionTime": "2026-01-01T00:00:00Z",
        "observedGeneration": 1,
    }
    return {"observedGeneration": 1, "conditions": [condition], **more}


def workload(pool: PoolObject, replicas: int = 2, revision: str = "r1") -> WorkloadSpec:
    engine = (("model", "/models/base-a"), ("served-name", "base-a"))
    return WorkloadSpec(pool.ref, pool.meta.uid, replicas, engine, 1, revision)


async def gone(bench: Bench, ref: ObjectRef) -> None:
    async def check() -> bool:
        return await bench.raw(ref) is None and all(
            each.meta.ref != ref for each in [*(await observed(bench)).adapters]
        )

    await eventually(check)


# -- the contract


async def nothing_is_observed_before_the_view_is_complete(bench: Bench) -> None:
    assert await bench.fresh().observe() is None


async def a_new_object_wakes_and_is_observed_with_what_identifies_it(bench: Bench) -> None:
    before = bench.wakes
    seen = await created(bench)
    assert bench.wakes > before
    assert seen.meta.uid
    assert (seen.meta.generation, seen.meta.finalized, seen.meta.deleting_since) == (1, False, None)
    assert seen.meta.created_at > 1e9
    assert (seen.tenant, seen.adapter, seen.pool) == ("acme", "pirate", PoolRef(bench.namespace, "pool"))


async def an_edit_raises_the_generation_of_the_same_object(bench: Bench) -> None:
    first = await created(bench)
    await bench.put(adapter_manifest(warmReplicas=2))

    async def edited() -> AdapterObject | None:
        seen = await adapter(bench)
        return seen if seen is not None and seen.warm_replicas == 2 else None

    second = await eventually(edited)
    assert (second.meta.uid, second.meta.generation) == (first.meta.uid, 2)


async def a_status_is_seen_at_once_and_changes_no_generation(bench: Bench) -> None:
    seen = await created(bench)
    await bench.cluster.patch_status(seen.meta.ref, seen.meta.uid, status("Loading", version=3))
    again = await adapter(bench)
    assert again is not None
    assert dict(again.status) == status("Loading", version=3)
    assert again.meta.generation == 1
    raw = await bench.raw(seen.meta.ref)
    assert raw is not None and raw["status"] == status("Loading", version=3)


async def a_status_replaces_the_one_before(bench: Bench) -> None:
    seen = await created(bench)
    await bench.cluster.patch_status(seen.meta.ref, seen.meta.uid, status(version=3, rank=8))
    await bench.cluster.patch_status(seen.meta.ref, seen.meta.uid, status(version=4))
    again = await adapter(bench)
    assert again is not None and dict(again.status) == status(version=4)


async def a_status_that_says_nothing_new_changes_nothing(bench: Bench) -> None:
    seen = await created(bench)
    await bench.cluster.patch_status(seen.meta.ref, seen.meta.uid, status(version=3))
    before = await bench.raw(seen.meta.ref)
    await bench.cluster.patch_status(seen.meta.ref, seen.meta.uid, status(version=3))
    assert await bench.raw(seen.meta.ref) == before


async def nothing_is_written_to_another_object_of_that_name(bench: Bench) -> None:
    seen = await created(bench)
    other = "00000000-0000-0000-0000-000000000000"
    await bench.cluster.patch_status(seen.meta.ref, other, status())
    await bench.cluster.set_finalizer(seen.meta.ref, other, present=True)
    raw = await bench.raw(seen.meta.ref)
    assert raw is not None
    assert not raw.get("status")
    assert not raw["metadata"].get("finalizers")


async def nothing_is_written_where_there_is_no_object(bench: Bench) -> None:
    ref = ObjectRef(ADAPTER_KIND, bench.namespace, "nobody")
    await bench.cluster.patch_status(ref, "u", status())
    await bench.cluster.set_finalizer(ref, "u", present=True)
    assert await bench.raw(ref) is None


async def a_deleted_object_stays_until_its_finalizer_goes(bench: Bench) -> None:
    seen = await created(bench)
    await bench.cluster.set_finalizer(seen.meta.ref, seen.meta.uid, present=True)
    raw = await bench.raw(seen.meta.ref)
    assert raw is not None and raw["metadata"]["finalizers"] == [FINALIZER]
    await bench.remove(seen.meta.ref)

    async def deleting() -> bool:
        again = await adapter(bench)
        return again is not None and again.meta.deleting_since is not None and again.meta.finalized

    await eventually(deleting)
    await bench.cluster.set_finalizer(seen.meta.ref, seen.meta.uid, present=False)
    assert await adapter(bench) is None
    await gone(bench, seen.meta.ref)


async def an_object_without_finalizer_goes_at_once(bench: Bench) -> None:
    seen = await created(bench)
    await bench.remove(seen.meta.ref)
    await gone(bench, seen.meta.ref)


async def a_name_that_is_used_again_is_another_object(bench: Bench) -> None:
    first = await created(bench)
    await bench.remove(first.meta.ref)
    await gone(bench, first.meta.ref)
    second = await created(bench)
    assert second.meta.uid != first.meta.uid
    await bench.cluster.patch_status(first.meta.ref, first.meta.uid, status())
    again = await adapter(bench)
    assert again is not None and not again.status


async def a_pool_without_engines_has_no_workload(bench: Bench) -> None:
    await created_pool(bench)

    async def told() -> bool:
        return (await observed(bench)).workloads is not None

    await eventually(told)
    assert await replicas(bench) is None


async def a_workload_has_its_wished_replicas_after_every_apply(bench: Bench) -> None:
    pool = await created_pool(bench)
    for wished in (2, 3, 1):
        await bench.cluster.apply(workload(pool, wished), CREDENTIALS)

        async def counted(wished: int = wished) -> bool:
            found = await replicas(bench) or ()
            return [each.id.ordinal for each in found] == list(range(wished)) and all(
                each.revision == "r1" for each in found
            )

        await eventually(counted)


async def a_restart_brings_one_replica_to_the_applied_revision(bench: Bench) -> None:
    pool = await created_pool(bench)
    await bench.cluster.apply(workload(pool), CREDENTIALS)

    async def revisions() -> list[str]:
        return [each.revision for each in await replicas(bench) or ()]

    async def first() -> bool:
        return await revisions() == ["r1", "r1"]

    async def second() -> bool:
        return await revisions() == ["r1", "r2"]

    await eventually(first)
    await bench.cluster.apply(workload(pool, revision="r2"), CREDENTIALS)
    assert await revisions() == ["r1", "r1"]
    await bench.cluster.restart(pool.ref, 1)
    await eventually(second)


async def a_deleted_workload_is_gone(bench: Bench) -> None:
    pool = await created_pool(bench)
    await bench.cluster.apply(workload(pool), CREDENTIALS)

    async def there() -> bool:
        return len(await replicas(bench) or ()) == 2

    async def missing() -> bool:
        return await replicas(bench) is None

    await eventually(there)
    await bench.cluster.delete(pool.ref)
    await eventually(missing)
    await bench.cluster.delete(pool.ref)


async def an_event_said_twice_is_one_record(bench: Bench) -> None:
    seen = await created(bench)
    notes = [
        Note(seen.meta.ref, seen.meta.uid, "Normal", "Claimed", "acme/pirate is claimed"),
        Note(seen.meta.ref, seen.meta.uid, "Normal", "Claimed", "acme/pirate is claimed"),
        Note(seen.meta.ref, seen.meta.uid, "Warning", "Drifted", "replica 0 lost it"),
    ]
    for note in notes:
        await bench.cluster.emit(note)
    assert sorted(await bench.events(seen.meta.ref)) == [
        ("Claimed", "acme/pirate is claimed"),
        ("Drifted", "replica 0 lost it"),
    ]


async def pools_take_status_and_finalizer_as_adapters_do(bench: Bench) -> None:
    pool = await created_pool(bench)
    await bench.cluster.set_finalizer(pool.meta.ref, pool.meta.uid, present=True)
    condition = {**status()["conditions"][0], "type": "Available"}
    written = {"replicas": 2, "readyReplicas": 0, "conditions": [condition], "capacity": {"slots": 3}}
    await bench.cluster.patch_status(pool.meta.ref, pool.meta.uid, written)
    again = (await observed(bench)).pools[pool.ref]
    assert again.meta.finalized
    assert dict(again.status) == written


CONTRACT: tuple[Check, ...] = (
    nothing_is_observed_before_the_view_is_complete,
    a_new_object_wakes_and_is_observed_with_what_identifies_it,
    an_edit_raises_the_generation_of_the_same_object,
    a_status_is_seen_at_once_and_changes_no_generation,
    a_status_replaces_the_one_before,
    a_status_that_says_nothing_new_changes_nothing,
    nothing_is_written_to_another_object_of_that_name,
    nothing_is_written_where_there_is_no_object,
    a_deleted_object_stays_until_its_finalizer_goes,
    an_object_without_finalizer_goes_at_once,
    a_name_that_is_used_again_is_another_object,
    a_pool_without_engines_has_no_workload,
    a_workload_has_its_wished_replicas_after_every_apply,
    a_restart_brings_one_replica_to_the_applied_revision,
    a_deleted_workload_is_gone,
    an_event_said_twice_is_one_record,
    pools_take_status_and_finalizer_as_adapters_do,
)
