"""`python -m tests.cluster.kubelet`: stands in for the kubelet and the scheduler, at the API level.

It registers a Node, binds the pools' pods to it, runs for each the process of its container on an address of
its own, calls the container's probes for real, and writes the pod's status; the real controller manager makes
pods and EndpointSlices. Below its state folder lie one JSON file per pod (pods/, PodFile), the processes'
output (logs/) and the EndpointSlices as the gateway reads them (endpoints/).

One process, so that whatever ends it (also kill -9) ends its engines.
"""

import argparse
import asyncio
import datetime
import json
import logging
import os
import signal
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx

from loraplane_core.labels import LABEL_POOL
from tests.cluster.kube import APPLY_PATCH, MERGE_PATCH, Refused
from tests.cluster.pod import RETRY_SECONDS, Api, Pod, Site, now

log = logging.getLogger("kubelet")
#: All of it is this machine's own, so that any address in it can be bound without being configured.
POD_NETWORK = "10.128.0.0/10"
LEASE_SECONDS = 5.0


class Kubelet:
    def __init__(self, site: Site, namespace: str) -> None:
        self._site = site
        self._namespace = namespace
        self._pods: dict[str, Pod] = {}

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for work in (self._node(), self._watch_pods(), self._watch_slices()):
                group.create_task(work)

    async def close(self) -> None:
        tasks = [pod.task for pod in self._pods.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._site.api.close()
        await self._site.probes.aclose()

    async def _node(self) -> None:
        """The Node and the Lease by which the node lifecycle controller knows that it lives."""
        while True:
            try:
                await self._register()
            except (Refused, httpx.HTTPError) as error:
                log.info("the node was not renewed: %s", error)
                await asyncio.sleep(RETRY_SECONDS)
            else:
                await asyncio.sleep(LEASE_SECONDS)

    async def _register(self) -> None:
        apply = "?fieldManager=kubelet&force=true"
        node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": self._site.node}}
        where = f"/api/v1/nodes/{self._site.node}"
        await self._site.api.call("PATCH", f"{where}{apply}", node, APPLY_PATCH)
        size = {"cpu": "64", "memory": "64Gi", "pods": "1000"}
        moment = now()
        ready = {"type": "Ready", "status": "True", "reason": "StandIn", "lastHeartbeatTime": moment}
        status = {"capacity": size, "allocatable": size, "conditions": [ready]}
        await self._site.api.call("PATCH", f"{where}/status", {"status": status}, MERGE_PATCH)
        moment = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        lease = {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {"name": self._site.node, "namespace": "kube-node-lease"},
            "spec": {"holderIdentity": self._site.node, "leaseDurationSeconds": 40, "renewTime": moment},
        }
        lease_path = f"/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases/{self._site.node}{apply}"
        await self._site.api.call("PATCH", lease_path, lease, APPLY_PATCH)

    async def _watch_pods(self) -> None:
        async for kind, raw in self._forever(f"/api/v1/namespaces/{self._namespace}/pods?labelSelector={LABEL_POOL}"):
            if kind == "LIST":
                found = {each["metadata"]["uid"]: each for each in raw["items"]}
                for uid, pod in list(self._pods.items()):
                    if uid not in found:
                        del self._pods[uid]
                        pod.seen({"metadata": {}, "spec": {}}, gone=True)
                for each in found.values():
                    self._see(each)
            elif kind == "DELETED":
                gone = self._pods.pop(raw["metadata"]["uid"], None)
                if gone is not None:
                    gone.seen(raw, gone=True)
            else:
                self._see(raw)

    def _see(self, raw: dict[str, Any]) -> None:
        uid = raw["metadata"]["uid"]
        if uid in self._pods:
            self._pods[uid].seen(raw)
        else:
            self._pods[uid] = Pod(self._site, raw)
            self._pods[uid].seen(raw)

    async def _watch_slices(self) -> None:
        """The real EndpointSlices as files. What a headless Service that publishes all pods calls `ready` says
        nothing, so the file's `ready` is the slice's `serving`, which is the pod's."""
        folder = self._site.state / "endpoints"
        slices = f"/apis/discovery.k8s.io/v1/namespaces/{self._namespace}/endpointslices"
        async for kind, raw in self._forever(f"{slices}?labelSelector={LABEL_POOL}"):
            if kind == "LIST":
                names = {_slice_file(each) for each in raw["items"]}
                for file in folder.glob("*.json"):
                    if file.name not in names:
                        file.unlink()
            for each in raw["items"] if kind == "LIST" else [raw]:
                file = folder / _slice_file(each)
                if kind == "DELETED":
                    file.unlink(missing_ok=True)
                    continue
                for endpoint in each.get("endpoints") or []:
                    endpoint["conditions"]["ready"] = bool(endpoint["conditions"].get("serving"))
                temporary = file.with_suffix(".tmp")
                temporary.write_text(json.dumps(each))
                temporary.replace(file)

    async def _forever(self, path: str) -> AsyncIterator[tuple[str, dict[str, Any]]]:
        while True:
            try:
                async for event in self._site.api.watch(path):
                    yield event
            except (Refused, httpx.HTTPError, json.JSONDecodeError) as error:
                log.info("watching %s: %s", path, error)
            await asyncio.sleep(RETRY_SECONDS)


def _slice_file(raw: dict[str, Any]) -> str:
    return f"{raw['metadata']['namespace']}.{raw['metadata']['name']}.json"


def own_network() -> None:
    """Make the pod network local. Refuses to touch the network namespace that the machine's own processes share."""
    if _namespace("self") == _namespace(str(_oldest_ancestor())):
        raise SystemExit("the stand-in runs inside the test cluster's network namespace only")
    command = ["ip", "route", "replace", "local", POD_NETWORK, "dev", "lo"]
    subprocess.run(command, check=True, timeout=10)


def _namespace(pid: str) -> int:
    return Path(f"/proc/{pid}/ns/net").stat().st_ino


def _oldest_ancestor() -> int:
    """The one furthest up whose namespace we may read; whoever entered the cluster's namespace is below it."""
    found, pid = os.getpid(), os.getppid()
    while pid > 1:
        try:
            _namespace(str(pid))
        except OSError:
            break
        found = pid
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return found


async def _run(options: argparse.Namespace) -> None:
    stop = asyncio.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signum, stop.set)
    claims = {name: Path(path) for name, _, path in (each.partition("=") for each in options.claim)}
    probes = httpx.AsyncClient(timeout=1.0, trust_env=False, limits=httpx.Limits(max_keepalive_connections=0))
    site = Site(Api(options.kubeconfig), options.state, f"node-of-{options.namespace}", claims, probes)
    kubelet = Kubelet(site, options.namespace)
    working = asyncio.create_task(kubelet.run())
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        working.cancel()
        results = await asyncio.gather(working, return_exceptions=True)
        await kubelet.close()
    if isinstance(results[0], Exception):
        raise results[0]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kubeconfig", type=Path, required=True)
    parser.add_argument("--namespace", required=True, help="whose pods it runs; each stand-in has its own")
    parser.add_argument("--state", type=Path, required=True)
    parser.add_argument("--claim", action="append", default=[], metavar="NAME=PATH")
    options = parser.parse_args()
    own_network()
    for name in ("pods", "volumes", "logs", "endpoints"):
        (options.state / name).mkdir(parents=True, exist_ok=True)
    logging.basicConfig(level="INFO", format="%(asctime)s %(message)s")
    logging.getLogger("httpx").setLevel("WARNING")
    asyncio.run(_run(options))


if __name__ == "__main__":
    main()
