"""The unix socket on which the operator asks for engines (loraplane_core.wire.supervisor)."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from pathlib import Path

from loraplane_cli.supervisor.workloads import Workloads
from loraplane_core import wire
from loraplane_core.errors import InvalidRequest, LoraplaneError, render
from loraplane_core.identity import PoolRef
from loraplane_core.wire.supervisor import (
    ApplyWorkload,
    DeleteWorkload,
    RestartReplica,
    SupervisorAnswer,
    SupervisorRequest,
)

log = logging.getLogger(__name__)
LINE_BYTES = 1 << 20


@contextlib.asynccontextmanager
async def control_socket(path: Path, workloads: Workloads) -> AsyncIterator[None]:
    """Answer on `path` while the context lasts. Its folder is private, and what is left in it is the caller's."""
    connections: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is not None:
            connections.add(task)
        try:
            await _serve(reader, writer, workloads)
        finally:
            if task is not None:
                connections.discard(task)
            writer.close()

    server = await asyncio.start_unix_server(serve, path, limit=LINE_BYTES)
    try:
        yield
    finally:
        server.close()
        for task in tuple(connections):
            task.cancel()
        await asyncio.gather(*connections, return_exceptions=True)


async def _serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, workloads: Workloads) -> None:
    with contextlib.suppress(ConnectionError):
        while True:
            try:
                line = await reader.readline()
            except ValueError:  # past the limit; what follows can no longer be framed
                writer.write(wire.encode(_refusal(InvalidRequest(f"a request has at most {LINE_BYTES} bytes"))) + b"\n")
                await writer.drain()
                return
            if not line:
                return
            writer.write(wire.encode(answer(line, workloads)) + b"\n")
            await writer.drain()


def answer(line: bytes, workloads: Workloads) -> SupervisorAnswer:
    """Do what one line asks; never raises for what a request holds."""
    try:
        request: SupervisorRequest = wire.decode(line, SupervisorRequest)  # type: ignore[arg-type]
        if isinstance(request, ApplyWorkload):
            workloads.apply(request.workload)
        elif isinstance(request, DeleteWorkload):
            workloads.delete(PoolRef(request.namespace, request.pool))
        elif isinstance(request, RestartReplica):
            workloads.restart(PoolRef(request.namespace, request.pool), request.ordinal)
    except (LoraplaneError, OSError) as error:
        log.warning("refused a request: %s", error)
        return _refusal(error)
    return SupervisorAnswer(ok=True, workloads=workloads.statuses())


def _refusal(error: BaseException) -> SupervisorAnswer:
    return SupervisorAnswer(ok=False, error=render(error)[1]["error"])
