"""Tells data gateways at once that keys are revoked. Postgres owns the truth; without Redis they poll."""

import asyncio
import logging
from collections.abc import Iterable

from redis.asyncio import Redis
from redis.exceptions import RedisError

CHANNEL = "loraplane:revocations"
PUBLISH_SECONDS = 1.0
log = logging.getLogger("loraplane.registry")


class Revocations:
    def __init__(self, redis: "Redis | None") -> None:
        self._redis = redis

    async def publish(self, key_ids: Iterable[str]) -> None:
        """Never raises: the revocation itself is committed already."""
        if self._redis is None:
            return
        try:
            async with asyncio.timeout(PUBLISH_SECONDS):
                for key_id in key_ids:
                    await self._redis.publish(CHANNEL, key_id)
        except (RedisError, OSError, TimeoutError) as error:
            log.warning("no revocation notice could be sent (%s); data gateways will find out by polling", error)

    async def close(self) -> None:
        if self._redis is not None:
            await self._redis.aclose()
