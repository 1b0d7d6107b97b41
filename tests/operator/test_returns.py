"""Whoever was away and is back is asked again at once. Back-offs are made longer than the tests wait, so that only
the return explains what happens.
"""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from loraplane_core.errors import Forbidden, Unavailable
from loraplane_operator import execute
from loraplane_operator.backoff import Backoff
from loraplane_operator.cluster import kubernetes
from loraplane_operator.cluster.kube_api import KubeApi
from loraplane_operator.cluster.kubernetes import KubernetesCluster
from loraplane_operator.cluster.manifests import Site
from loraplane_operator.cluster.supervisor import SupervisorClient
from loraplane_operator.engines import client
from loraplane_operator.registry.client import RegistryClient
from tests.operator.system import System, adapter_manifest, pool_manifest, running, until
from tests.operator.test_kubernetes import manifest


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(execute, "RETRY", Backoff(first=600, cap=600))
    yield


def failures(system: System, kind: str) -> list[str]:
    """Codes of what waits for its back-off."""
    assert system.reconciler is not None
    found = system.reconciler._notebook.failures.items()
    return [failure.code for action, failure in found if type(action).__name__ == kind]


async def test_registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(tmp_path) as system:
        real, away = RegistryClient.claim, True

        async def claim(self: RegistryClient, *arguments: Any) -> Any:
            if away:
                raise Unavailable("the registry: no connection", code="registry_unavailable")
            return await real(self, *arguments)

        monkeypatch.setattr(RegistryClient, "claim", claim)
        system.write("all.yaml", pool_manifest(), adapter_manifest())
        await until(lambda: failures(system, "ClaimAdapter") == ["registry_unavailable"])
        away = False
        await system.registry.stop()
        await system.registry.start()
        await until(system.ready)


async def test_registry_and_an_edit_of_what_it_knew_already(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The claim is planned throughout, since its adapter is known, and so its failure is not forgotten by itself."""
    async with running(tmp_path) as system:
        real, away = RegistryClient.claim, False

        async def claim(self: RegistryClient, *arguments: Any) -> Any:
            if away:
                raise Unavailable("the registry: no connection", code="registry_unavailable")
            return await real(self, *arguments)

        monkeypatch.setattr(RegistryClient, "claim", claim)
        system.write("pool.yaml", pool_manifest(replicas=2))
        system.write("pirate.yaml", adapter_manifest())
        await until(system.ready)
        await system.registry.stop()
        away = True
        system.write("pirate.yaml", adapter_manifest(warmReplicas=2))
        await until(lambda: failures(system, "ClaimAdapter") == ["registry_unavailable"])
        away = False
        await system.registry.start()
        await until(lambda: system.registry.adapters["acme", "pirate"].warm_replicas == 2)


async def test_supervisor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(tmp_path) as system:
        real, away = SupervisorClient.ask, False

        async def ask(self: SupervisorClient, request: Any) -> Any:
            if away:
                raise Unavailable("no answer", code="cluster_unavailable")
            return await real(self, request)

        monkeypatch.setattr(SupervisorClient, "ask", ask)
        system.write("pool.yaml", pool_manifest(replicas=1))
        await until(lambda: len(system.supervisor.engines) == 1)
        away = True
        system.write("pool.yaml", pool_manifest(replicas=2))
        await until(lambda: failures(system, "ApplyWorkload") == ["cluster_unavailable"])
        away = False
        await until(lambda: len(system.supervisor.engines) == 2)


async def test_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same boot: another one would be asked anew anyway."""
    monkeypatch.setattr(client, "LOAD_SECONDS", 0.1)
    monkeypatch.setattr(client, "MARGIN_SECONDS", 0.1)
    async with running(tmp_path) as system:
        system.write("pool.yaml", pool_manifest(replicas=1))
        await until(lambda: len(system.supervisor.engines) == 1)
        engine = system.engine(0)
        engine.hang = True
        system.write("pirate.yaml", adapter_manifest())
        await until(lambda: failures(system, "Warm") == ["deadline_exceeded"])
        engine.hang = False
        await engine.stop()
        assert system.reconciler is not None
        fleet = system.reconciler._fleet
        await until(lambda: not fleet.engines())
        await asyncio.sleep(0.5)  # longer than a stall that makes no status flap
        await engine.start()
        await until(system.ready)


class Away:
    """An API server that refuses `left` lists, and then holds nothing."""

    def __init__(self, left: int) -> None:
        self.left = left

    async def list_items(self, path: str, **query: str) -> tuple[list[dict[str, Any]], str]:
        if self.left:
            self.left -= 1
            raise Unavailable("no answer", code="cluster_unavailable")
        return [], "1"


@pytest.mark.parametrize(("away", "returns"), [(0, 0), (2, 1)])
async def test_api_server_returns_once(monkeypatch: pytest.MonkeyPatch, away: int, returns: int) -> None:
    monkeypatch.setattr(kubernetes, "_RETRY_LIST", Backoff(first=0.01, cap=0.01))
    cluster = KubernetesCluster(cast(KubeApi, Away(away)), namespaces=["default"], site=Site("engine:1", "models"))
    told = 0

    def returned() -> None:
        nonlocal told
        told += 1

    cluster.subscribe(lambda: None, returned)
    running = asyncio.create_task(cluster.run())
    try:
        await until(lambda: cluster._complete)
        await asyncio.sleep(0)
        assert told == returns
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


class Partly:
    """An API server that refuses whatever lies in `refused`."""

    def __init__(self, *refused: str) -> None:
        self.refused = set(refused)

    async def list_items(self, path: str, **query: str) -> tuple[list[dict[str, Any]], str]:
        if any(f"/namespaces/{namespace}/" in path for namespace in self.refused):
            raise Forbidden("forbidden")
        return [], "1"


async def seen(cluster: KubernetesCluster) -> frozenset[str] | None:
    observation = await cluster.observe()
    return None if observation is None else observation.namespaces


async def test_a_namespace_that_is_gone_holds_up_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its Role went with it. What nobody can read there is no orphan: it is not observed."""
    monkeypatch.setattr(kubernetes, "REFUSED_SECONDS", 0.2)
    api = Partly("gone")
    cluster = KubernetesCluster(cast(KubeApi, api), namespaces=["gone", "stays"], site=Site("engine:1", "models"))
    with pytest.raises(Forbidden):
        await cluster.relist()
    assert await seen(cluster) is None, "an API server that has just started refuses what it grants a moment later"
    await asyncio.sleep(0.2)
    await cluster.relist()
    assert await seen(cluster) == frozenset({"stays"})
    api.refused.clear()
    await cluster.relist()
    assert await seen(cluster) == frozenset({"gone", "stays"})


async def test_what_was_seen_of_a_namespace_outlives_the_right_to_read_it(monkeypatch: pytest.MonkeyPatch) -> None:
    api = Partly()
    cluster = KubernetesCluster(cast(KubeApi, api), namespaces=["going", "stays"], site=Site("engine:1", "models"))
    await cluster.relist()
    raw = manifest(adapter_manifest(), "u-pirate")
    raw["metadata"]["namespace"] = "going"
    cluster.seen("LoRAAdapter", raw, deleted=False)
    api.refused.add("going")
    await cluster.relist()
    observation = await cluster.observe()
    assert observation is not None
    assert (len(observation.adapters), observation.namespaces) == (1, frozenset({"stays"}))


async def test_a_cluster_that_refuses_everything_is_not_read() -> None:
    api = Partly("a", "b")
    cluster = KubernetesCluster(cast(KubeApi, api), namespaces=["a", "b"], site=Site("engine:1", "models"))
    with pytest.raises(Forbidden):
        await cluster.relist()
    assert await seen(cluster) is None
