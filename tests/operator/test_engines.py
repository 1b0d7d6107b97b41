"""The fleet's readers: what a live stream tells, and that nothing is known without one."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import msgspec
import pytest
from aiohttp import web

from loraplane_core.errors import DeadlineExceeded, InsufficientMemory, Unavailable
from loraplane_core.identity import AdapterId, AdapterRef, ReplicaId
from loraplane_core.wire import encode
from loraplane_core.wire.engine import Delta, Heartbeat, Hello, Snapshot
from loraplane_core.wire.engine import Load as EngineLoad
from loraplane_operator import http as operator_http
from loraplane_operator.engines import client as engine_client
from loraplane_operator.engines import fleet as fleet_module
from loraplane_operator.engines.client import EngineClient
from loraplane_operator.engines.fleet import Fleet
from loraplane_operator.words import Replica
from tests.operator.fakes.engine import CAPACITY, FakeEngine
from tests.operator.system import until
from tests.operator.worlds import residence

REPLICA = ReplicaId("default", "pool", 0)
ID = AdapterId("acme", "pirate", 1, "1" * 64)


@pytest.fixture
async def http() -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(trust_env=False) as made:
        yield made


@pytest.fixture
async def engine() -> AsyncIterator[FakeEngine]:
    made = FakeEngine(REPLICA, "token")
    await made.start()
    yield made
    await made.stop()


def at(port: int, **changes: Any) -> Replica:
    fields: dict[str, Any] = {"ready": True, "running": True, "revision": "r", "address": "127.0.0.1"}
    return Replica(REPLICA, admin_port=port, **{**fields, **changes})


@pytest.fixture
async def fleet(http: httpx.AsyncClient) -> AsyncIterator[Fleet]:
    made = Fleet(http, lambda pool: "token", lambda: None)
    yield made
    await made.close()


async def test_live_stream_is_folded_into_a_view(fleet: Fleet, engine: FakeEngine) -> None:
    engine.hold("acme/pirate@1", "1" * 64)
    fleet.sync([at(engine.port)])
    await until(fleet.engines)
    view = fleet.engines()[REPLICA]
    assert (view.boot, view.base) == (engine.boot, "base-a")
    assert view.residences[AdapterRef("acme", "pirate", 1)].residency == "host"
    engine.lose("acme/pirate@1")
    await until(lambda: fleet.engines()[REPLICA].residences == {})
    await until(lambda: fleet.engines()[REPLICA].model is not None)


async def test_silent_engine_is_not_in_the_world(fleet: Fleet, engine: FakeEngine) -> None:
    fleet.sync([at(engine.port)])
    await until(fleet.engines)
    engine.silent = True
    await until(lambda: not fleet.engines(), seconds=3)


async def test_replica_that_stopped_is_dropped_at_once(fleet: Fleet, engine: FakeEngine) -> None:
    fleet.sync([at(engine.port)])
    await until(fleet.engines)
    fleet.sync([at(engine.port, running=False)])
    assert fleet.engines() == {}
    with pytest.raises(Unavailable):
        fleet.client(REPLICA)


HELLO = Hello(replica=str(REPLICA), boot="b", base="base-a", base_digest="b" * 64, capacity=CAPACITY)
SNAPSHOT = Snapshot(seq=1, adapters=[], capacity=CAPACITY, load=EngineLoad())

STRANGER = "default/other/0"


def telling(**changes: Any) -> Snapshot:
    return msgspec.structs.replace(SNAPSHOT, adapters=[residence(**changes)])


#: How streams begin that must not be believed; they go on with heartbeats as if nothing were wrong.
BAD_STREAMS: dict[str, list[bytes]] = {
    "gap": [encode(HELLO), encode(SNAPSHOT), encode(Heartbeat(seq=9))],
    "another engine": [encode(msgspec.structs.replace(HELLO, replica=STRANGER)), encode(SNAPSHOT)],
    "protocol": [encode(msgspec.structs.replace(HELLO, protocol=9)), encode(SNAPSHOT)],
    "no hello": [encode(SNAPSHOT)],
    "delta before the snapshot": [encode(HELLO), encode(Delta(seq=1))],
    "not JSON": [encode(HELLO), encode(SNAPSHOT), b"{"],
    "less than nothing": [encode(HELLO), encode(telling(bytes=-1))],
    "a time that is none": [encode(HELLO), encode(telling(since=1e30))],
    "no digest": [encode(HELLO), encode(telling(digest="none"))],
    "a change that cannot be": [encode(HELLO), encode(SNAPSHOT), encode(Delta(seq=2, adapters=[residence(bytes=-1)]))],
    "a capacity that cannot be": [
        encode(HELLO),
        encode(msgspec.structs.replace(SNAPSHOT, capacity=msgspec.structs.replace(CAPACITY, host_bytes=1 << 70))),
    ],
}


@pytest.mark.parametrize("case", BAD_STREAMS)
async def test_stream_that_cannot_be_trusted_is_dropped(fleet: Fleet, case: str) -> None:
    connections = 0

    async def state(request: web.Request) -> web.StreamResponse:
        nonlocal connections
        connections += 1
        response = web.StreamResponse()
        await response.prepare(request)
        lines = BAD_STREAMS[case]
        beats = (encode(Heartbeat(seq=seq)) for seq in itertools.count(10 if case == "gap" else len(lines)))
        for line in itertools.chain(lines, beats):
            await response.write(line + b"\n")
            await asyncio.sleep(0.05)
        return response

    async with serving({"/state": state}) as port:
        fleet.sync([at(port)])
        await until(lambda: connections > 1, seconds=3, what="the reader leaves and comes again")


def serving(routes: dict[str, Callable[[web.Request], Any]]) -> Any:
    @asynccontextmanager
    async def served() -> AsyncIterator[int]:
        app = web.Application()
        app.add_routes([web.get(path, handler) for path, handler in routes.items()])
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        try:
            yield runner.addresses[0][1]
        finally:
            await runner.cleanup()

    return served()


async def test_call_on_a_hung_engine_ends_at_its_deadline(
    http: httpx.AsyncClient, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_client, "CALL_SECONDS", 0.1)
    engine.hang = True
    with pytest.raises(DeadlineExceeded):
        await EngineClient(http, engine.url, "token").withdraw(ID, drain_s=0.1)


async def test_refusal_keeps_the_engines_code_and_text(http: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.refuse = InsufficientMemory("needs 34 MiB")
    with pytest.raises(InsufficientMemory, match="needs 34 MiB"):
        await EngineClient(http, engine.url, "token").warm(ID, size=1, rank=1, pinned=False)


async def test_engine_that_is_not_there_is_unreachable(http: httpx.AsyncClient) -> None:
    with pytest.raises(Unavailable) as caught:
        await EngineClient(http, "http://127.0.0.1:9", "token").model()
    assert caught.value.code == "engine_unreachable"


class Counting:
    """In place of the back-off: remembers after how many failures it was asked."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def delay(self, attempts: int) -> float:
        self.asked.append(attempts)
        return 0.01


async def test_stream_that_begins_well_and_ends_at_once_is_asked_for_ever_more_rarely(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    counting = Counting()
    monkeypatch.setattr(fleet_module, "_RECONNECT", counting)

    async def state(request: web.Request) -> web.Response:
        return web.Response(body=encode(HELLO) + b"\n" + encode(SNAPSHOT) + b"\n")

    async with serving({"/state": state}) as port:
        fleet.sync([at(port)])
        await until(lambda: len(counting.asked) >= 4)
    assert counting.asked[:4] == [1, 2, 3, 4]


async def test_words_of_an_engine_are_cut_to_what_a_status_bears(fleet: Fleet) -> None:
    async def state(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        told = telling(message="x" * (1 << 20), residency="absent")
        await response.write(encode(HELLO) + b"\n" + encode(told) + b"\n")
        await asyncio.sleep(0.5)
        return response

    async with serving({"/state": state}) as port:
        fleet.sync([at(port)])
        await until(fleet.engines)
        (seen,) = fleet.engines()[REPLICA].residences.values()
    assert len(seen.message) == 500


async def test_answer_without_an_end_is_given_up(http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever listens on an engine's port must not fill the operator's memory, nor keep it waiting."""
    monkeypatch.setattr(operator_http, "ANSWER_MAX", 1 << 20)
    sent = 0

    async def model(request: web.Request) -> web.StreamResponse:
        nonlocal sent
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(b"x" * (1 << 16))
            sent += 1 << 16

    async with serving({"/model": model}) as port:
        with pytest.raises(Unavailable, match="more than"):
            await EngineClient(http, f"http://127.0.0.1:{port}", "token").model()
    assert sent < 64 << 20


async def test_answer_that_drips_is_given_up_in_time(http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_client, "CALL_SECONDS", 1.0)
    monkeypatch.setattr(engine_client, "CONNECT_SECONDS", 0.1)

    async def model(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(b" ")
            await asyncio.sleep(0.02)

    async with serving({"/model": model}) as port, asyncio.timeout(10):
        with pytest.raises(DeadlineExceeded):
            await EngineClient(http, f"http://127.0.0.1:{port}", "token").model()


async def test_refusal_that_no_reader_bears_is_a_refusal_all_the_same(http: httpx.AsyncClient) -> None:
    async def model(request: web.Request) -> web.Response:
        return web.Response(status=500, body=b"[" * 200_000)

    async with serving({"/model": model}) as port:
        with pytest.raises(Unavailable):
            await EngineClient(http, f"http://127.0.0.1:{port}", "token").model()
