"""Wakes whoever waits for changes: LISTEN on one connection, and a poll for when that connection is lost."""

import asyncio
import logging

import psycopg

from loraplane_gateway.db.engine import CONNECT_SECONDS, LOST, named
from loraplane_gateway.registry.signals import Signal

CHANNEL = "loraplane_changes"
RETRY_SECONDS = 1.0
#: How long one wait on the listening connection lasts before it is checked.
LISTEN_SECONDS = 30.0
log = logging.getLogger("loraplane.registry")


class Hub(Signal):
    def __init__(self, database_url: str) -> None:
        super().__init__()
        self._url = database_url
        self.closed = False

    async def wait(self, seen: int, seconds: float) -> None:
        """As Signal's; returns at once when the hub is closed."""
        if not self.closed:
            await super().wait(seen, seconds)

    def close(self) -> None:
        """Readers end; nobody waits any more."""
        self.closed = True
        self.wake()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            try:
                await self._listen()
            except LOST as error:
                log.warning("no notices from Postgres (%s); readers poll", named(error))
            await asyncio.sleep(RETRY_SECONDS)

    async def _listen(self) -> None:
        connection = await psycopg.AsyncConnection.connect(
            self._url, autocommit=True, connect_timeout=CONNECT_SECONDS, application_name="loraplane-registry-listen"
        )
        async with connection:
            await connection.execute(f"LISTEN {CHANNEL}")
            self.wake()  # something may have happened before
            while True:
                async for _ in connection.notifies(timeout=LISTEN_SECONDS, stop_after=1):
                    self.wake()
                if connection.closed:
                    return
                async with asyncio.timeout(CONNECT_SECONDS):
                    await connection.execute("SELECT 1")
