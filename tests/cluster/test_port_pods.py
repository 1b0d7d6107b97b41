"""Which pod a restart takes: the one that was seen, never the one that has its name by now. Real API server and
controller manager, no kubelet."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from loraplane_operator.cluster.kubernetes import KubernetesCluster
from loraplane_operator.words import PoolObject
from tests.cluster.port_desk import KubeBench, started
from tests.cluster.system import ClusterAccess
from tests.operator import port_contract as contract
from tests.operator.eventually import eventually


@pytest.fixture
async def bench(cluster: ClusterAccess) -> AsyncIterator[KubeBench]:
    async with started(cluster) as made, made.watching():
        yield made


def pod_path(bench: KubeBench, ordinal: int) -> str:
    return f"/api/v1/namespaces/{bench.namespace}/pods/pool-{ordinal}"


async def other_pod(bench: KubeBench, ordinal: int, than: str = "") -> dict[str, Any]:
    """Once one is there that is not being deleted."""

    async def there() -> dict[str, Any] | None:
        raw = await bench.get(pod_path(bench, ordinal))
        new = raw is not None and raw["metadata"]["uid"] != than and "deletionTimestamp" not in raw["metadata"]
        return raw if new else None

    return await eventually(there, 20)


async def running_pool(bench: KubeBench) -> tuple[PoolObject, str]:
    """A pool of revision r1, and the uid of its pod 1."""
    pool = await contract.created_pool(bench)
    await bench.cluster.apply(contract.workload(pool), contract.CREDENTIALS)

    async def seen() -> bool:
        return [each.revision for each in await contract.replicas(bench) or ()] == ["r1", "r1"]

    await eventually(seen, 20)
    return pool, (await other_pod(bench, 1))["metadata"]["uid"]


async def behind(bench: KubeBench) -> KubernetesCluster:
    """A view that hears nothing more: another operator's, or ours a moment ago."""
    made = bench.fresh()
    await made.relist()
    return made


async def test_a_pod_that_was_replaced_meanwhile_stays(bench: KubeBench) -> None:
    pool, first = await running_pool(bench)
    late = await behind(bench)
    await late.apply(contract.workload(pool, revision="r2"), contract.CREDENTIALS)
    await asyncio.to_thread(bench.kube.delete, pod_path(bench, 1))
    second = (await other_pod(bench, 1, first))["metadata"]["uid"]
    await late.restart(pool.ref, 1)
    raw = await bench.get(pod_path(bench, 1))
    assert raw is not None
    assert (raw["metadata"]["uid"], "deletionTimestamp" in raw["metadata"]) == (second, False)


async def test_a_pod_of_the_applied_revision_is_not_restarted_again(bench: KubeBench) -> None:
    pool, first = await running_pool(bench)
    await bench.cluster.restart(pool.ref, 1)
    raw = await bench.get(pod_path(bench, 1))
    assert raw is not None and raw["metadata"]["uid"] == first
    await bench.cluster.apply(contract.workload(pool, revision="r2"), contract.CREDENTIALS)
    await bench.cluster.restart(pool.ref, 1)
    await other_pod(bench, 1, first)


async def test_a_pod_that_is_gone_needs_no_restart(bench: KubeBench) -> None:
    pool, first = await running_pool(bench)
    late = await behind(bench)
    await late.apply(contract.workload(pool, replicas=1, revision="r2"), contract.CREDENTIALS)

    async def gone() -> bool:
        return await bench.get(pod_path(bench, 1)) is None

    await eventually(gone, 20)
    await late.restart(pool.ref, 1)
    assert first
