"""The last good snapshot of the registry: loaded at start, kept up by what the change feed tells, and by polling.

While Postgres is away the last one serves up to a limit (design §9).
"""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Protocol

from loraplane_core.errors import Unavailable
from loraplane_gateway.data.auth import Authenticator
from loraplane_gateway.db.engine import AWAY, LOST, is_unmigrated, named
from loraplane_gateway.db.serving import Snapshot, Update, listening

log = logging.getLogger(__name__)
POLL_SECONDS = 1.0
RETRY_SECONDS = 0.5
REFRESH_SECONDS = 2.0
RETRY_AFTER = 5.0
#: After changes were read the next ones gather for this many times as long as that took, but never longer than
#: the maximum: many at once cost little, and a lone one is seen at once.
GATHER_FACTOR = 10.0
GATHER_MAX_SECONDS = 0.3


class SnapshotSource(Protocol):
    async def snapshot(self) -> Snapshot: ...

    async def update(self, before: Snapshot) -> Update: ...


class Registry:
    def __init__(
        self,
        repository: SnapshotSource,
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
        except AWAY:
            log.warning("the registry could not be read again on a withdrawn adapter")

    async def run(self) -> None:
        """Follows Postgres until cancelled."""
        away = ""  # why; told when it changes
        while True:
            try:
                async with listening(self._database_url) as changes:
                    await self._load()
                    if away:
                        log.info("the registry can be read again")
                        away = ""
                    while True:
                        await changes.wait(POLL_SECONDS)
                        started = self._clock()
                        if await self._sync():
                            await asyncio.sleep(min(GATHER_MAX_SECONDS, GATHER_FACTOR * (self._clock() - started)))
            except Exception as error:
                away = _told(error, away)
            await asyncio.sleep(RETRY_SECONDS)

    async def _load(self) -> None:
        """Everything: notices may have been missed, and this may be another server with another feed."""
        async with self._reading:
            asked_at = self._clock()
            self._take(Update(await self._repository.snapshot(), keys=None))
            self._confirmed_at = asked_at

    async def _sync(self) -> bool:
        """What changed. True when something had."""
        async with self._reading:
            begun_with = self._snapshot
            while True:
                asked_at = self._clock()
                update = await self._repository.update(self._snapshot)
                self._take(update)
                if update.caught_up:
                    break
            self._confirmed_at = asked_at
            return self._snapshot is not begun_with

    def _take(self, update: Update) -> None:
        gone = self._snapshot.tenants - update.snapshot.tenants
        if update.keys is None:
            log.info("registry snapshot %d: %d adapters", update.snapshot.cursor, len(update.snapshot.adapters))
            self._authenticator.distrust()
        elif update.keys:
            self._authenticator.drop_keys(update.keys)
        self._authenticator.drop_tenants(gone)
        self._snapshot = update.snapshot


def _told(error: Exception, before: str) -> str:
    """Raises what is a defect. Of a new installation the gateways are there before the tables are."""
    if is_unmigrated(error):
        away = "its tables are not there yet; `loraplane-gateway migrate` makes them"
    elif isinstance(error, LOST):
        away = named(error)
    else:
        raise error
    if away != before:
        log.warning("the registry cannot be read: %s", away)
    return away
