"""The change feed over HTTP: snapshot, order, no gap under concurrent writers, resumption."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import psycopg
import pytest
import uvicorn

from loraplane_gateway.db.sessions import PLATFORM, transaction
from loraplane_gateway.registry.app import create_admin_app
from loraplane_gateway.registry.feed.repository import FeedRepository
from loraplane_gateway.registry.state import RegistryState
from tests.gateway.postgres import Database, free_port
from tests.gateway.registry.conftest import Api
from tests.gateway.registry.test_claims import claim

SECONDS = 20


class _Server(uvicorn.Server):
    def install_signal_handlers(self) -> None:
        return


@pytest.fixture
async def url(state: RegistryState) -> AsyncIterator[str]:
    """A real listener: the in-process transport does not stream."""
    port = free_port()
    config = uvicorn.Config(create_admin_app(state), host="127.0.0.1", port=port, lifespan="off", log_config=None)
    server = _Server(config)
    task = asyncio.create_task(server.serve())
    async with asyncio.timeout(SECONDS):
        while not server.started:  # noqa: ASYNC110 - uvicorn offers a flag
            await asyncio.sleep(0.01)
    yield f"http://127.0.0.1:{port}"
    state.hub.close()
    server.should_exit = True
    await task


class Reader:
    def __init__(self, lines: AsyncIterator[str]) -> None:
        self._lines = lines
        self.heartbeats = 0

    async def next(self) -> tuple[str, dict[str, Any]]:
        """The next (event, data)."""
        event = ""
        async with asyncio.timeout(SECONDS):
            async for line in self._lines:
                if line.startswith(":"):
                    self.heartbeats += 1
                elif line.startswith("event: "):
                    event = line.removeprefix("event: ")
                elif line.startswith("data: "):
                    return event, json.loads(line.removeprefix("data: "))
        raise AssertionError("the feed ended")


@asynccontextmanager
async def reading(url: str, api: Api, cursor: int | None = None) -> AsyncIterator[Reader]:
    query = "" if cursor is None else f"?cursor={cursor}"
    async with httpx.AsyncClient(base_url=url, timeout=SECONDS) as client:
        headers = {"authorization": f"Bearer {api.operator_token}"}
        async with client.stream("GET", f"/operator/feed{query}", headers=headers) as answer:
            assert answer.status_code == 200
            yield Reader(answer.aiter_lines())


async def test_a_new_reader_gets_a_snapshot_then_changes_in_order(api: Api, url: str) -> None:
    await api.tenant("acme", "team")
    async with reading(url, api) as feed:
        event, snapshot = await feed.next()
        assert (event, snapshot["tenants"], snapshot["adapters"], snapshot["protocol"]) == ("snapshot", ["acme"], [], 1)
        await api.pool()
        assert (await feed.next())[1]["name"] == "serving/tiny"
        await api.as_operator("PUT", "/operator/claims/u", claim())
        event, change = await feed.next()
        assert (event, change["kind"], change["tenant"], change["name"]) == ("change", "adapter", "acme", "pirate")
        assert change["adapter"]["claim_uid"] == "u"
        await api.as_operator("DELETE", "/operator/claims/u")
        gone = (await feed.next())[1]
        assert gone.get("adapter") is None and gone["cursor"] > change["cursor"]
        await api.tenant("rival")
        created = (await feed.next())[1]
        assert (created["kind"], created["tenant"]) == ("tenant", "rival")


async def test_keys_are_not_shown_and_an_idle_feed_beats(api: Api, url: str) -> None:
    await api.tenant("acme")
    async with reading(url, api) as feed:
        await feed.next()
        await api.ok("POST", "/admin/tenants/acme/keys", {})

        async def later() -> None:
            async with asyncio.timeout(SECONDS):
                while feed.heartbeats < 2:  # noqa: ASYNC110 - counted by the reader
                    await asyncio.sleep(0.05)
            await api.tenant("rival")

        writer = asyncio.create_task(later())
        assert (await feed.next())[1]["tenant"] == "rival"
        await writer


async def test_a_reader_goes_on_from_its_cursor_and_gets_a_snapshot_when_it_cannot(
    api: Api, url: str, state: RegistryState
) -> None:
    for number in range(5):
        await api.tenant(f"t{number}")
    async with reading(url, api) as feed:
        cursor = (await feed.next())[1]["cursor"]
    await api.tenant("later")
    async with reading(url, api, cursor) as feed:
        assert (await feed.next())[1]["tenant"] == "later"
    async with reading(url, api, cursor + 1000) as feed:  # a database that was restored from before
        assert (await feed.next())[0] == "snapshot"
    async with transaction(state.sessions, PLATFORM) as session:
        await FeedRepository(session, PLATFORM).trim(2)
    async with reading(url, api, 1) as feed:
        assert (await feed.next())[0] == "snapshot"


async def test_no_change_is_missed_while_many_write(api: Api, url: str, database: Database) -> None:
    writers, rounds = 3, 15

    def write(number: int) -> None:
        with psycopg.connect(database.owner_url) as connection:
            for turn in range(rounds):
                connection.execute("INSERT INTO tenants (name) VALUES (%s)", (f"w{number}-{turn}",))
                connection.rollback() if turn % 5 == 4 else connection.commit()

    async with reading(url, api) as feed:
        await feed.next()
        work = [asyncio.create_task(asyncio.to_thread(write, number)) for number in range(writers)]
        expected = {f"w{number}-{turn}" for number in range(writers) for turn in range(rounds) if turn % 5 != 4}
        cursors: list[int] = []
        seen: set[str] = set()
        while seen != expected:
            change = (await feed.next())[1]
            cursors.append(change["cursor"])
            seen.add(change["tenant"])
        await asyncio.gather(*work)
    assert cursors == sorted(cursors)


@pytest.mark.parametrize("at", ["infinity", "-infinity", "20000-01-01"])
async def test_a_row_written_by_hand_with_a_time_of_its_own_ends_nobodys_feed(
    api: Api, url: str, database: Database, at: str
) -> None:
    await api.tenant("acme", "team")
    with psycopg.connect(database.owner_url) as owner:
        owner.execute(
            "INSERT INTO tenant_adapters (tenant_id, version, path, rank, base_model, created_at)"
            " VALUES ('acme', 1, '/m', 8, 'x', %s)",
            (at,),
        )
    assert (await api.call("GET", "/admin/tenants/acme/adapters/default")).status_code == 200
    headers = {"authorization": f"Bearer {api.operator_token}"}
    async with (
        asyncio.timeout(SECONDS),
        httpx.AsyncClient(trust_env=False) as http,
        http.stream("GET", f"{url}/operator/feed", headers=headers) as feed,
    ):
        assert feed.status_code == 200
        assert await anext(feed.aiter_lines()) == "event: snapshot"
