"""Redis with a deadline per call and a breaker (G32, G35): it answers in time or counts as away."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

log = logging.getLogger(__name__)
DEADLINE_SECONDS = 0.05
FAILURES_TO_OPEN = 3
OPEN_SECONDS = 1.0
T = TypeVar("T")


class RedisAway(Exception):
    """Redis did not answer within the deadline, or the breaker is open."""


def connect(url: str, *, socket_timeout: float | None) -> Redis:
    """A client that never retries by itself; the caller closes it."""
    return Redis.from_url(
        url,
        socket_timeout=socket_timeout,
        socket_connect_timeout=1.0,
        retry=Retry(NoBackoff(), 0),
        protocol=2,
        max_connections=16,
    )


class Breaker:
    """Opens after FAILURES_TO_OPEN failures in a row; every OPEN_SECONDS one call may probe."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._failures = 0
        self._open_until = float("-inf")

    @property
    def is_open(self) -> bool:
        return self._failures >= FAILURES_TO_OPEN

    def admits(self) -> bool:
        if self.is_open:
            if self._clock() < self._open_until:
                return False
            self._open_until = self._clock() + OPEN_SECONDS  # this caller probes, the others wait on
        return True

    def succeeded(self) -> None:
        if self.is_open:
            log.info("Redis answers again")
        self._failures = 0

    def failed(self, reason: object) -> None:
        was_open = self.is_open
        self._failures += 1
        self._open_until = self._clock() + OPEN_SECONDS
        if self.is_open and not was_open:  # transitions only (G34)
            log.warning("Redis does not answer (%s); each gateway counts for itself", reason)


class RedisPort:
    def __init__(self, url: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._client = connect(url, socket_timeout=DEADLINE_SECONDS)
        self._breaker = Breaker(clock)

    @property
    def is_away(self) -> bool:
        return self._breaker.is_open

    async def call(self, work: Callable[[Redis], Awaitable[T]]) -> T:
        """`work` within DEADLINE_SECONDS; raises RedisAway."""
        if not self._breaker.admits():
            raise RedisAway("the breaker is open")
        try:
            async with asyncio.timeout(DEADLINE_SECONDS):
                result = await work(self._client)
        except (RedisError, OSError, TimeoutError) as error:
            reason = str(error) or type(error).__name__
            self._breaker.failed(reason)
            raise RedisAway(reason) from error
        self._breaker.succeeded()
        return result

    async def close(self) -> None:
        await self._client.aclose()
