"""The Cluster port on one machine: a folder of YAML, JSON files for state, the supervisor for engines."""

import asyncio
import json
import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from loraplane_core.errors import LoraplaneError
from loraplane_core.identity import PoolRef, ReplicaId
from loraplane_core.resources import uris
from loraplane_core.resources.reasons import Reason
from loraplane_core.wire.supervisor import (
    ApplyWorkload,
    DeleteWorkload,
    EngineCredentials,
    ListWorkloads,
    ReplicaStatus,
    RestartReplica,
    Workload,
    WorkloadStatus,
)
from loraplane_operator.actions import Note, ObjectRef, WorkloadSpec
from loraplane_operator.cluster.events import EventLog
from loraplane_operator.cluster.folder import Folder, Problem
from loraplane_operator.cluster.port import Observation
from loraplane_operator.cluster.store import Store, replace_file
from loraplane_operator.cluster.supervisor import SupervisorClient
from loraplane_operator.plan.conditions import rfc3339
from loraplane_operator.words import BaseLocation, PoolObject, Replica

log = logging.getLogger(__name__)

#: What a replica that is simply starting or stopping says of itself.
_USUAL = frozenset({"waiting", "starting", "stopping", "stopped"})
#: An edit must be acted on within 2 s: two scans and a pass.
POLL_SECONDS = 0.3


class LocalCluster:
    """`state_dir` is written by this process alone: objects/, events.jsonl, problems.json."""

    def __init__(
        self,
        *,
        folder: Path,
        state_dir: Path,
        supervisor_socket: Path,
        model_root: Path,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._clock = clock
        self._state_dir = state_dir
        self._model_root = model_root
        self._folder = Folder(folder)
        self._store = Store(state_dir / "objects", clock)
        self._events = EventLog(state_dir / "events.jsonl")
        self._supervisor = SupervisorClient(supervisor_socket)
        self._problems: list[Problem] | None = None
        self._scanned = False
        self._workloads: dict[PoolRef, tuple[Replica, ...]] | None = None
        self._bases: dict[PoolRef, BaseLocation] = {}
        self._answered = True
        self._wake: Callable[[], None] = lambda: None
        self._returned: Callable[[], None] = lambda: None

    def subscribe(self, wake: Callable[[], None], returned: Callable[[], None] = lambda: None) -> None:
        self._wake, self._returned = wake, returned

    async def run(self) -> None:
        while True:
            try:
                self.scan()
            except OSError:
                log.exception("the state folder cannot be written; trying again")
            await self.refresh()
            await asyncio.sleep(POLL_SECONDS)

    def scan(self) -> None:
        scan = self._folder.scan()
        changed, refused = self._store.merge(scan)
        self._tell([*scan.problems, *refused])
        bases = {ref: locate_base(pool, self._model_root) for ref, pool in self._store.pools().items()}
        if changed or not self._scanned or bases != self._bases:
            self._bases = bases
            self._wake()
        self._scanned = self._scanned or scan.complete

    async def refresh(self) -> None:
        """Ask the supervisor; while it does not answer the last view stays, and engines speak for themselves."""
        try:
            answer = await self._supervisor.ask(ListWorkloads())
        except LoraplaneError as error:
            log.warning("no answer from the supervisor", extra={"error": error.message})
            self._answered = False
            return
        if not self._answered:
            self._answered = True
            self._returned()
        workloads = {PoolRef(each.namespace, each.pool): _replicas(each) for each in answer.workloads}
        if workloads != self._workloads:
            self._workloads = workloads
            self._wake()

    async def observe(self) -> Observation | None:
        if not self._scanned:
            return None
        pools = self._store.pools()
        return Observation(pools, self._store.adapters(), self._bases, self._workloads)

    async def apply(self, spec: WorkloadSpec, credentials: EngineCredentials) -> None:
        workload = Workload(
            namespace=spec.pool.namespace,
            pool=spec.pool.name,
            replicas=spec.replicas,
            engine=dict(spec.engine),
            credentials=credentials,
            revision=spec.revision,
        )
        await self._supervisor.ask(ApplyWorkload(workload=workload))
        await self.refresh()

    async def restart(self, pool: PoolRef, ordinal: int) -> None:
        await self._supervisor.ask(RestartReplica(namespace=pool.namespace, pool=pool.name, ordinal=ordinal))
        await self.refresh()

    async def delete(self, pool: PoolRef) -> None:
        await self._supervisor.ask(DeleteWorkload(namespace=pool.namespace, pool=pool.name))
        await self.refresh()

    async def patch_status(self, ref: ObjectRef, uid: str, status: Mapping[str, Any]) -> None:
        self._store.set_status(ref, uid, status)

    async def set_finalizer(self, ref: ObjectRef, uid: str, present: bool) -> None:
        self._store.set_finalizer(ref, uid, present)
        if not present:
            self.scan()  # one of the same name may be waiting in the folder

    async def emit(self, note: Note) -> None:
        self._events.add(note, rfc3339(self._clock()))

    def _tell(self, problems: list[Problem]) -> None:
        """problems.json holds what is in the folder and not in force; a new one is also logged."""
        if problems == self._problems:
            return
        for problem in problems:
            if problem not in (self._problems or []):
                log.warning("a document is not in force", extra={"path": problem.path, "error": problem.message})
        rows = [{"path": problem.path, "message": problem.message} for problem in problems]
        replace_file(self._state_dir / "problems.json", json.dumps(rows, indent=2) + "\n")
        self._problems = problems


def locate_base(pool: PoolObject, root: Path) -> BaseLocation:
    """The folder of a pool's base, which must exist and, links followed, lie below `root`."""
    try:
        claim, path = uris.base_location(pool.base_uri)
    except ValueError as error:
        return BaseLocation(reason=Reason.BASE_NOT_FOUND, message=str(error))
    if claim is not None:
        return BaseLocation(
            reason=Reason.BASE_NOT_FOUND, message="pvc:// bases exist only on Kubernetes; use file:PATH"
        )
    top = root.resolve()
    folder = (top / path).resolve()
    if not folder.is_relative_to(top):
        return BaseLocation(reason=Reason.SOURCE_NOT_ALLOWED, message=f"{pool.base_uri} leads out of the model root")
    if not (folder / "config.json").is_file():
        return BaseLocation(reason=Reason.BASE_NOT_FOUND, message=f"{folder} holds no config.json")
    return BaseLocation(path=str(folder))


def _replicas(status: WorkloadStatus) -> tuple[Replica, ...]:
    return tuple(_replica(status, each) for each in sorted(status.replicas, key=lambda each: each.ordinal))


def _replica(status: WorkloadStatus, each: ReplicaStatus) -> Replica:
    return Replica(
        id=ReplicaId(status.namespace, status.pool, each.ordinal),
        ready=each.ready,
        running=each.pid != 0,
        terminating=each.terminating,
        epoch=each.epoch,
        revision=each.revision,
        address=each.address,
        admin_port=each.admin_port,
        restarts=each.restarts,
        message="" if each.message in _USUAL else each.message,
    )
