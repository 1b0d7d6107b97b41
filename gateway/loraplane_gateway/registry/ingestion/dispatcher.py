"""Takes queued ingestions, runs each in a worker process, and settles it. One transaction at either end.

Nothing is remembered here: the queue lies in Postgres, a lost lease runs out, so no version can stay
`ingesting` for ever, whatever dies.
"""

import asyncio
import contextlib
import logging
import time

from sqlalchemy.exc import SQLAlchemyError

from loraplane_core.errors import ArtifactRejected
from loraplane_gateway.db.sessions import PLATFORM, Scope, Sessions, transaction
from loraplane_gateway.registry.adapters.repository import AdapterRepository
from loraplane_gateway.registry.feed.hub import Hub
from loraplane_gateway.registry.ingestion.processes import JobRaised, Slot, WorkerLost, Workers
from loraplane_gateway.registry.ingestion.repository import QueueRepository, Taken
from loraplane_gateway.registry.ingestion.service import ACTOR, IngestionService
from loraplane_gateway.registry.ingestion.sources import UPLOAD_SCHEME, written_path
from loraplane_gateway.registry.ingestion.worker import Failed, IngestJob, Outcome, Refused, ingest
from loraplane_gateway.registry.metrics import Metrics
from loraplane_gateway.registry.pools.repository import Pool, PoolRepository
from loraplane_gateway.registry.uploads.files import UploadFiles
from loraplane_gateway.settings import RegistrySettings

#: A lease outlives the wait for a worker, its deadline, its start-up and the transaction that settles it.
LEASE_MARGIN = 120.0
#: Ingestions that are taken or settled while the workers are busy with others.
AHEAD = 1
POLL_SECONDS = 1.0
log = logging.getLogger("loraplane.registry")


class Dispatcher:
    def __init__(
        self,
        *,
        settings: RegistrySettings,
        sessions: Sessions,
        hub: Hub,
        workers: Workers,
        uploads: UploadFiles,
        metrics: Metrics,
    ) -> None:
        self._settings = settings
        self._sessions = sessions
        self._hub = hub
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
            except (SQLAlchemyError, TimeoutError) as error:
                log.warning("the ingestion queue cannot be read yet: %s", type(error).__name__)
                await asyncio.sleep(POLL_SECONDS)

    async def _work(self) -> None:
        while True:
            seen = self._hub.position
            try:
                busy = await self._one()
            except (SQLAlchemyError, TimeoutError) as error:
                log.warning("Postgres did not answer the ingestion queue: %s", type(error).__name__)
                busy = False
            if not busy:
                await self._hub.wait(seen, POLL_SECONDS)

    async def _one(self) -> bool:
        """Run one ingestion if there is one."""
        found = await self._take()
        if found is None:
            return False
        taken, pool = found
        async with self._workers.slot() as slot:
            started = time.monotonic()
            outcome = await self._outcome(slot, taken, pool)
            self._metrics.ingestion(outcome, time.monotonic() - started)
        scope = Scope(taken.tenant)
        async with transaction(self._sessions, scope) as session:
            service = IngestionService(session, scope, ACTOR)
            await service.settle(taken, pool, outcome, max_attempts=self._settings.ingest_attempts)
        return True

    async def _take(self) -> tuple[Taken, Pool] | None:
        async with transaction(self._sessions, PLATFORM) as session:
            taken = await QueueRepository(session, PLATFORM).take(2 * self._settings.ingest_timeout + LEASE_MARGIN)
            if taken is None:
                return None
            pool = await PoolRepository(session).get(taken.pool)
            if pool is None:
                return None
        if taken.state == "pending_base":
            scope = Scope(taken.tenant)
            async with transaction(self._sessions, scope) as session:
                await AdapterRepository(session, scope).set_state(taken.adapter, taken.version, "ingesting")
        return taken, pool

    async def _outcome(self, slot: Slot, taken: Taken, pool: Pool) -> Outcome:
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
            log.warning("ingestion of %s/%s@%d: %s", taken.tenant, taken.adapter, taken.version, error)
            return Failed("deadline_exceeded" if error.timed_out else "internal_error", str(error))
        except JobRaised as error:
            log.error("ingestion of %s/%s@%d raised %s", taken.tenant, taken.adapter, taken.version, error)
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
