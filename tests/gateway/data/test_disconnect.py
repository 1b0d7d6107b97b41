"""A client that leaves, in four phases and both modes: the engine learns of it, and nothing stays counted."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tests.fakes.engine import FakeEngine, Plan, engines
from tests.gateway.data.harness import Gateway, Place, World, gateway, until

pytestmark = pytest.mark.timeout(30)
MODES = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


@asynccontextmanager
async def client_connection(gw: Gateway, key: str, *, stream: bool) -> AsyncIterator[asyncio.StreamReader]:
    """A raw client that has sent its request; leaving the context closes its connection."""
    body = json.dumps({"model": "pirate", "prompt": "x", "stream": stream}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\n"
    head += f"Content-Length: {len(body)}\r\n\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", gw.port)
    writer.write(head.encode() + body)
    try:
        yield reader
    finally:
        writer.close()


async def _released(gw: Gateway, disconnects: int = 1) -> None:
    await gw.until_idle()
    await until(lambda: gw.metric("disconnects_total") == disconnects)


@MODES
async def test_while_it_waits_for_a_replica(world: World, place: Place, stream: bool) -> None:
    engine = place.engine()
    async with engines(engine):
        engine.publish(place.endpoints, ready=False)
        async with gateway(place.settings(world.url, route_timeout=60)) as gw:
            async with client_connection(gw, world.keys.acme, stream=stream):
                await until(lambda: gw.metric("in_flight") == 1)
            await _released(gw)
            assert gw.metric("dispatched") == 0
            assert engine.requests == []


@MODES
async def test_while_the_gateway_connects(world: World, place: Place, stream: bool) -> None:
    engine = place.engine()
    async with engines(engine):
        with socket.create_server(("127.0.0.1", 0), backlog=0) as full, socket.socket() as filler:
            filler.connect(full.getsockname())  # the only place in its queue: the next connection hangs
            engine.data_port = full.getsockname()[1]
            engine.publish(place.endpoints)
            async with gateway(place.settings(world.url, connect_timeout=60), replicas=1) as gw:
                async with client_connection(gw, world.keys.acme, stream=stream):
                    await until(lambda: gw.metric("dispatched") == 1)
                await _released(gw)


@MODES
@pytest.mark.parametrize("hold", ["headers", "first"])
async def test_before_the_first_byte(world: World, place: Place, stream: bool, hold: str) -> None:
    engine = place.engine()
    engine.default = Plan(hold=hold)
    async with engines(engine):
        engine.publish(place.endpoints)
        async with gateway(place.settings(world.url), replicas=1) as gw:
            async with client_connection(gw, world.keys.acme, stream=stream):
                sent = await engine.request()
                await sent.reached.wait()
            await _aborted(engine)
            await _released(gw)


async def test_in_the_middle_of_a_stream(world: World, place: Place) -> None:
    engine = place.engine()
    engine.default = Plan(hold=1)
    async with engines(engine):
        engine.publish(place.endpoints)
        async with gateway(place.settings(world.url), replicas=1) as gw:
            async with client_connection(gw, world.keys.acme, stream=True) as reader:
                await reader.readuntil(b"one")
            await _aborted(engine)
            await _released(gw)


async def test_in_the_middle_of_an_unstreamed_answer(world: World, place: Place) -> None:
    engine = place.engine()
    engine.default = Plan(hold="body")
    async with engines(engine):
        engine.publish(place.endpoints)
        async with gateway(place.settings(world.url), replicas=1) as gw:
            async with client_connection(gw, world.keys.acme, stream=False):
                await (await engine.request()).reached.wait()
            await _aborted(engine)
            await _released(gw)


@MODES
async def test_many_that_leave_cost_no_connection_g49_g50(world: World, place: Place, stream: bool) -> None:
    """The pool holds two connections; forty clients leave in every phase; the next request is served at once."""
    engine = place.engine()
    holds: list[str | int | None] = ["headers", "first", 0 if stream else "body", 1 if stream else "body"]
    async with engines(engine):
        engine.publish(place.endpoints)
        async with gateway(place.settings(world.url, max_in_flight=2), replicas=1) as gw:
            for number in range(40):
                engine.plans.append(Plan(hold=holds[number % 4]))
                async with client_connection(gw, world.keys.acme, stream=stream):
                    await (await engine.request(number)).reached.wait()
                await asyncio.wait_for(engine.requests[number].gone.wait(), 5)
                await gw.until_idle()
            async with asyncio.timeout(2):
                assert (await gw.ask(world.keys.acme, "pirate", stream=stream)).status_code == 200


async def test_one_that_leaves_while_others_stream_disturbs_none(world: World, place: Place) -> None:
    engine = place.engine()
    engine.plans = [Plan(hold=1), Plan(hold=1)]
    stayed, left = engine.plans
    async with engines(engine):
        engine.publish(place.endpoints)
        async with gateway(place.settings(world.url), replicas=1) as gw:
            staying = asyncio.create_task(gw.ask(world.keys.acme, "pirate", stream=True))
            await (await engine.request(0)).reached.wait()
            async with client_connection(gw, world.keys.acme, stream=True):
                await (await engine.request(1)).reached.wait()
            await asyncio.wait_for(engine.requests[1].gone.wait(), 5)
            stayed.release.set()
            answer = await staying
            assert answer.text.endswith("data: [DONE]\n\n")
            assert not engine.requests[0].gone.is_set()
            assert not left.release.is_set()


async def _aborted(engine: FakeEngine) -> None:
    async with asyncio.timeout(5):
        await engine.requests[0].gone.wait()
    assert not engine.requests[0].finished.is_set()
