"""Worker processes: what a job costs that dies, hangs or raises, and how an ingestion survives it."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from loraplane_core.process import alive
from loraplane_gateway.registry.ingestion import dispatcher, worker
from loraplane_gateway.registry.ingestion.processes import JobRaised, WorkerLost, Workers
from loraplane_gateway.registry.state import RegistryState
from loraplane_gateway.settings import RegistrySettings
from tests.gateway.artifacts import write_adapter
from tests.gateway.postgres import Database
from tests.gateway.registry.conftest import Api, dispatching, settings_for
from tests.gateway.registry.jobs import block, divide, suicide, twice

REAL = worker.ingest
URL = "/admin/tenants/acme/adapters/pirate/versions"
BODY = {"source": {"uri": "file:a"}}


@pytest.fixture
def settings(database: Database, tmp_path: Path) -> RegistrySettings:
    return settings_for(database, tmp_path / "registry", ingest_attempts=2)


@pytest.fixture
async def ready(api: Api, state: RegistryState, processes: Workers) -> AsyncIterator[Api]:
    await api.tenant("acme")
    await api.pool()
    write_adapter(state.settings.adapter_root / "a")
    async with dispatching(state, processes):
        yield api


async def test_a_worker_killed_during_a_job_costs_that_job_only(processes: Workers) -> None:
    async with processes.slot() as slot:
        assert await slot.run(twice, 2, 10) == 4
        running = asyncio.create_task(slot.run(block, 60, 60))
        async with asyncio.timeout(10):
            while not (pids := processes.pids()):  # noqa: ASYNC110 - another process's state
                await asyncio.sleep(0.01)
        os.kill(pids[0], signal.SIGKILL)
        with pytest.raises(WorkerLost, match="died"):
            await running
        assert await slot.run(twice, 3, 10) == 6
        with pytest.raises(JobRaised, match="ZeroDivisionError"):
            await slot.run(divide, 0, 10)
        assert await slot.run(twice, 4, 10) == 8


async def test_a_worker_that_hangs_is_ended_at_its_deadline(processes: Workers) -> None:
    async with processes.slot() as slot:
        await slot.run(twice, 1, 10)
        before = processes.pids()
        with pytest.raises(WorkerLost) as lost:
            await slot.run(block, 60, 0.2)
        assert lost.value.timed_out
        assert processes.pids() == []
        assert not alive(before[0])


_OWNER_OF_A_BUSY_WORKER = """
import asyncio
from loraplane_gateway.registry.ingestion.processes import Workers
from tests.gateway.registry.jobs import block, twice

async def main():
    workers = Workers(1)
    async with workers.slot() as slot:
        await slot.run(twice, 1, 30)
        print(workers.pids()[0], flush=True)
        await slot.run(block, 60, 60)

asyncio.run(main())
"""


def test_a_busy_worker_dies_with_its_registry() -> None:
    with subprocess.Popen([sys.executable, "-c", _OWNER_OF_A_BUSY_WORKER], stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        worker = int(owner.stdout.readline())
        owner.kill()
        owner.wait(timeout=10)
        deadline = time.monotonic() + 5
        while alive(worker):
            assert time.monotonic() < deadline, "the worker outlived its registry"
            time.sleep(0.01)


async def test_an_ingestion_that_kills_its_worker_is_tried_again_then_rejected_and_may_be_asked_for_again(
    ready: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatcher, "ingest", suicide)
    key = {"idempotency-key": "k"}
    version = await ready.ok("POST", f"{URL}?wait=20", BODY, headers=key, timeout=30)
    assert (version["state"], version["reason"]) == ("rejected", "internal_error")
    tries = (await ready.call("GET", "/metrics")).text
    assert 'refusals_total{code="internal_error"} 2.0' in tries
    monkeypatch.setattr(dispatcher, "ingest", REAL)
    version = await ready.ok("POST", f"{URL}?wait=20", BODY, headers=key, timeout=30)
    assert (version["version"], version["state"]) == (1, "validated")
