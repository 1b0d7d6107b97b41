"""The watch of EndpointSlices against an API server of a few lines; the real one: tests/cluster/test_chart.py."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from loraplane_core.identity import ReplicaId
from loraplane_core.labels import ANNOTATION_EPOCH, LABEL_POOL
from loraplane_core.wire.endpoints import Endpoint
from loraplane_gateway.data.routing import slices
from loraplane_gateway.data.routing.endpoints import Endpoints
from loraplane_gateway.data.routing.slices import ApiServer, EndpointSlices
from tests.operator.eventually import eventually


def manifest(
    *ordinals: int, pool: str = "smol", epoch: int = 1, version: int = 1, ready: bool = True
) -> dict[str, Any]:
    """As Kubernetes makes it: the pool and the epoch by labels of the Service."""
    pods = [
        {
            "addresses": [f"10.0.0.{ordinal + 1}"],
            "conditions": {"ready": True},
            "targetRef": {"kind": "Pod", "name": f"{pool}-{ordinal}"},
        }
        for ordinal in ordinals
    ]
    labels = {LABEL_POOL: pool, ANNOTATION_EPOCH: str(epoch)}
    metadata = {"name": f"{pool}-x", "namespace": "ns", "labels": labels, "resourceVersion": str(version)}
    ports = [{"name": name, "port": port} for name, port in (("data", 8000), ("admin", 8001), ("metrics", 8002))]
    return {"metadata": metadata, "addressType": "IPv4", "endpoints": pods, "ports": ports}


class Server:
    """Answers lists from `items`, and watches with what is put into the queue; None ends a watch."""

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        self.events: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        self.lists = 0
        self.watches: list[str] = []
        self.status = 200
        self.refused = 0

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        assert request.url.path == "/apis/discovery.k8s.io/v1/namespaces/ns/endpointslices"
        assert request.url.params["labelSelector"] == LABEL_POOL
        assert request.headers["authorization"] == "Bearer t"
        if self.status != 200:
            self.refused += 1
            return httpx.Response(self.status)
        if "watch" not in request.url.params:
            self.lists += 1
            return httpx.Response(200, json={"items": self.items, "metadata": {"resourceVersion": "7"}})
        self.watches.append(request.url.params["resourceVersion"])
        return httpx.Response(200, content=self._lines())

    async def _lines(self) -> AsyncIterator[bytes]:
        while (event := await self.events.get()) is not None:
            yield json.dumps(event).encode() + b"\n"

    def tell(self, kind: str, raw: dict[str, Any]) -> None:
        self.events.put_nowait({"type": kind, "object": raw})


class View:
    def __init__(self) -> None:
        self.told: list[Endpoints] = []

    def ordinals(self) -> set[int] | None:
        return {replica.ordinal for replica in self.told[-1]} if self.told else None

    async def until(self, *ordinals: int) -> None:
        async def seen() -> bool:
            return self.ordinals() == set(ordinals)

        await eventually(seen)


@pytest.fixture
async def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    monkeypatch.setattr(slices, "_FIRST_RETRY", 0.01)
    return Server()


@pytest.fixture
async def view(server: Server) -> AsyncIterator[View]:
    made = View()
    async with httpx.AsyncClient(base_url="http://api", transport=httpx.MockTransport(server)) as client:
        watcher = EndpointSlices(client, lambda: {"authorization": "Bearer t"}, ["ns"], made.told.append)
        task = asyncio.create_task(watcher.watch())
        try:
            yield made
        finally:
            task.cancel()
            await asyncio.wait({task})


async def test_endpoints_are_listed_and_then_followed(server: Server, view: View) -> None:
    await view.until()
    server.tell("ADDED", manifest(0, 1, epoch=3))
    await view.until(0, 1)
    assert view.told[-1][ReplicaId("ns", "smol", 1)] == Endpoint(
        replica=ReplicaId("ns", "smol", 1), address="10.0.0.2", data_port=8000, admin_port=8001, metrics_port=8002,
        ready=True, terminating=False, epoch=3,
    )  # fmt: skip
    server.tell("MODIFIED", manifest(1, version=2))
    await view.until(1)
    server.tell("DELETED", manifest(version=3))
    await view.until()
    assert server.lists == 1


async def test_a_watch_that_the_server_ends_goes_on_where_it_was(server: Server, view: View) -> None:
    await view.until()
    server.tell("ADDED", manifest(0, version=9))
    server.tell("BOOKMARK", {"metadata": {"resourceVersion": "12"}})
    server.events.put_nowait(None)
    server.tell("MODIFIED", manifest(0, 1, version=13))
    await view.until(0, 1)
    assert (server.watches, server.lists) == (["7", "12"], 1)


async def test_a_view_that_the_server_forgot_begins_anew(server: Server, view: View) -> None:
    await view.until()
    server.items = [manifest(4)]
    server.tell("ERROR", {"code": 410, "message": "too old resource version"})
    await view.until(4)
    assert server.lists == 2


async def test_the_last_view_holds_while_the_server_is_away(server: Server, view: View) -> None:
    await view.until()
    server.tell("ADDED", manifest(0))
    await view.until(0)
    server.status = 503
    server.events.put_nowait(None)  # the watch that runs ends; the next one is refused
    server.items = [manifest(0, 1)]
    told = len(view.told)

    async def refused() -> bool:
        return server.refused > 2

    await eventually(refused)
    assert (len(view.told), view.ordinals()) == (told, {0})
    server.status = 200
    await view.until(0, 1)


async def test_a_malformed_slice_keeps_its_last_reading(
    server: Server, view: View, caplog: pytest.LogCaptureFixture
) -> None:
    await view.until()
    server.tell("ADDED", manifest(0))
    await view.until(0)
    broken = manifest(0, version=2)
    broken["endpoints"][0]["addresses"] = []
    server.tell("MODIFIED", broken)
    server.tell("ADDED", {**manifest(0, pool="other", version=3)})

    async def both() -> bool:
        return len(view.told[-1]) == 2

    await eventually(both)
    assert "malformed EndpointSlice" in caplog.text


def test_a_pod_finds_its_api_server_and_nobody_else_does() -> None:
    found = ApiServer.in_cluster({"KUBERNETES_SERVICE_HOST": "fd00::1", "KUBERNETES_SERVICE_PORT": "443"})
    assert found.url == "https://[fd00::1]:443"
    assert found.token == Path("/var/run/secrets/kubernetes.io/serviceaccount/token")
    with pytest.raises(ValueError, match="needs a pod with a service account"):
        ApiServer.in_cluster({})


async def test_nothing_is_told_before_every_namespace_was_listed_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a gateway would be ready, and refuse requests, for want of engines that it has not looked for."""
    monkeypatch.setattr(slices, "_FIRST_RETRY", 0.01)
    page = {"items": [manifest(0)], "metadata": {"resourceVersion": "7"}}
    answers = {"ns": httpx.Response(200, json=page), "barred": httpx.Response(403)}
    asked = dict.fromkeys(["ns", "other", "barred"], 0)

    async def serve(request: httpx.Request) -> httpx.Response:
        if "watch" in request.url.params:
            await asyncio.sleep(60)
        name = request.url.path.split("/")[5]
        asked[name] += 1
        found = answers.get(name)
        if found is None:
            raise httpx.ConnectError("away")
        return found

    told: list[Endpoints] = []
    async with httpx.AsyncClient(base_url="http://api", transport=httpx.MockTransport(serve)) as client:
        task = asyncio.create_task(EndpointSlices(client, lambda: {}, list(asked), told.append).watch())
        try:

            async def tried() -> bool:
                return min(asked["other"], asked["barred"]) > 1 and asked["ns"] == 1

            await eventually(tried)
            assert told == []
            answers["other"] = httpx.Response(200, json={**page, "items": []})

            async def heard() -> bool:
                return bool(told)

            await eventually(heard)
            assert set(told[0]) == {ReplicaId("ns", "smol", 0)}
        finally:
            task.cancel()
            await asyncio.wait({task})
