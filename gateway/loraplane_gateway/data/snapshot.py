"""The last good snapshot of the registry: loaded at start, refreshed on notice and by polling.

While Postgres is away the last one serves up to a limit (design §9).
"""

import asyncio
import logging
import time
from collections.abc import Callable

import psycopg
from sqlalchemy.exc import SQLAlchemyError

from loraplane_core.errors import Unavailable
from loraplane_gateway.data.auth import Authenticator
from loraplane_gateway.db.serving import ServingRepository, Snapshot, listening

log = logging.getLogger(__name__)
POLL_SECONDS = 1.0
RETRY_SECONDS = 0.5
REFRESH_SECONDS = 2.0
RETRY_AFTER = 5.0
_AWAY = (SQLAlchemyError, psycopg.Error, OSError, TimeoutError)


class Registry:
    def __init__(
        self,
        repository: ServingRepository,
        authenticator: Authenticator,
        database_url: str,
        *,
        limit: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._repository = repository
        self._authenticator = authenticator
        self._database_url = database_url
        self._limit = limit
        self._clock = clock
        self._snapshot = Snapshot()
        self._confirmed_at: float | None = None
        self._reading = asyncio.Lock()
        self._refreshing: asyncio.Task[None] | None = None

    @property
    def is_loaded(self) -> bool:
        return self._confirmed_at is not None

    @property
    def age(self) -> float:
        """Seconds since Postgres last confirmed the snapshot."""
        return self._clock() - self._confirmed_at if self._confirmed_at is not None else float("inf")

    def current(self) -> Snapshot:
        """Raises Unavailable when there is none, or only one older than the limit."""
        if self.age > self._limit:
            raise Unavailable("The registry cannot be read at the moment.", retry_after=RETRY_AFTER)
        return self._snapshot

    async def refresh(self) -> None:
        """Read what changed now, if Postgres answers soon; otherwise what there is must do."""
        if self._refreshing is None or self._refreshing.done():
            self._refreshing = asyncio.create_task(self._try_sync(), name="refresh the registry snapshot")
        # Waited for, not cancelled: a query on a frozen Postgres could not be cancelled in time.
        await asyncio.wait({self._refreshing}, timeout=REFRESH_SECONDS)

    async def _try_sync(self) -> None:
        try:
            await self._sync()
        except _AWAY:
            log.warning("the registry could not be read again on a withdrawn adapter")

    async def run(self) -> None:
        """Follows Postgres until cancelled."""
        away = False
        while True:
            try:
                async with listening(self._database_url) as changes:
                    if away:
                        self._authenticator.distrust()  # revocations may have been missed
                        log.info("the registry can be read again")
                        away = False
                    while True:
                        await self._sync()
                        await changes.wait(POLL_SECONDS)
            except _AWAY as error:
                if not away:  # transitions only
                    log.warning("the registry cannot be read: %s", type(error).__name__)
                away = True
            await asyncio.sleep(RETRY_SECONDS)

    async def _sync(self) -> None:
        async with self._reading:
            asked_at = self._clock()
            before = self._snapshot
            if not self.is_loaded or await self._repository.cursor() != before.cursor:
                fresh = await self._repository.snapshot()
                if self.is_loaded:
                    self._authenticator.drop_keys(await self._repository.changed_keys(before.cursor))
                    self._authenticator.drop_tenants(before.tenants - fresh.tenants)
                self._snapshot = fresh
                log.info("registry snapshot %d: %d adapters", fresh.cursor, len(fresh.adapters))
            self._confirmed_at = asked_at
