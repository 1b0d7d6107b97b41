"""The Kubernetes adapter and the handlers against kmock, as far as it goes (toolchain-notes §2)."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator
from typing import Any

import kmock as km
import kopf
import pytest
from kubernetes.aio import client

from loraplane_core import credentials
from loraplane_core.identity import PoolRef
from loraplane_core.labels import API_VERSION, FINALIZER, POOL_KIND
from loraplane_operator import handlers
from loraplane_operator.cluster.kube_api import KubeApi
from loraplane_operator.cluster.kubernetes import KubernetesCluster
from loraplane_operator.cluster.manifests import Site
from loraplane_operator.reconcile import Reconciler
from tests.operator.fakes.registry import FakeRegistry
from tests.operator.system import MASTER, adapter_manifest, pool_manifest, until

VERBS = {"list", "watch", "get", "patch", "delete", "create"}
ADAPTERS = km.resource("loraplane.dev/v1alpha1/loraadapters")
POOLS = km.resource("loraplane.dev/v1alpha1/basemodelpools")
SETS = km.resource("apps/v1/statefulsets")
PODS = km.resource("v1/pods")
SERVICES = km.resource("v1/services")
OWNER = {"apiVersion": API_VERSION, "kind": POOL_KIND, "name": "pool", "uid": "u-pool", "controller": True}


@pytest.fixture
def cluster_api(kmock: Any) -> Any:
    kinds = {ADAPTERS: "LoRAAdapter", POOLS: "BaseModelPool", SETS: "StatefulSet", PODS: "Pod", SERVICES: "Service"}
    for resource, kind in kinds.items():
        kmock.resources[resource] = {"namespaced": True, "kind": kind, "verbs": VERBS, "subresources": ["status"]}
    kmock.resources["v1/namespaces"] = {"namespaced": False, "kind": "Namespace", "verbs": VERBS}
    return kmock


@pytest.fixture
async def registry() -> AsyncIterator[FakeRegistry]:
    fake = FakeRegistry(credentials.operator_credential(MASTER))
    await fake.start()
    await fake.create_tenant("acme", "default")
    yield fake
    await fake.stop()


def connect(cluster_api: Any) -> KubeApi:
    configuration = client.Configuration()
    configuration.host = str(cluster_api.url).rstrip("/")
    configuration.client_session_kwargs = {"trust_env": False}
    return KubeApi(configuration)


def kopf_registry(cluster_api: Any) -> kopf.OperatorRegistry:
    made = kopf.OperatorRegistry()

    @kopf.on.login(registry=made)
    async def login(**_: Any) -> kopf.ConnectionInfo:
        return kopf.ConnectionInfo(server=str(cluster_api.url), insecure=True)

    return made


@contextlib.asynccontextmanager
async def operator(cluster_api: Any, registry: FakeRegistry) -> AsyncIterator[Reconciler]:
    api = connect(cluster_api)
    cluster = KubernetesCluster(api, namespaces=["default"], site=Site("engine:1", "models"))
    reconciler = Reconciler(cluster, registry_url=registry.url, master=MASTER, artifacts_url="http://127.0.0.1:9")
    stop = threading.Event()
    watching = asyncio.create_task(handlers.watch(cluster, ["default"], stop, kopf_registry(cluster_api)))
    running = asyncio.create_task(reconciler.run())
    try:
        yield reconciler
    finally:
        reconciler.stop()
        stop.set()
        await asyncio.gather(watching, running)
        await api.close()


def manifest(made: dict[str, Any], uid: str) -> dict[str, Any]:
    """kmock gives no uid and no times."""
    metadata = {**made["metadata"], "namespace": "default", "uid": uid, "creationTimestamp": "2026-01-01T00:00:00Z"}
    return {**made, "metadata": metadata}


def condition(found: Any, type_: str) -> tuple[str, str]:
    conditions = (found.last.raw.get("status") or {}).get("conditions") or []
    return next(((each["status"], each["reason"]) for each in conditions if each["type"] == type_), ("", ""))


async def test_created_object_gets_finalizer_and_status(cluster_api: Any, registry: FakeRegistry) -> None:
    async with operator(cluster_api, registry):
        cluster_api.objects[POOLS, "default", "pool"] = manifest(pool_manifest(), "u-pool")
        cluster_api.objects[ADAPTERS, "default", "pirate"] = manifest(adapter_manifest(), "u-pirate")
        found = cluster_api.objects[ADAPTERS, "default", "pirate"]
        await until(lambda: condition(found, "Claimed") == ("True", "Claimed"))
        assert found.last.raw["metadata"]["finalizers"] == [FINALIZER]
        await until(lambda: condition(found, "Ready") == ("False", "ReplicaNotReady"))
        assert registry.adapters["acme", "pirate"].claim_uid == "u-pirate"
        assert "annotations" not in found.last.raw["metadata"]  # kopf keeps nothing of its own


async def test_deleted_object_loses_its_claim_and_then_its_finalizer(cluster_api: Any, registry: FakeRegistry) -> None:
    async with operator(cluster_api, registry):
        cluster_api.objects[POOLS, "default", "pool"] = manifest(pool_manifest(), "u-pool")
        cluster_api.objects[ADAPTERS, "default", "pirate"] = manifest(adapter_manifest(), "u-pirate")
        found = cluster_api.objects[ADAPTERS, "default", "pirate"]
        await until(lambda: registry.adapters.get(("acme", "pirate")) and condition(found, "Placed")[0] == "True")
        await delete(cluster_api, "loraadapters", "pirate")
        await until(lambda: found.deleted)
        assert registry.adapters["acme", "pirate"].claim_uid == ""
        assert ("release", "retain") in registry.calls


async def test_two_operators_at_once_do_no_harm(cluster_api: Any, registry: FakeRegistry) -> None:
    async with operator(cluster_api, registry), operator(cluster_api, registry):
        cluster_api.objects[POOLS, "default", "pool"] = manifest(pool_manifest(), "u-pool")
        for name in ("pirate", "json", "haiku"):
            cluster_api.objects[ADAPTERS, "default", name] = manifest(adapter_manifest(name), f"u-{name}")
        found = {name: cluster_api.objects[ADAPTERS, "default", name] for name in ("pirate", "json", "haiku")}
        await until(lambda: all(condition(each, "Placed")[0] == "True" for each in found.values()))
        for name, each in found.items():
            assert each.last.raw["metadata"]["finalizers"] == [FINALIZER]
            assert len(registry.adapters["acme", name].versions) == 1
            await delete(cluster_api, "loraadapters", name)
        await until(lambda: all(each.deleted for each in found.values()))


async def test_objects_of_other_namespaces_are_not_honoured(cluster_api: Any, registry: FakeRegistry) -> None:
    async with operator(cluster_api, registry):
        foreign = manifest(adapter_manifest("foreign"), "u-foreign")
        foreign["metadata"]["namespace"] = "other"
        cluster_api.objects[ADAPTERS, "other", "foreign"] = foreign
        cluster_api.objects[ADAPTERS, "default", "pirate"] = manifest(adapter_manifest(), "u-pirate")
        await until(lambda: condition(cluster_api.objects[ADAPTERS, "default", "pirate"], "Ready")[0] == "False")
        assert "status" not in cluster_api.objects[ADAPTERS, "other", "foreign"].last.raw


async def test_stateful_set_and_pods_are_read_as_replicas(cluster_api: Any) -> None:
    labels = {"loraplane.dev/pool": "pool"}
    cluster_api.objects[SETS, "default", "pool"] = {
        "metadata": {"name": "pool", "namespace": "default", "labels": labels, "ownerReferences": [OWNER]},
        "spec": {"replicas": 2},
    }
    cluster_api.objects[PODS, "default", "pool-0"] = {
        "metadata": {
            "name": "pool-0",
            "namespace": "default",
            "labels": labels,
            "annotations": {"loraplane.dev/revision": "r1"},
        },
        "status": {"phase": "Running", "podIP": "10.0.0.7", "conditions": [{"type": "Ready", "status": "True"}]},
    }
    api = connect(cluster_api)
    cluster = KubernetesCluster(api, namespaces=["default"], site=Site("engine:1", "models"))
    try:
        await cluster.relist()
        seen = await cluster.observe()
    finally:
        await api.close()
    assert seen is not None
    assert seen.workloads is not None
    first, second = seen.workloads[PoolRef("default", "pool")]
    assert (first.ready, first.running, first.address, first.revision) == (True, True, "10.0.0.7", "r1")
    assert (second.ready, second.running) == (False, False)


async def test_event_from_another_namespace_is_dropped(cluster_api: Any) -> None:
    api = connect(cluster_api)
    cluster = KubernetesCluster(api, namespaces=["default"], site=Site("engine:1", "models"))
    try:
        await cluster.relist()
        for namespace in ("other", "default"):
            seen = manifest(adapter_manifest(), "u")
            seen["metadata"]["namespace"] = namespace
            cluster.seen("LoRAAdapter", seen, deleted=False)
        observed = await cluster.observe()
    finally:
        await api.close()
    assert observed is not None
    assert [obj.meta.ref.namespace for obj in observed.adapters] == ["default"]


async def delete(cluster_api: Any, plural: str, name: str) -> None:
    api = connect(cluster_api)
    try:
        await api.delete(f"/apis/loraplane.dev/v1alpha1/namespaces/default/{plural}/{name}")
    finally:
        await api.close()
