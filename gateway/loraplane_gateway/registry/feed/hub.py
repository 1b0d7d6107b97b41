"""Wakes whoever waits for changes: LISTEN on one connection, and a poll for when that connection is lost."""

import asyncio
import contextlib
import logging

import psycopg

from loraplane_gateway.db.engine import CONNECT_SECONDS

CHANNEL = "loraplane_changes"
RETRY_SECONDS = 1.0
#: How long one wait on the listening connection lasts before it is checked.
LISTEN_SECONDS = 30.0
log = logging.getLogger("loraplane.registry")


class Hub:
    """Carries no changes, only the news that there are some; readers ask Postgres, which has them in order."""

    def __init__(self, database_url: str) -> None:
        self._url = database_url
        self._changed = asyncio.Event()
        self.position = 0
        self.closed = False

    async def wait(self, seen: int, seconds: float) -> None:
        """Returns when `position` differs from `seen`, the hub is closed, or the time is over."""
        if self.position != seen or self.closed:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._changed.wait()

    def close(self) -> None:
        """Readers end; nobody waits any more."""
        self.closed = True
        self._wake()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            try:
                await self._listen()
            except (psycopg.Error, OSError) as error:
                log.warning("no notices from Postgres (%s); readers poll", type(error).__name__)
            await asyncio.sleep(RETRY_SECONDS)

    async def _listen(self) -> None:
        connection = await psycopg.AsyncConnection.connect(
            self._url, autocommit=True, connect_timeout=CONNECT_SECONDS, application_name="loraplane-registry-listen"
        )
        async with connection:
            await connection.execute(f"LISTEN {CHANNEL}")
            self._wake()  # something may have happened before
            while True:
                async for _ in connection.notifies(timeout=LISTEN_SECONDS, stop_after=1):
                    self._wake()
                if connection.closed:
                    return
                async with asyncio.timeout(CONNECT_SECONDS):
                    await connection.execute("SELECT 1")

    def _wake(self) -> None:
        self.position += 1
        self._changed.set()
        # Those who wait have been scheduled by set(); who comes later compares positions.
        self._changed = asyncio.Event()
