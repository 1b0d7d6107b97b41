"""The shared in-flight ledger (G70): each gateway writes its counts, and reads those of the others.

`loraplane:inflight:<gateway>` holds one gateway's counts as JSON and expires by itself;
`loraplane:gateways` lists the gateways, so that nobody scans. Written on change at most every 100 ms.
"""

import asyncio
import json
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping

from redis.asyncio import Redis

from loraplane_gateway.limits.redis import RedisAway, RedisPort

log = logging.getLogger(__name__)
INDEX = "loraplane:gateways"
PREFIX = "loraplane:inflight:"
MIN_SECONDS, MAX_SECONDS = 0.1, 1.0
ENTRY_SECONDS = 3.0
INDEX_SECONDS = 60


class Ledger:
    def __init__(
        self,
        redis: RedisPort,
        gateway: str,
        own: Callable[[], Mapping[str, int]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._redis = redis
        self._gateway = gateway
        self._own = own
        self._clock = clock
        self._others: Counter[str] = Counter()
        self._read_at = float("-inf")
        self._gateways = 1
        self._dirty = asyncio.Event()

    def others(self, replica: str) -> float:
        """What the other gateways have in flight there. Without Redis: as much each as this one has."""
        if self._clock() - self._read_at <= ENTRY_SECONDS:
            return self._others[replica]
        return self._own().get(replica, 0) * (self._gateways - 1)

    def changed(self) -> None:
        self._dirty.set()

    async def run(self) -> None:
        """Exchanges counts until cancelled."""
        while True:
            self._dirty.clear()
            try:
                await self.exchange()
            except RedisAway:
                log.debug("the ledger was not exchanged")
            await asyncio.sleep(MIN_SECONDS)
            try:
                async with asyncio.timeout(MAX_SECONDS - MIN_SECONDS):
                    await self._dirty.wait()
            except TimeoutError:
                continue

    async def exchange(self) -> None:
        """Write ours, read theirs. Raises RedisAway."""
        entries = await self._redis.call(self._swap)
        total: Counter[str] = Counter()
        for entry in entries:
            total.update(_counts(entry))
        self._others, self._gateways, self._read_at = total, len(entries) + 1, self._clock()

    async def _swap(self, redis: Redis) -> list[bytes]:
        now = time.time()
        async with redis.pipeline(transaction=False) as pipe:
            pipe.set(PREFIX + self._gateway, json.dumps(self._own()), px=int(ENTRY_SECONDS * 1000))
            pipe.zadd(INDEX, {self._gateway: now})
            pipe.zremrangebyscore(INDEX, "-inf", now - INDEX_SECONDS)
            pipe.expire(INDEX, INDEX_SECONDS)
            pipe.zrange(INDEX, 0, -1)
            names = (await pipe.execute())[-1]
        others = [PREFIX + name.decode() for name in names if name.decode() != self._gateway]
        return [entry for entry in await redis.mget(others) if isinstance(entry, bytes)] if others else []


def _counts(entry: bytes) -> dict[str, int]:
    try:
        value = json.loads(entry)
        return {str(key): int(count) for key, count in value.items() if int(count) > 0}
    except (ValueError, TypeError, AttributeError):
        return {}
