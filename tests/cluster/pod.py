"""One pod of the kubelet stand-in: its process, its probes, its status."""

import asyncio
import contextlib
import datetime
import json
import logging
import os
import shutil
import signal
import subprocess
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import msgspec

from loraplane_core.process import die_with_parent
from tests.cluster import container
from tests.cluster.kube import MERGE_PATCH, Refused, answer_of, settings_of

log = logging.getLogger("kubelet")
RETRY_SECONDS = 0.2
#: Restarts of a dead container: the first at once, as the kubelet does, then a little later each.
BACKOFF = (0.0, 0.2, 0.5, 1.0, 2.0)
STABLE_SECONDS = 5.0


class PodFile(msgspec.Struct, kw_only=True):
    """What tests may want to know about a pod and its process."""

    name: str
    namespace: str
    uid: str
    ip: str
    pid: int = 0
    restarts: int = 0
    ready: bool = False
    ready_at: float = 0.0  # Unix seconds at which the probe first said so


def now() -> str:
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


class Api:
    """The few calls a kubelet makes; each raises httpx.HTTPError or Refused."""

    def __init__(self, kubeconfig: Path) -> None:
        limits = httpx.Limits(max_connections=None)
        self._http = httpx.AsyncClient(**settings_of(kubeconfig), timeout=10.0, limits=limits)

    async def call(self, method: str, path: str, body: Any = None, kind: str = "application/json") -> dict[str, Any]:
        return answer_of(await self._http.request(method, path, json=body, headers={"content-type": kind}))

    async def watch(self, path: str) -> AsyncIterator[tuple[str, dict[str, Any]]]:
        """("LIST", list) first, then (type, object) until the watch ends in whatever way."""
        listed = await self.call("GET", path)
        yield "LIST", listed
        version = listed["metadata"]["resourceVersion"]
        joint = "&" if "?" in path else "?"
        url = f"{path}{joint}watch=true&resourceVersion={version}&timeoutSeconds=300"
        async with self._http.stream("GET", url, timeout=httpx.Timeout(10.0, read=310.0)) as response:
            async for line in response.aiter_lines():
                event = json.loads(line)
                if event["type"] == "ERROR":
                    return
                yield event["type"], event["object"]

    async def close(self) -> None:
        await self._http.aclose()


@dataclass
class Site:
    api: Api
    state: Path
    node: str
    claims: dict[str, Path]
    probes: httpx.AsyncClient
    addresses: int = field(default=0)

    def address(self) -> str:
        """A new one for every pod, as a network plugin would; stand-ins that run at once give different ones."""
        self.addresses += 1
        pid = os.getpid()
        return f"10.{128 + (pid >> 8) % 64}.{pid % 256}.{self.addresses % 250 + 1}"


class Pod:
    """One pod from its binding to its end; `seen` gives it its news."""

    def __init__(self, site: Site, raw: dict[str, Any]) -> None:
        self._site = site
        self._raw = raw
        metadata = raw["metadata"]
        self._path = f"/api/v1/namespaces/{metadata['namespace']}/pods/{metadata['name']}"
        self.file = PodFile(
            name=metadata["name"], namespace=metadata["namespace"], uid=metadata["uid"], ip=site.address()
        )
        self._json = site.state / "pods" / f"{self.file.namespace}.{self.file.name}.json"
        self._folder = site.state / "volumes" / self.file.uid
        self._process: asyncio.subprocess.Process | None = None
        self._deleted = asyncio.Event()  # asked to end, or gone
        self._gone = False
        self._started_at = now()
        self._waiting: dict[str, str] | None = {"reason": "ContainerCreating"}
        self._since: dict[str, tuple[str, str]] = {}
        self._told: object = None
        self.task = asyncio.create_task(self._run())

    def seen(self, raw: dict[str, Any], *, gone: bool = False) -> None:
        self._raw = raw
        self._gone = self._gone or gone
        if gone or "deletionTimestamp" in raw["metadata"]:
            self._deleted.set()

    # -- its life

    async def _run(self) -> None:
        try:
            self._write()
            await self._bind()
            keeping = asyncio.create_task(self._keep())
            telling = asyncio.create_task(self._tell())
            try:
                await self._deleted.wait()
            finally:
                keeping.cancel()
                await asyncio.gather(keeping, return_exceptions=True)
                await self._end(telling)
        finally:
            self._kill()
            self._json.unlink(missing_ok=True)
            shutil.rmtree(self._folder, ignore_errors=True)

    async def _bind(self) -> None:
        if self._raw["spec"].get("nodeName"):
            return
        target = {"apiVersion": "v1", "kind": "Node", "name": self._site.node}
        body = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": self.file.name}, "target": target}
        await self._until_done("POST", f"{self._path}/binding", body)

    async def _keep(self) -> None:
        """Start the container, and again whenever it ends."""
        for number in range(1 << 30):
            started = time.monotonic()
            try:
                await self._start()
                await self._watch_container()
                trouble = {"reason": "Error", "message": "the container ended"}
            except (LookupError, OSError) as error:
                trouble = {"reason": "CreateContainerConfigError", "message": str(error)}
            self._kill()
            self.file.ready, self.file.pid, self._waiting = False, 0, trouble
            self._write()
            quick = time.monotonic() - started < STABLE_SECONDS
            await asyncio.sleep(BACKOFF[min(number, len(BACKOFF) - 1)] if quick else 0)
            self.file.restarts += 1

    async def _start(self) -> None:
        secrets = await self._secrets()
        volumes = container.materialize(self._raw, self._folder, self._site.claims, secrets.get)
        wanted = container.command(self._raw, volumes, self.file.ip)
        log_file = self._site.state / "logs" / f"{self.file.namespace}.{self.file.name}.log"
        with log_file.open("ab") as output:
            self._process = await asyncio.create_subprocess_exec(
                *wanted.argv,
                env=wanted.env,
                cwd=container.ROOT,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                preexec_fn=die_with_parent(signal.SIGKILL),  # this is the main thread, which lives as long
            )
        self.file.pid, self._waiting = self._process.pid, None
        self._write()

    async def _secrets(self) -> dict[str, dict[str, Any]]:
        names = [each["secret"]["secretName"] for each in self._raw["spec"].get("volumes") or [] if "secret" in each]
        found = {}
        for name in names:
            with contextlib.suppress(Refused, httpx.HTTPError):
                path = f"/api/v1/namespaces/{self.file.namespace}/secrets/{name}"
                found[name] = await self._site.api.call("GET", path)
        return found

    async def _watch_container(self) -> None:
        """Probe until the process ends; a failed liveness probe ends it."""
        assert self._process is not None
        ended = asyncio.create_task(self._process.wait())
        probing = asyncio.create_task(self._probe())
        try:
            await asyncio.wait({ended, probing}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (ended, probing):
                task.cancel()
            await asyncio.gather(ended, probing, return_exceptions=True)

    async def _probe(self) -> None:
        """Returns when the container is to be killed."""
        spec = self._raw["spec"]["containers"][0]
        startup, readiness, liveness = (
            container.probe_of(spec, f"{kind}Probe") for kind in ("startup", "readiness", "liveness")
        )
        if startup is not None:
            # The kubelet asks every `periodSeconds`, at phases that a test should not have to know.
            while not await self._ask(startup[0]):  # noqa: ASYNC110 - another process's state
                await asyncio.sleep(0.1)
        living = asyncio.create_task(self._until_failing(liveness)) if liveness else None
        try:
            failures = 0
            while living is None or not living.done():
                good = readiness is None or await self._ask(readiness[0])
                failures = 0 if good else failures + 1
                if good != self.file.ready and (good or readiness is None or failures >= readiness[2]):
                    self.file.ready = good
                    self.file.ready_at = time.time() if good else 0.0
                    self._write()
                await asyncio.sleep(readiness[1] if readiness and self.file.ready else 0.2)
        finally:
            if living is not None:
                living.cancel()

    async def _until_failing(self, probe: tuple[str, float, int]) -> None:
        failures = 0
        while failures < probe[2]:
            await asyncio.sleep(probe[1])
            failures = 0 if await self._ask(probe[0]) else failures + 1

    async def _ask(self, where: str) -> bool:
        try:
            return (await self._site.probes.get(f"http://{self.file.ip}{where}")).is_success
        except httpx.HTTPError:
            return False

    async def _end(self, telling: "asyncio.Task[None]") -> None:
        """SIGTERM, the grace period, SIGKILL; then the pod may go."""
        process = self._process
        grace = 0.0 if self._gone else float(self._raw["metadata"].get("deletionGracePeriodSeconds") or 0)
        if process is not None and process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM if grace else signal.SIGKILL)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(grace, 1.0)):
                    await process.wait()
        self._kill()
        telling.cancel()
        await asyncio.gather(telling, return_exceptions=True)
        if not self._gone:
            options = {"gracePeriodSeconds": 0, "preconditions": {"uid": self.file.uid}}
            await self._until_done("DELETE", self._path, options)

    def _kill(self) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)  # a session of its own, so also what it started

    async def _until_done(self, method: str, path: str, body: Any) -> None:
        """An answer of any kind ends it: a pod that is gone or bound already needs nothing."""
        while True:
            try:
                await self._site.api.call(method, path, body)
                return
            except Refused as error:
                if error.status not in (429, 500, 503):
                    return
            except httpx.HTTPError:
                pass
            await asyncio.sleep(RETRY_SECONDS)

    # -- what others see of it

    def _write(self) -> None:
        temporary = self._json.with_suffix(".tmp")
        temporary.write_bytes(msgspec.json.encode(self.file))
        temporary.replace(self._json)

    async def _tell(self) -> None:
        """Write the pod's status whenever it changed."""
        while True:
            status = self._status()
            if status != self._told:
                try:
                    await self._site.api.call("PATCH", f"{self._path}/status", {"status": status}, MERGE_PATCH)
                    self._told = status
                except (Refused, httpx.HTTPError) as error:
                    log.info("%s: status not written: %s", self.file.name, error)
                    await asyncio.sleep(RETRY_SECONDS)
            await asyncio.sleep(0.02)

    def _status(self) -> dict[str, Any]:
        spec, running = self._raw["spec"]["containers"][0], self.file.pid != 0
        state: dict[str, Any] = {"running": {"startedAt": self._started_at}}
        entry = {
            "name": spec["name"],
            "image": spec["image"],
            "imageID": "",
            "ready": self.file.ready,
            "started": running,
            "restartCount": self.file.restarts,
            "state": state if running else {"waiting": self._waiting or {}},
        }
        conditions = [
            self._condition(kind, holds=holds)
            for kind, holds in (
                ("PodScheduled", True),
                ("Initialized", True),
                ("ContainersReady", self.file.ready),
                ("Ready", self.file.ready),
            )
        ]
        return {
            "phase": "Running" if running or self.file.restarts else "Pending",
            "podIP": self.file.ip,
            "podIPs": [{"ip": self.file.ip}],
            "startTime": self._started_at,
            "containerStatuses": [entry],
            "conditions": conditions,
        }

    def _condition(self, kind: str, *, holds: bool) -> dict[str, str]:
        word = "True" if holds else "False"
        if self._since.get(kind, ("", ""))[0] != word:
            self._since[kind] = word, now()
        return {"type": kind, "status": word, "lastTransitionTime": self._since[kind][1]}
