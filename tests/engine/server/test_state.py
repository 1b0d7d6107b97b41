"""The /state stream: hello, snapshot, deltas, heartbeats, and readers that fall behind."""

import asyncio
import itertools
import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from loraplane_core.artifact.digest import artifact_digest
from loraplane_core.wire.engine import Delta, Heartbeat, Hello, Residence, Snapshot, StateMessage
from loraplane_engine.server.state import QUEUE, StateHub
from tests.engine.server.artifacts import artifact_source, make_artifact
from tests.engine.server.fake_core import stats
from tests.engine.server.world import World, managed, running, until

pytestmark = pytest.mark.asyncio(loop_scope="session")


def decode(line: str) -> StateMessage:
    return msgspec.json.decode(line, type=StateMessage)


async def read(world: World) -> AsyncGenerator[StateMessage, None]:
    headers = {"authorization": "Bearer state-2"}
    async with world.admin.stream("GET", "/state", headers=headers, timeout=5) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            yield decode(line)


@pytest_asyncio.fixture(loop_scope="session")
async def pool(model: Path, tmp_path: Path) -> AsyncIterator[World]:
    async with artifact_source() as source:
        folder = tmp_path / "artifact"
        source.folders[make_artifact(folder)] = folder
        async with running(managed(model, tmp_path, source.url, "--slots", "7"), tmp_path) as world:
            yield world


async def put(world: World, folder: Path) -> dict[str, Any]:
    digest = artifact_digest(folder)
    body = {"digest": digest, "bytes": 1 << 20, "rank": 4, "deadline_s": 20}
    found: dict[str, Any] = (await world.admin.put("/adapters/acme/one/1", json=body)).json()
    return found


async def test_the_stream_opens_with_hello_and_snapshot_and_then_beats(pool: World) -> None:
    async with aclosing(read(pool)) as messages:
        hello, snapshot = await anext(messages), await anext(messages)
        assert isinstance(hello, Hello)
        assert (hello.replica, hello.base, hello.base_digest) == ("default/pool/0", "tiny", pool.base_digest)
        assert (hello.capacity.kv_tokens, hello.capacity.adapter_bytes) == (4096, 1 << 20)
        assert hello.capacity.max_model_len == 512
        assert isinstance(snapshot, Snapshot)
        beats = [await anext(messages), await anext(messages)]
        assert all(isinstance(beat, Heartbeat) for beat in beats)
        assert [beat.seq for beat in beats if isinstance(beat, Heartbeat)] == [snapshot.seq + 1, snapshot.seq + 2]


async def test_a_load_shows_as_deltas_and_in_the_next_snapshot(pool: World, tmp_path: Path) -> None:
    async with aclosing(read(pool)) as messages:
        await anext(messages)
        snapshot = await anext(messages)
        assert isinstance(snapshot, Snapshot)
        assert snapshot.adapters == []
        await put(pool, tmp_path / "artifact")
        seen: list[str] = []
        seq = snapshot.seq
        async for message in messages:
            assert isinstance(message, Delta | Heartbeat)
            assert message.seq == seq + 1
            seq = message.seq
            seen += [each.residency for each in getattr(message, "adapters", [])]
            if "host" in seen:
                break
        assert seen[0] == "loading"
    async with aclosing(read(pool)) as messages:
        await anext(messages)
        again = await anext(messages)
        assert isinstance(again, Snapshot)
        assert [(each.ref, each.residency, each.warm_wanted) for each in again.adapters] == [
            ("acme/one@1", "host", True)
        ]


async def test_the_heart_beats_also_while_only_untold_things_change(pool: World) -> None:
    async def churn() -> None:
        for number in itertools.count():
            pool.core.say(stats(steps=number))
            await asyncio.sleep(0.05)

    churning = asyncio.create_task(churn())
    try:
        async with aclosing(read(pool)) as messages, asyncio.timeout(3):
            await anext(messages)
            await anext(messages)
            assert isinstance(await anext(messages), Heartbeat)
            assert isinstance(await anext(messages), Heartbeat)
    finally:
        churning.cancel()


async def test_capacity_and_load_are_told_when_they_change(pool: World) -> None:
    async with aclosing(read(pool)) as messages:
        await anext(messages)
        await anext(messages)
        pool.core.say(stats(running=3, waiting=2, kv_tokens_displaced=160, kv_tokens_free=900))
        async for message in messages:
            if isinstance(message, Delta):
                break
        assert isinstance(message, Delta)
        assert message.load is not None
        assert (message.load.running, message.load.waiting, message.load.kv_tokens_free) == (3, 2, 900)
        assert message.capacity is not None
        assert message.capacity.kv_tokens_displaced == 160


async def test_many_changes_at_once_are_one_delta() -> None:
    hub = StateHub(snapshot=list, slots=None, max_rank=64)
    lines: list[bytes] = []

    async def write(line: bytes) -> None:
        lines.append(line)

    running_hub = asyncio.create_task(hub.run())
    serving = asyncio.create_task(hub.serve(write, replica="a/b/0", boot="x", base="b", base_digest="d"))
    await until(lambda: len(lines) == 1)
    for number in range(50):
        hub.changed(Residence(ref="t/a@1", digest="d", residency="host", in_use=number))
    await until(lambda: len(lines) >= 2)
    delta = json.loads(lines[1])
    assert [each["in_use"] for each in delta["adapters"]] == [49]
    hub.close()
    await asyncio.wait_for(serving, 2)  # ends by itself
    running_hub.cancel()


async def test_a_reader_that_falls_behind_is_dropped_and_the_others_are_not() -> None:
    hub = StateHub(snapshot=list, slots=None, max_rank=64)
    got: list[bytes] = []
    stuck = asyncio.Event()

    async def never(line: bytes) -> None:
        await stuck.wait()

    async def write(line: bytes) -> None:
        got.append(line)

    identity = {"replica": "a/b/0", "boot": "x", "base": "b", "base_digest": "d"}
    slow = asyncio.create_task(hub.serve(never, **identity))
    fast = asyncio.create_task(hub.serve(write, **identity))
    await until(lambda: len(got) == 1)
    for number in range(QUEUE + 2):
        hub.stepped(stats(running=number + 1))
        hub.flush()
        await asyncio.sleep(0)
    await until(slow.done)
    assert slow.cancelled()
    await until(lambda: len(got) == QUEUE + 3)
    assert not fast.done()
    hub.close()
    await asyncio.wait_for(fast, 2)


async def test_slots_say_how_many_typical_adapters_fit(pool: World, tmp_path: Path) -> None:
    def slots() -> int:
        return pool.engine.hub.capacity().slots

    assert slots() == 7  # --slots caps what 1 MiB would hold
    await put(pool, tmp_path / "artifact")
    pool.core.say(stats(adapter_budget_bytes=5 * 65536 + 1))
    await until(lambda: slots() == 5)


async def test_slots_before_any_adapter_assume_a_typical_rank() -> None:
    hub = StateHub(snapshot=list, slots=None, max_rank=64)
    hub.model(max_model_len=1, default_bytes=1000)
    hub.stepped(stats(adapter_budget_bytes=4500))
    assert hub.capacity().slots == 4
