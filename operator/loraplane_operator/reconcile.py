"""The loop: wait for news -> observe -> plan -> execute. Event-driven; a timer only serves what time decides."""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable

import httpx

from loraplane_core import credentials
from loraplane_core.labels import ADAPTER_KIND, POOL_KIND
from loraplane_operator import faults, metrics
from loraplane_operator.cluster.port import Cluster
from loraplane_operator.engines.fleet import Fleet
from loraplane_operator.execute import Executor
from loraplane_operator.faults import Fault
from loraplane_operator.lanes import CLUSTER_GATES, gate
from loraplane_operator.notebook import Notebook
from loraplane_operator.plan import plan
from loraplane_operator.registry.client import RegistryClient
from loraplane_operator.registry.feed import Feed
from loraplane_operator.subjects import Subjects
from loraplane_operator.words import Replica, World

log = logging.getLogger(__name__)

#: Volatile numbers in statuses, and anything whose news was lost, are looked at this often in quiet.
RESYNC_SECONDS = 30.0
#: News that comes in bursts is planned together: for this long, or for some times as long as the last pass took,
#: so that planning leaves most of the processor to carrying out.
GATHER_SECONDS = 0.02
GATHER_PASSES = 4.0
#: However long a pass took, healing must not wait for longer than this.
GATHER_MAX_SECONDS = 0.8
#: After a stop, what is being carried out may finish within this.
GRACE_SECONDS = 10.0
IDLE_CONNECTIONS = 20
_BROKEN_SECONDS = 1.0


class Wakeup:
    """News, coalesced: any number of `set` calls while nobody waits are one."""

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self._since = 0.0  # of the oldest news that nobody took up

    def set(self) -> None:
        if not self._event.is_set():
            self._since = time.monotonic()
            self._event.set()

    def age_seconds(self) -> float:
        return time.monotonic() - self._since if self._event.is_set() else 0.0

    async def wait(self, seconds: float, gather: float = GATHER_SECONDS) -> None:
        """For news, at most `seconds`, and then for what comes within `gather` seconds of it."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, seconds)):
                await self._event.wait()
        await asyncio.sleep(gather)
        self._event.clear()


class Reconciler:
    """One per process, whatever the cluster is. `run` ends after `stop`; it raises when a watcher broke."""

    def __init__(
        self,
        cluster: Cluster,
        *,
        registry_url: str,
        master: bytes,
        artifacts_url: str,
        clock: Callable[[], float] = time.time,
        fault: Fault = faults.none,
    ) -> None:
        self._cluster = cluster
        self._clock = clock
        self._fault = fault
        self._artifacts_url = artifacts_url
        self._wakeup = Wakeup()
        self._stopping = False
        self._broken: Exception | None = None
        self._notebook = Notebook()
        self._subjects = Subjects()
        # Each request looks at all idle connections: a few are enough, since lanes bound what runs at a time.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=IDLE_CONNECTIONS)
        self._http = httpx.AsyncClient(trust_env=False, limits=limits)
        client = RegistryClient(self._http, registry_url, credentials.operator_credential(master))
        admin = credentials.role_key(master, "admin")
        self._fleet = Fleet(self._http, lambda replica: _token(admin, replica), self.wake)
        self._feed = Feed(
            client,
            wake=self.wake,
            on_connect=self._notebook.reconnected,
            on_tenant=self._notebook.tenant_changed,
        )
        self._executor = Executor(
            cluster=cluster,
            registry=client,
            fleet=self._fleet,
            notebook=self._notebook,
            master=master,
            wake=self.wake,
            clock=clock,
            fault=fault,
            subjects=self._subjects,
        )
        self.passed_at = 0.0  # monotonic time of the last whole pass; 0 before the first
        self.turned_at = time.monotonic()  # of the last turn of the loop, whatever came of it
        metrics.QUEUE_AGE.labels("news").set_function(self._wakeup.age_seconds)
        metrics.QUEUE_AGE.labels("actions").set_function(self._executor.oldest_seconds)

    def wake(self) -> None:
        self._wakeup.set()

    def stop(self) -> None:
        self._stopping = True
        self.wake()

    async def run(self) -> None:
        self._cluster.subscribe(self.wake, self._cluster_returned)
        async with self._watching():
            while not self._stopping:
                started = self.turned_at = time.monotonic()
                due = await self._pass()
                took = time.monotonic() - started
                wait = RESYNC_SECONDS if due is None else due - self._clock()
                gather = min(max(GATHER_PASSES * took, GATHER_SECONDS), GATHER_MAX_SECONDS)
                await self._wakeup.wait(min(wait, RESYNC_SECONDS), gather)
        if self._broken is not None:
            raise self._broken

    @contextlib.asynccontextmanager
    async def _watching(self) -> AsyncIterator[None]:
        watchers = [
            asyncio.create_task(self._cluster.run(), name="cluster"),
            asyncio.create_task(self._feed.run(), name="feed"),
        ]
        for watcher in watchers:
            watcher.add_done_callback(self.watcher_ended)
        try:
            yield
        finally:
            for watcher in watchers:
                watcher.cancel()
            await asyncio.gather(*watchers, return_exceptions=True)
            # A watcher that broke leaves actions alone, too: each is whole in itself.
            await self._executor.close(GRACE_SECONDS)
            await self._fleet.close()
            await self._http.aclose()

    def watcher_ended(self, task: asyncio.Task[None]) -> None:
        """Watchers run as long as the loop; one that ends before is a defect that must not go unseen."""
        if not task.cancelled():
            log.critical("a watcher stopped", extra={"watcher": task.get_name()}, exc_info=task.exception())
            self._broken = RuntimeError(f"{task.get_name()} stopped watching")
            self.stop()

    async def _pass(self) -> float | None:
        """One pass; returns when time alone makes the next one necessary."""
        try:
            with metrics.PHASE_SECONDS.labels("observe").time():
                world = await self._observe()
            if world is None:
                return None
            self._fault("after/observe")
            with metrics.PHASE_SECONDS.labels("plan").time():
                planned = plan(world)
            for ref, error in planned.broken:
                log.error("planning broke", extra={"phase": "plan", "object": str(ref)}, exc_info=error)
            self._notebook.planned(planned, world.now)
            self._fault("after/plan")
            with metrics.PHASE_SECONDS.labels("submit").time():
                due = self._executor.submit(planned.actions)
            self._fault("after/submit")
        except Exception:
            log.exception("a reconcile pass broke")
            metrics.PASSES.labels("broken").inc()
            return self._clock() + _BROKEN_SECONDS
        metrics.PASSES.labels("ok").inc()
        self.passed_at = time.monotonic()
        return min((at for at in (due, planned.due_at) if at is not None), default=None)

    def _cluster_returned(self) -> None:
        """What failed meanwhile is tried again now, not when a back-off ends that grew with the absence. Whatever the
        failure: an API server that comes back refuses at first. What fails for the absence of an engine or of the
        registry is not planned then, and so forgotten by itself."""
        failures = self._notebook.failures
        forgiven = [action for action in failures if gate(action) in CLUSTER_GATES]
        for action in forgiven:
            del failures[action]
        if forgiven:
            self.wake()

    async def _observe(self) -> World | None:
        seen = await self._cluster.observe()
        if seen is None:
            return None
        if seen.workloads is not None:
            self._fleet.sync(replica for replicas in seen.workloads.values() for replica in replicas)
        engines, registry = self._fleet.engines(), self._feed.view()
        self._subjects.learn(seen.pools.values(), seen.adapters)
        metas = [obj.meta for obj in seen.adapters] + [pool.meta for pool in seen.pools.values()]
        uids = frozenset([meta.uid for meta in metas] + list(seen.unreadable.values()))
        self._notebook.learn(engines.values(), uids, registry, seen.pools)
        metrics.OBJECTS.labels(POOL_KIND).set(len(seen.pools))
        metrics.OBJECTS.labels(ADAPTER_KIND).set(len(seen.adapters))
        metrics.ENGINES.set(len(engines))
        return World(
            now=self._clock(),
            pools=seen.pools,
            adapters=seen.adapters,
            bases=seen.bases,
            workloads=seen.workloads,
            engines=engines,
            registry=registry,
            memory=self._notebook.view(),
            unreadable=seen.unreadable,
            namespaces=seen.namespaces,
            pool_namespaces=seen.pool_namespaces,
            artifacts_url=self._artifacts_url,
            suspects=seen.suspects,
        )


def _token(admin_key: bytes, replica: Replica) -> str:
    return credentials.engine_credential(admin_key, replica.id.pool_ref, replica.epoch)
