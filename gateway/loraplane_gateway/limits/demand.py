"""Demand per adapter over all gateways: arrivals counted in 10 s buckets, read back as a rate."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping

from redis.asyncio import Redis

from loraplane_gateway.limits.redis import RedisAway, RedisPort

log = logging.getLogger(__name__)
BUCKET_SECONDS = 10
PREFIX = "loraplane:demand:"
FLUSH_SECONDS = 1.0
KEEP_SECONDS = 3 * BUCKET_SECONDS
#: Weight of the newest answer in the mean service time.
ALPHA = 0.1


class Demand:
    """Without Redis the rate is this gateway's own."""

    def __init__(self, redis: RedisPort | None, clock: Callable[[], float] = time.time) -> None:
        self._redis = redis
        self._clock = clock
        self._unsent: Counter[str] = Counter()
        self._own: dict[int, Counter[str]] = {}
        self._rates: Mapping[str, float] = {}
        self._service = 0.0

    def arrived(self, adapter: str) -> None:
        self._unsent[adapter] += 1
        self._own.setdefault(self._bucket(), Counter())[adapter] += 1

    def served(self, seconds: float) -> None:
        self._service += (seconds - self._service) * (ALPHA if self._service else 1.0)

    def concurrency(self, adapter: str) -> float:
        """Requests of the adapter in flight everywhere, by Little's law: rate times mean service time."""
        return self._rates.get(adapter, 0.0) * self._service

    async def run(self) -> None:
        """Flushes and reads until cancelled."""
        while True:
            await self.exchange()
            await asyncio.sleep(FLUSH_SECONDS)

    async def exchange(self) -> None:
        bucket, unsent = self._bucket(), self._unsent
        self._own = {number: counts for number, counts in self._own.items() if number >= bucket - 1}
        current, previous = self._own.get(bucket, Counter()), self._own.get(bucket - 1, Counter())
        self._unsent = Counter()
        if self._redis is not None:
            try:
                current, previous = await self._redis.call(lambda redis: _swap(redis, bucket, unsent))
            except RedisAway:
                log.debug("demand was not exchanged")
        self._rates = _rates(current, previous, self._clock() / BUCKET_SECONDS - bucket)

    def _bucket(self) -> int:
        return int(self._clock() // BUCKET_SECONDS)


async def _swap(redis: Redis, bucket: int, counts: Mapping[str, int]) -> tuple[Counter[str], Counter[str]]:
    now, before = f"{PREFIX}{bucket}", f"{PREFIX}{bucket - 1}"
    async with redis.pipeline(transaction=False) as pipe:
        for adapter, count in counts.items():
            pipe.hincrby(now, adapter, count)
        pipe.expire(now, KEEP_SECONDS)
        pipe.hgetall(now)
        pipe.hgetall(before)
        *_, current, previous = await pipe.execute()
    return _counter(current), _counter(previous)


def _counter(raw: Mapping[bytes, bytes]) -> Counter[str]:
    return Counter({key.decode(): int(value) for key, value in raw.items()})


def _rates(current: Mapping[str, int], previous: Mapping[str, int], elapsed: float) -> dict[str, float]:
    """Arrivals per second over the last ten: the running bucket, and the part of the last one still inside."""
    share = 1.0 - min(1.0, max(0.0, elapsed))
    return {
        adapter: (current.get(adapter, 0) + share * previous.get(adapter, 0)) / BUCKET_SECONDS
        for adapter in current.keys() | previous.keys()
    }
