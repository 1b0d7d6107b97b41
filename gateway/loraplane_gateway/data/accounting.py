"""Settling: what an answered request used, queued and written in batches, once per request."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from loraplane_gateway.db.engine import LOST, named
from loraplane_gateway.db.serving import UsageEvent

log = logging.getLogger(__name__)
QUEUE_MAX = 50_000
BATCH = 500
FLUSH_SECONDS = 0.5
RETRY_SECONDS = 2.0
CLOSE_SECONDS = 5.0


class UsageStore(Protocol):
    async def add_usage(self, events: Sequence[UsageEvent]) -> None: ...


class UsageLog:
    """A bounded queue: when Postgres is away for long the oldest events go first, and are counted."""

    def __init__(self, store: UsageStore, dropped: Callable[[], None]) -> None:
        self._store = store
        self._dropped = dropped
        self._queue: deque[UsageEvent] = deque()

    def __len__(self) -> int:
        return len(self._queue)

    def add(self, event: UsageEvent) -> None:
        if len(self._queue) >= QUEUE_MAX:
            self._queue.popleft()
            self._dropped()
        self._queue.append(event)

    async def run(self) -> None:
        """Writes until cancelled."""
        failing = False
        while True:
            await asyncio.sleep(RETRY_SECONDS if failing else FLUSH_SECONDS)
            try:
                await self._flush()
            except LOST as error:
                if not failing:
                    log.warning("usage waits for Postgres: %s", named(error))
                failing = True
            else:
                failing = False

    async def close(self) -> None:
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                await self._flush()
        except LOST:
            log.error("%d usage events could not be written", len(self._queue))

    async def _flush(self) -> None:
        while self._queue:
            batch = [self._queue[index] for index in range(min(BATCH, len(self._queue)))]
            await self._store.add_usage(batch)
            # `add` may have dropped old events meanwhile; writing again what was written is harmless.
            written = set(map(id, batch))
            while self._queue and id(self._queue[0]) in written:
                self._queue.popleft()
