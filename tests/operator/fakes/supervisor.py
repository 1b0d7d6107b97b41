"""The local supervisor's socket; its engines are FakeEngines."""

import asyncio
from pathlib import Path

import msgspec

from loraplane_core import credentials
from loraplane_core.identity import PoolRef, ReplicaId
from loraplane_core.wire import encode
from loraplane_core.wire.supervisor import (
    ApplyWorkload,
    DeleteWorkload,
    ListWorkloads,
    ReplicaStatus,
    RestartReplica,
    SupervisorAnswer,
    SupervisorRequest,
    Workload,
    WorkloadStatus,
)
from tests.operator.fakes.engine import FakeEngine


class FakeSupervisor:
    def __init__(self, socket: Path, master: bytes) -> None:
        self._socket = socket
        self._master = master
        self._server: asyncio.Server | None = None
        self._lock = asyncio.Lock()
        self.workloads: dict[PoolRef, Workload] = {}
        self.engines: dict[ReplicaId, FakeEngine] = {}
        self.revisions: dict[ReplicaId, str] = {}
        self.applied: list[Workload] = []
        self._answering: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        self._server = await asyncio.start_unix_server(self._serve, str(self._socket))

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
        await asyncio.gather(*self._answering, return_exceptions=True)
        for engine in self.engines.values():
            await engine.stop()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answering = asyncio.create_task(self._answer(reader, writer))
        self._answering.add(answering)
        answering.add_done_callback(self._answering.discard)
        await answering

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            line = await reader.readline()
            if not line:
                return  # whoever asked was cancelled
            async with self._lock:
                await self._do(msgspec.json.decode(line, type=SupervisorRequest))
            workloads = [self._status(ref) for ref in self.workloads]
            writer.write(encode(SupervisorAnswer(ok=True, workloads=workloads)) + b"\n")
            await writer.drain()
        finally:
            writer.close()

    async def _do(self, request: SupervisorRequest) -> None:
        match request:
            case ApplyWorkload(workload=workload):
                self.applied.append(workload)
                self.workloads[PoolRef(workload.namespace, workload.pool)] = workload
                await self._scale(workload)
            case DeleteWorkload(namespace=namespace, pool=pool):
                gone = self.workloads.pop(PoolRef(namespace, pool), None)
                if gone is not None:
                    await self._scale(msgspec.structs.replace(gone, replicas=0))
            case RestartReplica(namespace=namespace, pool=pool, ordinal=ordinal):
                replica = ReplicaId(namespace, pool, ordinal)
                self.revisions[replica] = self.workloads[PoolRef(namespace, pool)].revision
                await self.engines[replica].restart()
            case ListWorkloads():
                pass

    async def _scale(self, workload: Workload) -> None:
        ref = PoolRef(workload.namespace, workload.pool)
        for replica in [each for each in self.engines if each.pool_ref == ref and each.ordinal >= workload.replicas]:
            await self.engines.pop(replica).stop()
        for ordinal in range(workload.replicas):
            replica = ReplicaId(*ref, ordinal)
            if replica not in self.engines:
                token = credentials.engine_credential(credentials.role_key(self._master, "admin"), ref, 1)
                self.engines[replica] = FakeEngine(replica, token)
                self.revisions[replica] = workload.revision
                await self.engines[replica].start()

    def _status(self, ref: PoolRef) -> WorkloadStatus:
        mine = [replica for replica in self.engines if replica.pool_ref == ref]
        rows = [
            ReplicaStatus(
                ordinal=replica.ordinal,
                pid=1,
                ready=True,
                restarts=0,
                revision=self.revisions[replica],
                admin_port=self.engines[replica].port,
            )
            for replica in sorted(mine)
        ]
        return WorkloadStatus(namespace=ref.namespace, pool=ref.name, replicas=rows)
