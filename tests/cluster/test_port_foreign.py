"""What others make, take and change of a pool's objects, on the real API server with the shipped Role."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from loraplane_core.errors import Conflict
from loraplane_core.identity import PoolRef
from loraplane_core.labels import ANNOTATION_EPOCH, LABEL_POOL
from loraplane_operator.actions import ObjectRef
from tests.cluster.port_desk import KubeBench, started
from tests.cluster.system import ClusterAccess
from tests.operator import port_contract as contract
from tests.operator.eventually import eventually

STRANGER = "stranger"  # not the operator's own account: the suite's audit shall hold no refusal of that


@pytest.fixture
async def bench(cluster: ClusterAccess) -> AsyncIterator[KubeBench]:
    async with started(cluster) as made, made.watching():
        yield made


WEB = {"app": "web"}
CONTAINER = {"name": "web", "image": "localhost/web:1"}
THEIRS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "Secret": ("/api/v1", "secrets/pool-engine", {"stringData": {"password": "x"}}),
    "Service": ("/api/v1", "services/pool", {"spec": {"clusterIP": "None", "selector": WEB, "ports": [{"port": 80}]}}),
    "PodDisruptionBudget": (
        "/apis/policy/v1",
        "poddisruptionbudgets/pool",
        {"spec": {"maxUnavailable": 0, "selector": {"matchLabels": WEB}}},
    ),
    "StatefulSet": (
        "/apis/apps/v1",
        "statefulsets/pool",
        {
            "spec": {
                "replicas": 0,
                "serviceName": "pool",
                "selector": {"matchLabels": WEB},
                "template": {"metadata": {"labels": WEB}, "spec": {"containers": [CONTAINER]}},
            }
        },
    ),
}


@pytest.mark.parametrize("kind", THEIRS)
async def test_object_of_somebody_else_under_a_pools_name_is_left_alone_and_named(bench: KubeBench, kind: str) -> None:
    """It would be changed to the pool's, and deleted with it. Also where it bears the pool's label."""
    root, below, body = THEIRS[kind]
    plural, _, name = below.partition("/")
    folder = f"{root}/namespaces/{bench.namespace}/{plural}"
    metadata = {"name": name, "labels": {LABEL_POOL: "pool"}}
    api_version = root.removeprefix("/apis/").removeprefix("/api/")
    theirs = {"apiVersion": api_version, "kind": kind, "metadata": metadata, **body}
    made = await asyncio.to_thread(bench.kube.call, "POST", folder, theirs)
    pool = await contract.created_pool(bench)
    spec = contract.workload(pool)
    with pytest.raises(Conflict, match=f"{kind} {name} exists and is not") as caught:
        await bench.cluster.apply(spec, contract.CREDENTIALS)
    assert caught.value.code == "name_taken"
    await bench.cluster.delete(spec.pool)
    after = await bench.get(f"{folder}/{name}")
    assert after is not None
    assert (after["metadata"]["uid"], after.get("spec")) == (made["metadata"]["uid"], made.get("spec"))
    assert "ownerReferences" not in after["metadata"]
    assert await contract.replicas(bench) is None
    others = [where for where in THEIRS.values() if where[1] != below]
    assert [await bench.get(f"{r}/namespaces/{bench.namespace}/{b}") for r, b, _ in others] == [None] * len(others)
    await asyncio.to_thread(bench.kube.delete, f"{folder}/{name}")
    await bench.cluster.apply(spec, contract.CREDENTIALS)
    assert len(await contract.replicas(bench) or ()) == spec.replicas


async def test_workload_of_a_pool_that_was_made_again_is_taken_over(bench: KubeBench) -> None:
    """The former pool's objects may still be there: their owner had the same name."""
    pool = await contract.created_pool(bench)
    await bench.cluster.apply(contract.workload(pool), contract.CREDENTIALS)
    ref = ObjectRef("BaseModelPool", *pool.ref)
    await bench.remove(ref)

    async def gone() -> bool:
        return await bench.raw(ref) is None

    await eventually(gone)
    fresh = await contract.created_pool(bench)
    assert fresh.meta.uid != pool.meta.uid
    await bench.cluster.apply(contract.workload(fresh), contract.CREDENTIALS)
    path = f"/apis/apps/v1/namespaces/{bench.namespace}/statefulsets/pool"

    async def owned() -> bool:
        raw = await bench.get(path)
        return raw is not None and [each["uid"] for each in raw["metadata"]["ownerReferences"]] == [fresh.meta.uid]

    await eventually(owned)


@pytest.mark.parametrize("what", ["deleted", "selector", "epoch", "pod"])
async def test_what_others_did_to_a_pools_service_or_before_a_pod_starts_is_found_at_once(
    bench: KubeBench, what: str
) -> None:
    pool = await contract.created_pool(bench)
    spec = contract.workload(pool)
    await bench.cluster.apply(spec, contract.CREDENTIALS)

    async def suspects() -> frozenset[PoolRef]:
        return (await contract.observed(bench)).suspects

    async def quiet() -> bool:
        return not await suspects()

    async def made() -> bool:
        return all(each.revision for each in await contract.replicas(bench) or ())

    await eventually(made)
    await bench.cluster.apply(spec, contract.CREDENTIALS)  # for the pods that have just been made
    await eventually(quiet)
    service = f"/api/v1/namespaces/{bench.namespace}/services/pool"
    if what == "deleted":
        await asyncio.to_thread(bench.kube.delete, service)
    elif what == "selector":
        await asyncio.to_thread(bench.kube.merge, service, {"spec": {"selector": {"app": "other"}}})
    elif what == "epoch":
        await asyncio.to_thread(bench.kube.merge, service, {"metadata": {"labels": {ANNOTATION_EPOCH: "9"}}})
    else:
        await asyncio.to_thread(bench.kube.delete, f"/api/v1/namespaces/{bench.namespace}/pods/pool-0")
    await eventually(suspects, 3)
    await bench.cluster.apply(spec, contract.CREDENTIALS)
    await eventually(quiet)
    found = await bench.get(service)
    assert found is not None
    assert found["spec"]["selector"].get(LABEL_POOL) == "pool"
    assert found["metadata"]["labels"][ANNOTATION_EPOCH] == "1"


async def test_part_of_a_status_that_somebody_wrote_is_not_read_as_ours_and_is_written_anew(bench: KubeBench) -> None:
    seen = await contract.created(bench)
    await bench.cluster.patch_status(seen.meta.ref, seen.meta.uid, contract.status("Loading"))
    (theirs,) = contract.status("Edited")["conditions"]
    path = f"{bench.path(seen.meta.ref)}/status"
    await asyncio.to_thread(bench.kube.merge, path, {"status": {"conditions": [theirs]}})

    async def taken() -> bool:
        found = await contract.adapter(bench)
        return found is not None and "reason" not in found.status["conditions"][0]

    await eventually(taken)
    await bench.cluster.patch_status(seen.meta.ref, seen.meta.uid, contract.status("Loading"))
    found = await contract.adapter(bench)
    assert found is not None and dict(found.status) == contract.status("Loading")


async def test_pod_with_a_hostile_annotation_does_not_keep_the_view_from_anybody(bench: KubeBench) -> None:
    annotations = {ANNOTATION_EPOCH: "9" * 5000, "example.com/long": "x" * 200_000}
    metadata = {"name": "pool-7", "labels": {LABEL_POOL: "pool"}, "annotations": annotations}
    pod = {"metadata": metadata, "spec": {"containers": [CONTAINER]}}
    await asyncio.to_thread(bench.kube.call, "POST", f"/api/v1/namespaces/{bench.namespace}/pods", pod)
    await bench.cluster.relist()
    await contract.created(bench)
