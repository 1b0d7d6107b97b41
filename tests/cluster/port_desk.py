"""The desk of the port contract on Kubernetes: a KubernetesCluster over the real API server, watching with its own
ServiceAccount, and its user, the admin.
"""

import asyncio
import contextlib
import secrets
import threading
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import kopf
import yaml
from kubernetes.aio import client, config

from loraplane_core.labels import API_VERSION
from loraplane_operator import handlers
from loraplane_operator.actions import ObjectRef
from loraplane_operator.cluster.kinds import KINDS
from loraplane_operator.cluster.kube_api import KubeApi
from loraplane_operator.cluster.kubernetes import KubernetesCluster
from loraplane_operator.cluster.manifests import Site
from tests.cluster.install import SERVICE_ACCOUNT, install
from tests.cluster.kube import Kube
from tests.cluster.system import ClusterAccess
from tests.operator.eventually import eventually

SITE = Site("localhost/loraplane-engine:1", "models")


class KubeBench:
    """One namespace; calls of the user are blocking ones, made beside the loop."""

    def __init__(self, access: ClusterAccess) -> None:
        self.access = access
        self.kube = Kube(access.kubeconfig)
        self.namespace = f"port-{secrets.token_hex(3)}"
        self.wakes = 0
        self._apis: list[KubeApi] = []
        self.kubeconfig = access.kubeconfig

    async def start(self) -> None:
        await asyncio.to_thread(self._prepare)
        self.kubeconfig = await asyncio.to_thread(
            self.access.service_account_kubeconfig, self.namespace, SERVICE_ACCOUNT
        )
        self.cluster = await self.connected(self.kubeconfig)
        self.cluster.subscribe(self._woken)

    async def connected(self, kubeconfig: Path) -> KubernetesCluster:
        configuration = client.Configuration()
        configuration.client_session_kwargs = {"trust_env": False}
        await config.load_kube_config(config_file=str(kubeconfig), client_configuration=configuration)
        api = KubeApi(configuration)
        self._apis.append(api)
        return KubernetesCluster(api, namespaces=[self.namespace], site=SITE)

    def fresh(self) -> KubernetesCluster:
        return KubernetesCluster(self._apis[0], namespaces=[self.namespace], site=SITE)

    @contextlib.asynccontextmanager
    async def watching(self, *, complete: bool = True) -> AsyncIterator[None]:
        """Until the view is complete, unless that is not to be waited for."""
        stop = threading.Event()
        watch = asyncio.create_task(
            handlers.watch(self.cluster, [self.namespace], stop, _registry(self.kubeconfig)), name="kopf"
        )
        run = asyncio.create_task(self.cluster.run())

        async def viewed() -> object:
            if run.done():
                run.result()  # raises what ended it
            return await self.cluster.observe()

        try:
            if complete:
                await eventually(viewed)
            yield
        finally:
            stop.set()
            run.cancel()
            await asyncio.gather(watch, run, return_exceptions=True)

    async def close(self) -> None:
        for api in self._apis:
            await api.close()
        await asyncio.to_thread(self._clean)

    # -- the user

    async def put(self, manifest: Mapping[str, Any]) -> None:
        ref = ObjectRef(manifest["kind"], self.namespace, manifest["metadata"]["name"])
        await asyncio.to_thread(self.kube.apply, self.path(ref), {**manifest, "apiVersion": API_VERSION}, "user")

    async def remove(self, ref: ObjectRef) -> None:
        await asyncio.to_thread(self.kube.delete, self.path(ref))

    async def raw(self, ref: ObjectRef) -> dict[str, Any] | None:
        return await asyncio.to_thread(self.kube.get, self.path(ref))

    async def get(self, path: str) -> dict[str, Any] | None:
        return await asyncio.to_thread(self.kube.get, path)

    async def events(self, ref: ObjectRef) -> list[tuple[str, str]]:
        return [(each["reason"], each["message"]) for each in await self.event_objects(ref)]

    async def event_objects(self, ref: ObjectRef) -> list[dict[str, Any]]:
        found = await asyncio.to_thread(self.kube.items, f"/api/v1/namespaces/{self.namespace}/events")
        return [each for each in found if each["involvedObject"]["name"] == ref.name]

    @staticmethod
    def path(ref: ObjectRef) -> str:
        return KINDS[ref.kind].path(ref.namespace, ref.name)

    # -- inside

    def _woken(self) -> None:
        self.wakes += 1

    def _prepare(self) -> None:
        self.kube.call("POST", "/api/v1/namespaces", {"metadata": {"name": self.namespace}})
        install(self.kube, [self.namespace])

    def _clean(self) -> None:
        for kind in KINDS.values():
            if kind.api_version == API_VERSION:
                for raw in self.kube.items(kind.path(self.namespace)):
                    path = kind.path(self.namespace, raw["metadata"]["name"])
                    self.kube.merge(path, {"metadata": {"finalizers": None}})
        self.kube.delete(f"/api/v1/namespaces/{self.namespace}")
        self.kube.close()


def through(kubeconfig: Path, port: int, into: Path) -> Path:
    """The same credentials by way of 127.0.0.1:`port`."""
    found = yaml.safe_load(kubeconfig.read_text())
    found["clusters"][0]["cluster"]["server"] = f"https://127.0.0.1:{port}"
    into.touch(0o600)
    into.write_text(yaml.safe_dump(found))
    return into


def _registry(kubeconfig: Path) -> kopf.OperatorRegistry:
    """kopf's own reading of a kubeconfig, but of this one whatever the environment says."""
    found = yaml.safe_load(kubeconfig.read_text())
    cluster, user = found["clusters"][0]["cluster"], found["users"][0]["user"]
    made = kopf.OperatorRegistry()

    @kopf.on.login(registry=made)
    async def login(**_: Any) -> kopf.ConnectionInfo:
        return kopf.ConnectionInfo(
            server=cluster["server"],
            ca_path=cluster.get("certificate-authority"),
            ca_data=cluster.get("certificate-authority-data"),
            token=user["token"],
        )

    return made


class Proxy:
    """A TCP relay before the API server that can be cut: connections end, and new ones are refused."""

    def __init__(self, host: str, port: int) -> None:
        self._target = host, port
        self._server: asyncio.Server | None = None
        self._relays: set[asyncio.Task[None]] = set()
        self.port = 0

    async def open(self) -> None:
        self._server = await asyncio.start_server(self._relay, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def cut(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        for relay in list(self._relays):
            relay.cancel()
        await asyncio.gather(*self._relays, return_exceptions=True)

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._both(reader, writer))
        self._relays.add(task)
        task.add_done_callback(self._relays.discard)
        await asyncio.gather(task, return_exceptions=True)

    async def _both(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(*self._target)
        copies = [asyncio.create_task(_copy(reader, back)), asyncio.create_task(_copy(there, writer))]
        try:
            await asyncio.wait(copies, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for copy in copies:
                copy.cancel()
            await asyncio.gather(*copies, return_exceptions=True)
            for end in (writer, back):
                end.transport.abort()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()


@contextlib.asynccontextmanager
async def started(cluster: ClusterAccess) -> AsyncIterator[KubeBench]:
    made = KubeBench(cluster)
    try:
        await made.start()
        yield made
    finally:
        await made.close()
