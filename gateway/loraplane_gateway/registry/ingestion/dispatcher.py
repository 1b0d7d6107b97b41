"""Takes queued ingestions, runs each in a worker process, and settles it. One transaction at either end.

The queue lies in Postgres. A lease that is lost, with its registry or with an answer of Postgres, is released by the
next start or the next look after an outage; and it runs out, so that no version stays `ingesting` for ever.
"""

import asyncio
import contextlib
import logging
import time

from loraplane_core.errors import ArtifactRejected
from loraplane_gateway.db.engine import AWAY, named
from loraplane_gateway.db.sessions import PLATFORM, Scope, Sessions, transaction
from loraplane_gateway.registry.adapters.repository import AdapterRepository
from loraplane_gateway.registry.ingestion.processes import JobRaised, Slot, WorkerLost, Workers
from loraplane_gateway.registry.ingestion.repository import QueueRepository, Taken
from loraplane_gateway.registry.ingestion.service import ACTOR, DELAY_MAX_SECONDS, IngestionService
from loraplane_gateway.registry.ingestion.sources import UPLOAD_SCHEME, written_path
from loraplane_gateway.registry.ingestion.worker import Failed, IngestJob, Outcome, Refused, ingest
from loraplane_gateway.registry.metrics import Metrics
from loraplane_gateway.registry.pools.repository import Pool
from loraplane_gateway.registry.signals import Signal
from loraplane_gateway.registry.uploads.files import UploadFiles
from loraplane_gateway.settings import RegistrySettings

#: A lease outlives the wait for a worker, its deadline, its start-up and the transaction that settles it.
LEASE_MARGIN = 120.0
#: Ingestions that are taken or settled while the workers are busy with others.
AHEAD = 1
POLL_SECONDS = 1.0
#: Before the end of its lease an ingestion's last try to settle has ended.
SETTLE_MARGIN = 20.0
PAUSE_MAX_SECONDS = 60.0
log = logging.getLogger("loraplane.registry")


class Dispatcher:
    def __init__(
        self,
        *,
        settings: RegistrySettings,
        sessions: Sessions,
        queued: Signal,
        workers: Workers,
        uploads: UploadFiles,
        metrics: Metrics,
    ) -> None:
        self._settings = settings
        self._sessions = sessions
        self._queued = queued
        self._looking = asyncio.Lock()
        self._emptied_at: int | None = None  # the queue's position at which there was nothing left
        self._held: dict[str, float] = {}  # what was taken and is not settled, and until when it is ours
        self._doubt = False  # Postgres was away: something may be leased that is not held
        self._workers = workers
        self._uploads = uploads
        self._metrics = metrics

    async def run(self) -> None:
        """Until cancelled. Each task takes the next ingestion when it is free; no worker waits for Postgres."""
        await self._recover()
        async with asyncio.TaskGroup() as group:
            for _ in range(self._workers.size + AHEAD):
                group.create_task(self._work())

    async def _recover(self) -> None:
        while True:
            try:
                async with transaction(self._sessions, PLATFORM) as session:
                    await QueueRepository(session, PLATFORM).release_all()
                return
            except AWAY as error:
                log.warning("the ingestion queue cannot be read yet: %s", named(error))
                await asyncio.sleep(POLL_SECONDS)

    async def _work(self) -> None:
        pause = POLL_SECONDS
        while True:
            try:
                taken, pool = await self._next()
                try:
                    await self._settle(taken, pool, await self._outcome(taken, pool))
                finally:
                    self._held.pop(str(taken), None)
                pause = POLL_SECONDS
            except AWAY as error:
                self._doubt = True
                log.warning("Postgres did not answer the ingestion queue: %s", named(error))
                await asyncio.sleep(POLL_SECONDS)
            except Exception:
                # A defect, which the other tasks and the rest of the registry should survive; never a silent one.
                self._doubt = True
                self._metrics.queue_errors.inc()
                log.exception("the ingestion queue failed; it is tried again in %.0f s", pause)
                await asyncio.sleep(pause)
                pause = min(2 * pause, PAUSE_MAX_SECONDS)

    async def _next(self) -> tuple[Taken, Pool]:
        """Waits for an ingestion. One task looks at a time, and seldom in vain: each look costs Postgres something."""
        async with self._looking:
            while True:
                if self._emptied_at is not None:
                    await self._queued.wait(self._emptied_at, POLL_SECONDS)
                seen, self._emptied_at = self._queued.position, None
                found = await self._take()
                if found is None or not found[0].more:
                    self._emptied_at = seen
                if found is not None:
                    return found

    async def _settle(self, taken: Taken, pool: Pool, outcome: Outcome) -> None:
        """As soon as Postgres is there, for as long as nobody else may take it."""
        try:
            await self._write_soon(taken, pool, outcome)
        except AWAY:
            raise
        except Exception:
            self._metrics.queue_errors.inc()
            log.exception("what was found of %s cannot be stored", taken)
            # What can be: after as many tries as any failure gets, the version is rejected.
            failed = Failed("internal_error", "what was found cannot be stored; see the log")
            await self._write_soon(taken, pool, failed)

    async def _write_soon(self, taken: Taken, pool: Pool, outcome: Outcome) -> None:
        """Tries again while Postgres is away. Raises one of AWAY when the lease ends: it is then taken again."""
        until = self._held[str(taken)] - SETTLE_MARGIN
        while True:
            try:
                return await self._write(taken, pool, outcome)
            except AWAY as error:
                if time.monotonic() + POLL_SECONDS >= until:
                    raise
                log.warning("Postgres did not answer; %s is settled when it does: %s", taken, named(error))
                await asyncio.sleep(POLL_SECONDS)

    async def _write(self, taken: Taken, pool: Pool, outcome: Outcome) -> None:
        scope = Scope(taken.tenant)
        async with transaction(self._sessions, scope) as session:
            service = IngestionService(session, scope, ACTOR)
            await service.settle(taken, pool, outcome, max_attempts=self._settings.ingest_attempts)

    async def _take(self) -> tuple[Taken, Pool] | None:
        lease, (doubt, self._doubt) = 2 * self._settings.ingest_timeout + LEASE_MARGIN, (self._doubt, False)
        async with transaction(self._sessions, PLATFORM) as session:
            queue = QueueRepository(session, PLATFORM)
            if doubt:  # else what was taken without our knowing would wait for the end of its lease
                await queue.release_lost(sorted(self._held), DELAY_MAX_SECONDS)
            taken = await queue.take(lease)
        if taken is None:
            return None
        self._held[str(taken)] = time.monotonic() + lease
        try:
            await self._begun(taken)
        except BaseException:
            del self._held[str(taken)]
            raise
        return taken, Pool(taken.pool, taken.report)

    async def _begun(self, taken: Taken) -> None:
        if taken.state == "pending_base":
            scope = Scope(taken.tenant)
            async with transaction(self._sessions, scope) as session:
                await AdapterRepository(session, scope).set_state(taken.adapter, taken.version, "ingesting")

    async def _outcome(self, taken: Taken, pool: Pool) -> Outcome:
        async with self._workers.slot() as slot:
            started = time.monotonic()
            outcome = await self._checked(slot, taken, pool)
            self._metrics.ingestion(outcome, time.monotonic() - started)
        return outcome

    async def _checked(self, slot: Slot, taken: Taken, pool: Pool) -> Outcome:
        if taken.attempts > self._settings.ingest_attempts:
            # It was taken often enough and never settled: whatever dies of it must not die for ever.
            return Failed("internal_error", f"given up after {self._settings.ingest_attempts} tries")
        if not pool.allows(taken.tenant):
            return Refused("pool_not_allowed", f"the pool {pool.ref} does not admit the tenant {taken.tenant!r}")
        if taken.base_model and not pool.is_called(taken.base_model):
            return Refused(
                "base_model_mismatch",
                f"the pool {pool.ref} serves {pool.report.base_model!r}, not {taken.base_model!r}",
            )
        try:
            job = self._job(taken, pool)
        except ArtifactRejected as error:
            return Refused(error.code, error.message)
        try:
            return await slot.run(ingest, job, self._settings.ingest_timeout)
        except WorkerLost as error:
            log.warning("ingestion of %s: %s", taken, error)
            return Failed("deadline_exceeded" if error.timed_out else "internal_error", str(error))
        except JobRaised as error:
            log.error("ingestion of %s raised %s", taken, error)
            return Failed("internal_error", "the check of the artifact failed; the log has the details")

    def _job(self, taken: Taken, pool: Pool) -> IngestJob:
        if taken.source.startswith(UPLOAD_SCHEME):
            root, path = self._uploads.source(taken.tenant, taken.source.removeprefix(UPLOAD_SCHEME))
        else:
            root, path = self._settings.adapter_root, written_path(taken.source)
        return IngestJob(
            root=root,
            path=path,
            store=self._settings.store_dir,
            base_model=pool.report.base_model,
            aliases=tuple(pool.report.aliases),
            base_config=pool.report.config,
            max_rank=pool.report.max_rank,
            max_bytes=self._settings.max_artifact,
            expected_digest=taken.expected_digest,
            expected_rank=taken.rank if taken.verify and taken.rank else None,
        )


async def cancelled(task: "asyncio.Task[None]") -> None:
    """End a background task and wait until it has ended."""
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
