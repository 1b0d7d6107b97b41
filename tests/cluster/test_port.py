"""The Cluster port over the real API server and controller manager, with the shipped Role and nothing more.

No kubelet: pods are made and deleted, and run nowhere.
"""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

from loraplane_core.errors import Forbidden
from loraplane_core.identity import PoolRef
from loraplane_core.labels import ADAPTER_KIND, FINALIZER
from loraplane_operator.actions import Note, ObjectRef, WorkloadSpec
from loraplane_operator.words import AdapterObject
from tests.cluster.install import SERVICE_ACCOUNT
from tests.cluster.port_desk import KubeBench, Proxy, started, through
from tests.cluster.system import ClusterAccess
from tests.cluster.tool import Cluster
from tests.operator import port_contract as contract
from tests.operator.eventually import eventually
from tests.operator.system import adapter_manifest

FOREIGN = "example.com/audit"


@pytest.fixture
async def bench(cluster: ClusterAccess) -> AsyncIterator[KubeBench]:
    async with started(cluster) as made, made.watching():
        yield made


@pytest.mark.parametrize("check", contract.CONTRACT, ids=lambda check: check.__name__)
async def test_kubernetes(bench: KubeBench, check: contract.Check) -> None:
    await check(bench)


async def applied(bench: KubeBench, **changes: Any) -> tuple[WorkloadSpec, dict[str, dict[str, Any]]]:
    """A workload and its manifests as they are stored."""
    pool = await contract.created_pool(bench)
    spec = contract.workload(pool, **changes)
    await bench.cluster.apply(spec, contract.CREDENTIALS)
    return spec, await stored(bench)


async def stored(bench: KubeBench) -> dict[str, dict[str, Any]]:
    core, budgets = f"/api/v1/namespaces/{bench.namespace}", f"/apis/policy/v1/namespaces/{bench.namespace}"
    paths = {
        "StatefulSet": f"/apis/apps/v1/namespaces/{bench.namespace}/statefulsets/pool",
        "Service": f"{core}/services/pool",
        "Secret": f"{core}/secrets/pool-engine",
        "PodDisruptionBudget": f"{budgets}/poddisruptionbudgets/pool",
    }
    found = {kind: await bench.get(path) for kind, path in paths.items()}
    return {kind: raw for kind, raw in found.items() if raw is not None}


def specs(found: dict[str, dict[str, Any]]) -> dict[str, tuple[Any, Any]]:
    """What an apply decides: neither status nor what controllers count."""
    return {
        kind: (raw["metadata"].get("generation"), raw.get("spec") or raw.get("data")) for kind, raw in found.items()
    }


async def test_applying_without_a_change_writes_nothing(bench: KubeBench) -> None:
    spec, _ = await applied(bench)

    async def settled() -> dict[str, str] | None:
        """Controllers have written their statuses: two looks in a row are the same."""
        before = versions(await stored(bench))
        await asyncio.sleep(0.5)
        return before if versions(await stored(bench)) == before else None

    before = await eventually(settled)
    for _ in range(3):
        await bench.cluster.apply(spec, contract.CREDENTIALS)
    assert versions(await stored(bench)) == before


def versions(found: dict[str, dict[str, Any]]) -> dict[str, str]:
    return {kind: raw["metadata"]["resourceVersion"] for kind, raw in found.items()}


async def test_what_others_set_survives_an_apply(bench: KubeBench) -> None:
    spec, found = await applied(bench)
    path = f"/apis/apps/v1/namespaces/{bench.namespace}/statefulsets/pool"
    theirs = {
        "metadata": {"labels": {"team": "ml"}, "annotations": {"example.com/note": "keep"}},
        "spec": {"template": {"metadata": {"annotations": {"example.com/restarted": "now"}}}},
    }
    await asyncio.to_thread(bench.kube.merge, path, theirs)
    await bench.cluster.apply(contract.workload(await contract.created_pool(bench), 3), contract.CREDENTIALS)
    after = (await stored(bench))["StatefulSet"]
    assert after["spec"]["replicas"] == 3
    assert after["metadata"]["labels"]["team"] == "ml"
    assert after["metadata"]["annotations"]["example.com/note"] == "keep"
    assert after["spec"]["template"]["metadata"]["annotations"]["example.com/restarted"] == "now"
    assert set(found["StatefulSet"]["metadata"]["labels"]) < set(after["metadata"]["labels"])
    managers = {each["manager"] for each in after["metadata"]["managedFields"] if each["operation"] == "Apply"}
    assert managers == {SERVICE_ACCOUNT}
    assert spec.pool == PoolRef(bench.namespace, "pool")


async def test_what_others_took_is_taken_back(bench: KubeBench) -> None:
    spec, _ = await applied(bench)
    budget = f"/apis/policy/v1/namespaces/{bench.namespace}/poddisruptionbudgets/pool"
    await asyncio.to_thread(bench.kube.merge, budget, {"spec": {"maxUnavailable": 2}})
    secret = f"/api/v1/namespaces/{bench.namespace}/secrets/pool-engine"
    before = (await stored(bench))["Secret"]["data"]
    await asyncio.to_thread(bench.kube.merge, secret, {"data": {"credentials.json": "e30="}})
    await bench.cluster.apply(spec, contract.CREDENTIALS)
    after = await stored(bench)
    assert after["PodDisruptionBudget"]["spec"]["maxUnavailable"] == 1
    assert after["Secret"]["data"] == before


async def test_manifests_go_with_their_pool(bench: KubeBench) -> None:
    """By the real garbage collector: the operator has no right to delete Services, Secrets or budgets."""
    spec, found = await applied(bench)
    assert set(found) == {"StatefulSet", "Service", "Secret", "PodDisruptionBudget"}
    await bench.cluster.delete(spec.pool)
    await bench.remove(ObjectRef("BaseModelPool", *spec.pool))

    async def clean() -> bool:
        return not await stored(bench)

    await eventually(clean, 30)


async def test_condition_of_another_controller_stays_and_is_no_difference(bench: KubeBench) -> None:
    seen = await contract.created(bench)
    await bench.cluster.patch_status(seen.meta.ref, seen.meta.uid, contract.status("Loading"))
    theirs = {**contract.status()["conditions"][0], "type": "Audited"}
    body = {
        "apiVersion": "loraplane.dev/v1alpha1",
        "kind": ADAPTER_KIND,
        "metadata": {"name": "pirate"},
        "status": {"conditions": [theirs]},
    }
    await asyncio.to_thread(bench.kube.apply, f"{bench.path(seen.meta.ref)}/status", body, "auditor")

    async def both() -> bool:
        raw = await bench.raw(seen.meta.ref)
        return raw is not None and {each["type"] for each in raw["status"]["conditions"]} == {"Ready", "Audited"}

    assert await both()
    await bench.cluster.relist()
    again = await contract.adapter(bench)
    assert again is not None and dict(again.status) == contract.status("Loading")
    await bench.cluster.patch_status(seen.meta.ref, seen.meta.uid, contract.status("NotWarm"))
    assert await both()


async def test_conflict_storm_loses_no_finalizer(bench: KubeBench) -> None:
    """Another controller adds and removes its finalizer all the time, by compare-and-set as we do."""
    seen = await contract.created(bench)
    path, stop = bench.path(seen.meta.ref), asyncio.Event()
    writes = 0

    async def storm() -> None:
        nonlocal writes
        while not stop.is_set():
            body = {"metadata": {"annotations": {"example.com/storm": str(writes)}}}
            await asyncio.to_thread(bench.kube.merge, path, body)
            writes += 1

    await asyncio.to_thread(bench.kube.merge, path, {"metadata": {"finalizers": [FOREIGN]}})
    storming = asyncio.create_task(storm())
    try:
        for round_ in range(8):
            present = round_ % 2 == 0
            await bench.cluster.set_finalizer(seen.meta.ref, seen.meta.uid, present=present)
            raw = await bench.raw(seen.meta.ref)
            assert raw is not None
            assert sorted(raw["metadata"]["finalizers"]) == sorted([FOREIGN, *([FINALIZER] if present else [])])
            await bench.cluster.patch_status(seen.meta.ref, seen.meta.uid, contract.status(version=round_ + 1))
    finally:
        stop.set()
        await storming
    assert writes > 8
    raw = await bench.raw(seen.meta.ref)
    assert raw is not None and raw["status"]["version"] == 8


async def test_finalizer_is_set_from_what_is_stored_not_from_what_was_seen(bench: KubeBench) -> None:
    """A view that is behind: the compare-and-set fails, the object is read again, and both finalizers stay."""
    await contract.created(bench)
    stale = bench.fresh()
    await stale.relist()
    seen = await contract.adapter(bench)
    assert seen is not None
    await asyncio.to_thread(bench.kube.merge, bench.path(seen.meta.ref), {"metadata": {"finalizers": [FOREIGN]}})
    await stale.set_finalizer(seen.meta.ref, seen.meta.uid, present=True)
    raw = await bench.raw(seen.meta.ref)
    assert raw is not None and sorted(raw["metadata"]["finalizers"]) == sorted([FOREIGN, FINALIZER])


async def test_finalizer_that_came_with_a_restored_object_can_be_taken_off(bench: KubeBench) -> None:
    await bench.put({**adapter_manifest(), "metadata": {"name": "pirate", "finalizers": [FINALIZER]}})

    async def there() -> AdapterObject | None:
        return await contract.adapter(bench)

    seen = await eventually(there)
    assert seen.meta.finalized
    await bench.remove(seen.meta.ref)
    await bench.cluster.set_finalizer(seen.meta.ref, seen.meta.uid, present=False)
    await contract.gone(bench, seen.meta.ref)


async def test_repeated_event_is_counted_on_one_object(bench: KubeBench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loraplane_operator.cluster.recorder.WRITE_SECONDS", 0.0)
    seen = await contract.created(bench)
    note = Note(seen.meta.ref, seen.meta.uid, "Warning", "Drifted", "replica 0 lost it")
    for _ in range(3):
        await bench.cluster.emit(note)
    await bench.fresh().emit(note)  # as after a restart
    (event,) = await bench.event_objects(seen.meta.ref)
    assert (event["reason"], event["type"], event["source"]["component"]) == ("Drifted", "Warning", SERVICE_ACCOUNT)
    assert event["count"] >= 2


async def test_pod_with_the_label_of_a_pool_is_no_replica_of_it(bench: KubeBench) -> None:
    await applied(bench, replicas=1)

    async def one() -> bool:
        return [each.revision for each in await contract.replicas(bench) or ()] == ["r1"]

    await eventually(one)
    other = {
        "metadata": {"name": "pool-7", "labels": {"loraplane.dev/other": "x"}},
        "spec": {"containers": [{"name": "c", "image": "localhost/x:1"}]},
    }
    await asyncio.to_thread(bench.kube.call, "POST", f"/api/v1/namespaces/{bench.namespace}/pods", other)
    patched = {"metadata": {"labels": {"loraplane.dev/pool": "pool-7"}}}
    await asyncio.to_thread(bench.kube.merge, f"/api/v1/namespaces/{bench.namespace}/pods/pool-7", patched)
    await bench.cluster.relist()
    assert len(await contract.replicas(bench) or ()) == 1


async def test_pod_template_beyond_the_rules_is_refused_with_its_reason_and_changes_nothing(bench: KubeBench) -> None:
    spec, before = await applied(bench)
    patch = '{"spec": {"hostNetwork": true}}'
    bad = WorkloadSpec(spec.pool, spec.uid, 2, spec.engine, 1, "r2", pod_template=patch)
    with pytest.raises(Forbidden) as refused:
        await bench.cluster.apply(bad, contract.CREDENTIALS)
    assert refused.value.reason == "PodTemplateNotAllowed"
    assert specs(await stored(bench)) == specs(before)


class Outage:
    """The bench's cluster speaks to the API server by way of a proxy; its user does not."""

    def __init__(self, bench: KubeBench, proxy: Proxy) -> None:
        self.bench = bench
        self.proxy = proxy


@pytest.fixture
async def outage(cluster: ClusterAccess, tmp_path: Path) -> AsyncIterator[Outage]:
    bench = KubeBench(cluster)
    server = urlsplit(yaml.safe_load(cluster.kubeconfig.read_text())["clusters"][0]["cluster"]["server"])
    proxy = Proxy(server.hostname or "", server.port or 443)
    await proxy.open()
    try:
        await bench.start()
        bench.kubeconfig = through(bench.kubeconfig, proxy.port, tmp_path / "proxy.kubeconfig")
        bench.cluster = await bench.connected(bench.kubeconfig)
        async with bench.watching():
            yield Outage(bench, proxy)
    finally:
        await proxy.cut()
        await bench.close()


async def names(bench: KubeBench) -> set[str]:
    return {each.meta.ref.name for each in (await contract.observed(bench)).adapters}


async def test_after_an_outage_the_view_is_right_within_seconds_also_about_deletions(outage: Outage) -> None:
    bench = outage.bench
    for name in ("kept", "removed"):
        await contract.created(bench, name)
    await outage.proxy.cut()
    await bench.remove(ObjectRef(ADAPTER_KIND, bench.namespace, "removed"))
    await bench.put(adapter_manifest("added"))
    await bench.put(adapter_manifest("kept", warmReplicas=2))
    await asyncio.sleep(1)
    assert await names(bench) == {"kept", "removed"}  # nothing was forgotten while nobody answered
    await outage.proxy.open()

    async def right() -> bool:
        seen = await contract.adapter(bench, "kept")
        return await names(bench) == {"kept", "added"} and seen is not None and seen.warm_replicas == 2

    await eventually(right, 6)
    await contract.created(bench, "later")


async def test_a_deletion_during_an_outage_is_found_where_nothing_is_left_to_list(outage: Outage) -> None:
    bench = outage.bench
    seen = await contract.created(bench, "only")
    await outage.proxy.cut()
    await bench.remove(seen.meta.ref)
    with pytest.raises(Exception, match="API server"):
        await bench.cluster.patch_status(seen.meta.ref, seen.meta.uid, contract.status())
    await outage.proxy.open()

    async def empty() -> bool:
        return not await names(bench)

    await eventually(empty, 6)


async def test_expired_watch_begins_anew_with_a_list(cluster: Cluster) -> None:
    """410: the API server comes back and has forgotten everything before now, also what was deleted meanwhile."""
    bench = KubeBench(cluster)
    try:
        await bench.start()
        async with bench.watching():
            for name in ("kept", "removed"):
                await contract.created(bench, name)
            await asyncio.to_thread(cluster.compact_etcd)
            await bench.remove(ObjectRef(ADAPTER_KIND, bench.namespace, "removed"))
            await bench.put(adapter_manifest("added"))

            async def right() -> bool:
                return await names(bench) == {"kept", "added"}

            await eventually(right, 6)
            await contract.created(bench, "later")
    finally:
        await bench.close()
