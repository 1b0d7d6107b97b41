"""Redis access: the breaker, the ledger, demand rates."""

import asyncio

import pytest
from redis.asyncio import Redis

from loraplane_gateway.limits.demand import Demand
from loraplane_gateway.limits.ledger import Ledger
from loraplane_gateway.limits.redis import (
    DEADLINE_SECONDS,
    FAILURES_TO_OPEN,
    OPEN_SECONDS,
    Breaker,
    RedisAway,
    RedisPort,
)


class Clock:
    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def test_the_breaker_opens_after_failures_in_a_row_probes_once_and_closes_on_success() -> None:
    clock = Clock()
    breaker = Breaker(clock)
    for _ in range(FAILURES_TO_OPEN):
        assert breaker.admits()
        breaker.failed("away")
    assert breaker.is_open and not breaker.admits()
    clock.now += OPEN_SECONDS
    assert breaker.admits()  # the probe
    assert not breaker.admits()  # and nobody with it
    breaker.failed("still away")
    assert not breaker.admits()
    clock.now += OPEN_SECONDS
    assert breaker.admits()
    breaker.succeeded()
    assert not breaker.is_open and breaker.admits()


async def test_a_call_ends_at_its_deadline_and_an_open_breaker_asks_nothing(valkey_url: str) -> None:
    port = RedisPort(valkey_url)
    calls = 0

    async def hang(_: Redis) -> None:
        nonlocal calls
        calls += 1
        await asyncio.sleep(60)

    try:
        loop = asyncio.get_running_loop()
        for _ in range(FAILURES_TO_OPEN + 5):
            asked_at = loop.time()
            with pytest.raises(RedisAway):
                await port.call(hang)
            assert loop.time() - asked_at < DEADLINE_SECONDS + 0.5
        assert calls == FAILURES_TO_OPEN and port.is_away
    finally:
        await port.close()


async def test_gateways_read_each_others_counts_and_forget_the_dead(valkey_url: str) -> None:
    clock = Clock()
    port = RedisPort(valkey_url)
    counts = {"a": {"models/one/0": 3}, "b": {"models/one/0": 2, "models/one/1": 1}}
    one = Ledger(port, "test-a", lambda: counts["a"], clock)
    two = Ledger(port, "test-b", lambda: counts["b"], clock)
    redis = Redis.from_url(valkey_url)
    try:
        await redis.flushdb()  # gateways of earlier tests live on in it for three seconds
        for ledger in (one, two, one):
            await ledger.exchange()
        assert one.others("models/one/0") == 2 and one.others("models/one/1") == 1
        assert two.others("models/one/0") == 3 and two.others("models/one/1") == 0
        assert 0 < await redis.pttl("loraplane:inflight:test-a") <= 3000
        assert await redis.ttl("loraplane:gateways") > 0
        clock.now += 4  # nothing read for longer than an entry lives: the other has as much as we, it is assumed
        assert one.others("models/one/0") == 3 and one.others("models/one/1") == 0
        await redis.delete("loraplane:inflight:test-b")
        await one.exchange()
        assert one.others("models/one/0") == 0
    finally:
        await redis.delete("loraplane:gateways", "loraplane:inflight:test-a", "loraplane:inflight:test-b")
        await redis.aclose()
        await port.close()


async def test_a_ledger_entry_that_cannot_be_read_counts_nothing(valkey_url: str) -> None:
    port = RedisPort(valkey_url)
    redis = Redis.from_url(valkey_url)
    one = Ledger(port, "test-a", dict)
    try:
        for entry in ("{", "[]", '{"r":"x"}', '{"r":-5}'):
            await redis.set("loraplane:inflight:test-c", entry, px=2000)
            await redis.zadd("loraplane:gateways", {"test-c": 2e9})
            await one.exchange()
            assert one.others("r") == 0
    finally:
        await redis.delete("loraplane:gateways", "loraplane:inflight:test-a", "loraplane:inflight:test-c")
        await redis.aclose()
        await port.close()


async def test_demand_is_the_rate_of_all_gateways_times_the_service_time(valkey_url: str) -> None:
    clock = Clock(1_000_000_005.0)  # half through a bucket
    port = RedisPort(valkey_url)
    one, two = Demand(port, clock), Demand(port, clock)
    redis = Redis.from_url(valkey_url)
    try:
        for demand, count in ((one, 30), (two, 20)):
            demand.served(2.0)
            for _ in range(count):
                demand.arrived("acme/pirate")
        for demand in (one, two, one):
            await demand.exchange()
        assert one.concurrency("acme/pirate") == two.concurrency("acme/pirate") == pytest.approx(50 / 10 * 2.0)
        assert one.concurrency("acme/other") == 0
        clock.now += 10  # the bucket is the last one now, and half of it is still inside the window
        await one.exchange()
        assert one.concurrency("acme/pirate") == pytest.approx(25 / 10 * 2.0)
        clock.now += 10
        await one.exchange()
        assert one.concurrency("acme/pirate") == 0
        assert await redis.ttl("loraplane:demand:100000000") > 0
    finally:
        await redis.delete("loraplane:demand:100000000")
        await redis.aclose()
        await port.close()


async def test_without_redis_demand_is_this_gateways_own() -> None:
    clock = Clock(1_000_000_000.0)
    demand = Demand(None, clock)
    demand.served(1.0)
    for _ in range(10):
        demand.arrived("acme/pirate")
    await demand.exchange()
    assert demand.concurrency("acme/pirate") == pytest.approx(1.0)
