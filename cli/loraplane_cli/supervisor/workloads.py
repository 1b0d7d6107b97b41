"""The engines, as the operator asks for them: this plays the StatefulSet controller and the kubelet.

A new revision never restarts a running engine (OnDelete): it is used at the next start, or when the
operator asks for one. One endpoint file per replica tells the gateway and the operator where it is.
"""

import asyncio
import json
import logging
import os
import shutil
import sys
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from loraplane_cli.supervisor.keeper import Component, Keeper, Phase
from loraplane_cli.supervisor.layout import StateFolder
from loraplane_cli.supervisor.ports import LOOPBACK, PortBook
from loraplane_cli.supervisor.record import RunRecord
from loraplane_cli.supervisor.spec import ProcessSpec
from loraplane_core.errors import NotFound
from loraplane_core.files import write_atomic
from loraplane_core.identity import PoolRef, ReplicaId
from loraplane_core.wire.endpoints import Endpoint, to_slice
from loraplane_core.wire.supervisor import ReplicaStatus, Workload, WorkloadStatus

log = logging.getLogger(__name__)
START_SECONDS = 600.0
DRAIN_SECONDS = 5
STOP_SECONDS = 12.0

Probe = Callable[[], Awaitable[bool]]


@dataclass
class Ports:
    """The three listeners of one replica; chosen anew before each start."""

    data: int = 0
    admin: int = 0
    metrics: int = 0


@dataclass(frozen=True)
class Site:
    """What replicas are made from, the same for all: folders, ports, the engine's command, how to probe one."""

    state: StateFolder
    ports: PortBook
    run: RunRecord
    env: Mapping[str, str]
    probe: Callable[[Ports], Probe]  # of the metrics port
    engine: tuple[str, ...] = (sys.executable, "-m", "loraplane_engine")


class Replica:
    """One engine: its process, its ports, its endpoint file."""

    def __init__(self, site: Site, pool: "Pool", ordinal: int, changed: Callable[[], None]) -> None:
        self.id = ReplicaId(*pool.ref, ordinal)
        self.revision = ""
        self._site = site
        self._pool = pool
        self._epoch = 1
        self._ports = Ports()
        self._published: Endpoint | None = None
        self._report = changed
        self._busy = asyncio.Lock()
        self.removing = False
        name = f"engine-{pool.ref.namespace}-{self.id.pod}"
        component = Component(name, self._make, site.probe(self._ports), start_seconds=START_SECONDS)
        self.keeper = Keeper(component, log=site.state.log(name), run=site.run, changed=self._changed)

    def begin(self) -> None:
        self.keeper.begin()

    async def restart(self) -> None:
        async with self._busy:
            if not self.removing:
                await self.keeper.stop()
                self.keeper.begin()

    async def remove(self, hurry: asyncio.Event | None = None) -> None:
        """Stop it for good; its endpoint goes when the process has gone."""
        self.removing = True
        async with self._busy:
            await self.keeper.stop(hurry=hurry)
        self._site.state.endpoint(self.id).unlink(missing_ok=True)
        self._published = None

    def status(self) -> ReplicaStatus:
        keeper = self.keeper
        return ReplicaStatus(
            ordinal=self.id.ordinal,
            pid=keeper.pid,
            ready=keeper.ready,
            restarts=keeper.restarts,
            revision=self.revision,
            data_port=self._ports.data,
            admin_port=self._ports.admin,
            metrics_port=self._ports.metrics,
            message=keeper.message or ("" if keeper.ready else keeper.phase.value),
            terminating=keeper.phase in (Phase.STOPPING, Phase.STOPPED),
            epoch=self._epoch if self.revision else self._pool.workload.credentials.epoch,
        )

    def _make(self) -> ProcessSpec:
        workload = self._pool.workload
        for kind in ("data", "admin", "metrics"):
            setattr(self._ports, kind, self._site.ports.assign(f"{self.id}/{kind}"))
        self.revision = workload.revision
        self._epoch = workload.credentials.epoch
        return engine_spec(self._site, workload, self.id, self._ports, self._pool.threads())

    def _changed(self) -> None:
        phase = self.keeper.phase
        endpoint = Endpoint(
            replica=self.id,
            address=LOOPBACK,
            data_port=self._ports.data,
            admin_port=self._ports.admin,
            metrics_port=self._ports.metrics,
            ready=self.keeper.ready,
            terminating=phase in (Phase.STOPPING, Phase.STOPPED),
            epoch=self._epoch,
        )
        if endpoint != self._published and phase is not Phase.STOPPED:
            self._publish(endpoint)
        self._report()

    def _publish(self, endpoint: Endpoint) -> None:
        path = self._site.state.endpoint(self.id)
        try:
            write_atomic(path, json.dumps(to_slice(endpoint), indent=1) + "\n", 0o644)
            self._published = endpoint
        except OSError as error:  # written at the next change; routing also watches the engine itself
            log.warning("%s cannot be written: %s", path, error)


class Pool:
    """The replicas of one workload."""

    def __init__(self, workload: Workload, threads: Callable[[], int]) -> None:
        self.workload = workload
        self.threads = threads
        self.replicas: dict[int, Replica] = {}
        self.deleted = False

    @property
    def ref(self) -> PoolRef:
        return PoolRef(self.workload.namespace, self.workload.pool)

    def status(self) -> WorkloadStatus:
        replicas = [self.replicas[ordinal].status() for ordinal in sorted(self.replicas)]
        return WorkloadStatus(namespace=self.workload.namespace, pool=self.workload.pool, replicas=replicas)


class Workloads:
    """All pools. Its methods return at once; processes start and stop in the background."""

    def __init__(self, site: Site, changed: Callable[[], None]) -> None:
        self._site = site
        self._changed = changed
        self._pools: dict[PoolRef, Pool] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def apply(self, workload: Workload) -> None:
        """Run `workload` as it is wished from now on; a running replica keeps its revision."""
        ref = PoolRef(workload.namespace, workload.pool)
        write_atomic(self._site.state.credentials(ref), msgspec.json.encode(workload.credentials))
        pool = self._pools.get(ref)
        if pool is None:
            pool = self._pools[ref] = Pool(workload, self._threads)
        pool.workload, pool.deleted = workload, False
        for ordinal in sorted(pool.replicas, reverse=True):
            if ordinal >= workload.replicas:
                self._remove(pool, ordinal)
        for ordinal in range(workload.replicas):
            if ordinal not in pool.replicas:
                replica = pool.replicas[ordinal] = Replica(self._site, pool, ordinal, self._changed)
                replica.begin()

    def delete(self, ref: PoolRef) -> None:
        pool = self._pools.get(ref)
        if pool is None:
            return
        pool.deleted = True
        pool.workload = msgspec.structs.replace(pool.workload, replicas=0)
        for ordinal in sorted(pool.replicas, reverse=True):
            self._remove(pool, ordinal)
        if not pool.replicas:
            self._pools.pop(ref, None)

    def restart(self, ref: PoolRef, ordinal: int) -> None:
        """Raises NotFound for a replica that does not exist."""
        pool = self._pools.get(ref)
        replica = pool.replicas.get(ordinal) if pool else None
        if replica is None:
            raise NotFound(f"there is no replica {ref}/{ordinal}")
        self._spawn(replica.restart())

    def statuses(self) -> list[WorkloadStatus]:
        return [self._pools[ref].status() for ref in sorted(self._pools)]

    async def stop(self, hurry: asyncio.Event) -> None:
        """Stop all engines side by side; returns when none is left."""
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        replicas = [replica for pool in self._pools.values() for replica in pool.replicas.values()]
        await asyncio.gather(*(replica.remove(hurry) for replica in replicas))
        self._pools.clear()

    def _remove(self, pool: Pool, ordinal: int) -> None:
        replica = pool.replicas[ordinal]
        if not replica.removing:
            replica.removing = True
            self._spawn(self._finish(pool, replica))

    async def _finish(self, pool: Pool, replica: Replica) -> None:
        await replica.remove()
        del pool.replicas[replica.id.ordinal]
        shutil.rmtree(self._site.state.cache(replica.id), ignore_errors=True)
        if replica.id.ordinal < pool.workload.replicas:
            self.apply(pool.workload)  # it was wished again while it was stopping
        elif pool.deleted and not pool.replicas:
            self._pools.pop(pool.ref, None)
            self._site.state.credentials(pool.ref).unlink(missing_ok=True)
        self._changed()

    def _spawn(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _threads(self) -> int:
        total = sum(pool.workload.replicas for pool in self._pools.values())
        return max(1, len(os.sched_getaffinity(0)) // max(1, total))


def engine_spec(site: Site, workload: Workload, replica: ReplicaId, ports: Ports, threads: int) -> ProcessSpec:
    """The command of one engine. The operator's options stand as they are; what only this machine knows is added."""
    options = {"threads": str(threads), "drain-seconds": str(DRAIN_SECONDS), **workload.engine}
    options |= {
        "replica": str(replica),
        "credentials": str(site.state.credentials(replica.pool_ref)),
        "cache-dir": str(_folder(site.state.cache(replica))),
        "host": LOOPBACK,
        "port": str(ports.data),
        "admin-port": str(ports.admin),
        "metrics-port": str(ports.metrics),
    }
    arguments = [part for name, value in sorted(options.items()) for part in (f"--{name}", value)]
    return ProcessSpec(
        name=f"engine {replica}",
        argv=(*site.engine, *arguments),
        env={**site.env, "OMP_NUM_THREADS": options["threads"]},
        cwd=site.state.root,
        stop_seconds=STOP_SECONDS,
    )


def _folder(path: Path) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    return path
