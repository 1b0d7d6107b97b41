"""Notices of revoked keys: the channel `loraplane:revocations` carries key ids, one per message."""

import asyncio
import logging
import time
from collections.abc import Callable

from redis.asyncio import Redis
from redis.exceptions import RedisError

from loraplane_gateway.limits.redis import connect

log = logging.getLogger(__name__)
CHANNEL = "loraplane:revocations"
PING_SECONDS = 1.0
SILENCE_SECONDS = 3.0
RETRY_SECONDS = 0.5


class Revocations:
    """`revoked` is called with a key id; `gap` after every time in which notices may have been missed."""

    def __init__(self, url: str, revoked: Callable[[str], None], gap: Callable[[], None]) -> None:
        self._url = url
        self._revoked = revoked
        self._gap = gap
        self.subscribed = False

    async def run(self) -> None:
        """Listens until cancelled."""
        complained = False
        while True:
            client = connect(self._url, socket_timeout=None)
            try:
                await self._listen(client)
            except (RedisError, OSError, TimeoutError) as error:
                if self.subscribed or not complained:
                    log.warning("no revocation notices: %s", str(error) or type(error).__name__)
                    complained = True
            finally:
                self.subscribed = False
                await client.aclose()
            await asyncio.sleep(RETRY_SECONDS)

    async def _listen(self, client: Redis) -> None:
        async with client.pubsub() as channel:
            async with asyncio.timeout(SILENCE_SECONDS):
                await channel.subscribe(CHANNEL)
            heard_at = time.monotonic()
            while time.monotonic() - heard_at < SILENCE_SECONDS:
                async with asyncio.timeout(SILENCE_SECONDS):
                    message = await channel.get_message(timeout=PING_SECONDS)
                    if message is None:
                        await channel.ping()
                        continue
                heard_at = time.monotonic()
                if message["type"] == "subscribe":
                    self.subscribed = True
                    self._gap()
                elif message["type"] == "message":
                    self._revoked(message["data"].decode("utf-8", "replace"))
            raise TimeoutError("Redis went silent")
