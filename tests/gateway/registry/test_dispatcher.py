"""The dispatcher's own troubles: an outage waits, a defect is told and bounded, and idleness costs next to nothing."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from psycopg import errors

from loraplane_gateway.db.sessions import PLATFORM, transaction
from loraplane_gateway.registry.ingestion.repository import QueueRepository, Taken
from loraplane_gateway.registry.ingestion.service import IngestionService
from loraplane_gateway.registry.ingestion.worker import Accepted, Outcome
from loraplane_gateway.registry.pools.repository import Pool
from loraplane_gateway.registry.state import RegistryState
from tests.gateway.artifacts import write_adapter
from tests.gateway.registry.conftest import Api, InlineWorkers, dispatching

Take = Callable[[QueueRepository, float], Coroutine[Any, Any, Taken | None]]
OUTAGE = errors.LockNotAvailable()
DEFECT = errors.UndefinedColumn()


def _errors(state: RegistryState) -> float:
    lines = state.metrics.render({}).decode().splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith("loraplane_registry_ingestion_queue_err"))


@pytest.fixture
async def bound(api: Api, state: RegistryState) -> Api:
    await api.tenant("acme", "team")
    await api.pool()
    write_adapter(state.settings.adapter_root / "a")
    return api


@pytest.mark.parametrize(("raised", "said", "traced", "counted"), [
    (OUTAGE, "Postgres did not answer the ingestion queue: LockNotAvailable", False, 0),
    (DEFECT, "the ingestion queue failed", True, 1),
    (KeyError("report"), "the ingestion queue failed", True, 1),
])  # fmt: skip
async def test_only_an_outage_is_called_one_and_a_defect_is_told_with_its_traceback(
    bound: Api,
    state: RegistryState,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    raised: Exception,
    said: str,
    traced: bool,
    counted: int,
) -> None:
    take, failures = QueueRepository.take, [raised]

    async def failing(self: QueueRepository, seconds: float) -> Taken | None:
        if failures:
            raise failures.pop()
        return await take(self, seconds)

    monkeypatch.setattr(QueueRepository, "take", failing)
    async with dispatching(state, InlineWorkers(1)):
        version = await bound.register("acme", "pirate", "a")
    assert version.state == "validated"  # it went on
    told = [record for record in caplog.records if record.getMessage().startswith(said)]
    assert [(record.levelno >= logging.ERROR, record.exc_info is not None) for record in told] == [(traced, traced)]
    assert _errors(state) == counted


async def test_a_defect_that_stays_is_tried_less_and_less_often(
    bound: Api, state: RegistryState, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def failing(self: QueueRepository, seconds: float) -> Taken | None:
        raise DEFECT

    pauses: list[float] = []
    sleep = asyncio.sleep

    async def quick(seconds: float) -> None:
        pauses.append(seconds)
        await sleep(0)

    monkeypatch.setattr(QueueRepository, "take", failing)
    async with dispatching(state, InlineWorkers(1)):
        monkeypatch.setattr("loraplane_gateway.registry.ingestion.dispatcher.asyncio.sleep", quick)
        async with asyncio.timeout(10):
            while len(pauses) < 20:
                await sleep(0.01)
        monkeypatch.undo()
    assert sorted(pauses)[0] == 1.0
    assert max(pauses) == 60.0


async def test_what_cannot_be_stored_ends_as_a_rejected_version_and_not_in_a_loop(
    bound: Api, state: RegistryState, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    settle = IngestionService.settle

    async def failing(self: IngestionService, taken: Taken, pool: Pool, outcome: Outcome, *, max_attempts: int) -> None:
        if isinstance(outcome, Accepted):
            raise DEFECT
        await settle(self, taken, pool, outcome, max_attempts=1)

    monkeypatch.setattr(IngestionService, "settle", failing)
    async with dispatching(state, InlineWorkers(1)):
        version = await bound.register("acme", "pirate", "a")
    assert (version.state, version.reason) == ("rejected", "internal_error")
    assert "acme/pirate@1 cannot be stored" in caplog.text and "UndefinedColumn" in caplog.text
    assert _errors(state) == 1


async def test_what_was_found_while_postgres_was_away_is_stored_as_soon_as_it_is_back(
    bound: Api, state: RegistryState, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not when the lease ends, and not by doing it all again."""
    settle, outages, workers = IngestionService.settle, [OUTAGE, OUTAGE], InlineWorkers(1)

    async def failing(self: IngestionService, taken: Taken, pool: Pool, outcome: Outcome, *, max_attempts: int) -> None:
        if outages:
            raise outages.pop()
        assert taken.attempts == 1
        await settle(self, taken, pool, outcome, max_attempts=max_attempts)

    monkeypatch.setattr(IngestionService, "settle", failing)
    monkeypatch.setattr("loraplane_gateway.registry.ingestion.dispatcher.POLL_SECONDS", 0.05)
    async with dispatching(state, workers):
        version = await bound.register("acme", "pirate", "a")
    assert (version.state, outages) == ("validated", [])


async def test_what_was_taken_without_the_taker_knowing_is_taken_again_at_once(
    bound: Api, state: RegistryState, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Postgres has the lease, and its answer was lost: nobody works on it."""
    take, lost = QueueRepository.take, list[str]()

    async def failing(self: QueueRepository, seconds: float) -> Taken | None:
        if lost:
            return await take(self, seconds)
        async with transaction(state.sessions, PLATFORM) as other:
            taken = await take(QueueRepository(other, PLATFORM), seconds)
        if taken is not None:
            lost.append(str(taken))
            raise OUTAGE
        return None

    monkeypatch.setattr(QueueRepository, "take", failing)
    async with dispatching(state, InlineWorkers(1)):
        version = await bound.register("acme", "pirate", "a")
    assert (version.state, lost) == ("validated", ["acme/pirate@1"])


async def test_changes_that_queue_nothing_do_not_make_it_look(
    bound: Api, state: RegistryState, monkeypatch: pytest.MonkeyPatch
) -> None:
    take, looks = QueueRepository.take, 0

    async def counting(self: QueueRepository, seconds: float) -> Taken | None:
        nonlocal looks
        looks += 1
        return await take(self, seconds)

    monkeypatch.setattr(QueueRepository, "take", counting)
    monkeypatch.setattr("loraplane_gateway.registry.ingestion.dispatcher.POLL_SECONDS", 30)
    async with dispatching(state, InlineWorkers(2)):
        await bound.register("acme", "pirate", "a")
        before = looks
        for number in range(10):
            await bound.tenant(f"t{number}")
        seen = state.hub.position
        await bound.tenant("last")
        await state.hub.wait(seen, 10)
        assert looks == before <= 4
