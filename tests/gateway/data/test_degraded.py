"""Postgres away, Redis frozen: what keeps working, and for how long nothing hangs (design §9)."""

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

import psycopg
import pytest
from redis.asyncio import Redis

from loraplane_gateway import keys
from tests.fakes.engine import engines
from tests.gateway.data.harness import Place, World, add_key, gateway, until
from tests.gateway.postgres import PostgresServer, running_valkey

pytestmark = pytest.mark.timeout(60)


@contextmanager
def away(postgres: PostgresServer, name: str) -> Iterator[None]:
    """No connection to this database: the open ones end, new ones are refused."""
    with psycopg.connect(postgres.url(), autocommit=True) as connection:
        connection.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS false")
        connection.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s", (name,))
        try:
            yield
        finally:
            connection.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS true")


async def test_without_postgres_the_last_snapshot_serves_and_afterwards_changes_are_seen_again(
    own_world: World, place: Place, postgres: PostgresServer, pepper: bytes
) -> None:
    engine = place.engine()
    async with engines(engine):
        engine.publish(place.endpoints)
        async with gateway(place.settings(own_world.url, key_ttl=0.01), replicas=1) as gw:
            assert (await gw.ask(own_world.keys.acme, "pirate")).status_code == 200
            with psycopg.connect(own_world.database.owner_url, autocommit=True) as connection:
                late = add_key(connection, "acme", pepper)
            with away(postgres, own_world.database.name):
                await until(lambda: gw.metric("snapshot_age_seconds") > 1.5)
                for _ in range(3):
                    assert (await gw.ask(own_world.keys.acme, "pirate")).status_code == 200
                assert (await gw.client.get("/health/ready")).status_code == 200
                answer = await gw.ask(late, "pirate")
                assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable")
                assert int(answer.headers["retry-after"]) >= 1
                assert gw.metric("usage_queued") >= 3
            await until(lambda: gw.metric("snapshot_age_seconds") < 1)
            assert (await gw.ask(late, "pirate")).status_code == 200
            await until(lambda: gw.metric("usage_queued") == 0)
            with psycopg.connect(own_world.database.owner_url, autocommit=True) as connection:
                connection.execute("UPDATE api_keys SET revoked_at = now() WHERE id = %s", (keys.key_id(late),))
            await gw.until_refused(late, 3)
    with psycopg.connect(own_world.database.owner_url) as connection:
        assert connection.execute("SELECT count(*) FROM usage_events").fetchone() == (5,)


async def test_past_the_limit_the_snapshot_serves_no_more(
    own_world: World, place: Place, postgres: PostgresServer
) -> None:
    async with gateway(place.settings(own_world.url, snapshot_limit=1.5)) as gw:
        assert (await gw.ask(own_world.keys.acme, "nothing")).status_code == 404
        with away(postgres, own_world.database.name):
            await until(lambda: gw.metric("snapshot_age_seconds") > 1.6)
            answer = await gw.ask(own_world.keys.acme, "nothing")
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable")
            assert (await gw.client.get("/health/ready")).status_code == 503
            assert (await gw.client.get("/health/live")).status_code == 200


async def test_with_redis_frozen_requests_answer_as_fast_as_before_g35(world: World, place: Place) -> None:
    """Frozen, not closed: connections stay open and nothing comes back."""
    engine = place.engine()
    with running_valkey() as url:
        client = Redis.from_url(url)
        pid = (await client.info("server"))["process_id"]
        await client.aclose()
        async with engines(engine):
            engine.publish(place.endpoints)
            async with gateway(place.settings(world.url, redis_url=url), replicas=1) as gw:
                assert (await gw.ask(world.keys.acme, "pirate")).status_code == 200
                assert gw.metric("redis_away") == 0
                os.kill(pid, signal.SIGSTOP)
                try:
                    await until(lambda: gw.metric("redis_away") == 1)
                    for _ in range(5):
                        asked_at = time.monotonic()
                        assert (await gw.ask(world.keys.acme, "pirate", stream=True)).status_code == 200
                        assert time.monotonic() - asked_at < 0.5
                    await gw.until_idle()
                finally:
                    os.kill(pid, signal.SIGCONT)
                await until(lambda: gw.metric("redis_away") == 0)


async def test_redis_that_was_never_there_stops_nothing(world: World, place: Place) -> None:
    engine = place.engine()
    async with engines(engine):
        engine.publish(place.endpoints)
        settings = place.settings(world.url, redis_url="redis://127.0.0.1:1/0")
        async with gateway(settings, replicas=1) as gw:
            assert (await gw.ask(world.keys.acme, "pirate")).status_code == 200


async def test_a_revocation_notice_in_redis_drops_the_key_at_once(
    own_world: World, place: Place, postgres: PostgresServer, valkey_url: str
) -> None:
    """The feed is kept from carrying it, so that only the notice can have done it."""
    redis = Redis.from_url(valkey_url)
    try:
        async with gateway(place.settings(own_world.url, redis_url=valkey_url)) as gw:
            assert (await gw.ask(own_world.keys.acme, "nothing")).status_code == 404
            with psycopg.connect(postgres.url(own_world.database.name)) as connection:
                connection.execute("SET LOCAL session_replication_role = replica")  # no triggers
                connection.execute("UPDATE api_keys SET revoked_at = now()")
            assert (await gw.ask(own_world.keys.acme, "nothing")).status_code == 404  # still cached
            async with asyncio.timeout(2):
                key_id = keys.key_id(own_world.keys.acme) or ""
                while not await redis.publish("loraplane:revocations", key_id):  # noqa: ASYNC110 - it has no event
                    await asyncio.sleep(0.02)  # the gateway has not subscribed yet
            await gw.until_refused(own_world.keys.acme, 1)
    finally:
        await redis.aclose()


async def test_two_gateways_see_each_others_requests_g70(world: World, place: Place, valkey_url: str) -> None:
    """The base is served by the less loaded replica, and one gateway's load is on the other's mind."""
    first, second = place.engine(), place.engine(ordinal=1)
    for engine in (first, second):
        engine.default.hold = "headers"
    async with engines(first, second):
        for engine in (first, second):
            engine.publish(place.endpoints)
        settings = place.settings(world.url, redis_url=valkey_url)
        async with gateway(settings, replicas=2) as one, gateway(settings, replicas=2) as two:
            asked = [asyncio.create_task(one.ask(world.keys.acme, "base-one"))]
            await (await first.request()).reached.wait()
            await until(lambda: two.app.load(first.replica) == 1)
            asked.append(asyncio.create_task(two.ask(world.keys.acme, "base-one")))
            await (await second.request()).reached.wait()
            for engine in (first, second):
                engine.default.release.set()
            assert [(await answer).status_code for answer in asked] == [200, 200]
            await until(lambda: two.app.load(first.replica) == 0)
