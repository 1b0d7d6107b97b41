"""The change feed: folding, reconnecting from the cursor, and what a broken stream may not do."""

from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import pytest

from loraplane_core.errors import Unavailable
from loraplane_core.identity import AdapterRef
from loraplane_core.wire import encode
from loraplane_core.wire.registry import Adapter, FeedChange, FeedSnapshot
from loraplane_operator.backoff import Backoff
from loraplane_operator.registry import feed as feed_module
from loraplane_operator.registry.feed import Feed
from loraplane_operator.registry.sse import Event, events
from loraplane_operator.words import RegistryView
from tests.operator.worlds import entry, version


class Script:
    """A registry client whose feed plays one list of events per connection, then fails; the last one repeats."""

    def __init__(self, *connections: list[Event]) -> None:
        self.connections = list(connections)
        self.cursors: list[int | None] = []

    async def feed(self, cursor: int | None) -> AsyncGenerator[Event, None]:
        self.cursors.append(cursor)
        if len(self.cursors) > len(self.connections):
            raise StopAsyncIterationError
        for event in self.connections[len(self.cursors) - 1]:
            yield event
        raise Unavailable("the stream broke")


class StopAsyncIterationError(Exception):
    """The script is over."""


def snapshot(cursor: int, *adapters: Adapter) -> Event:
    return Event("snapshot", encode(FeedSnapshot(cursor=cursor, adapters=list(adapters), tenants=["acme"])).decode())


def change(cursor: int, adapter: Adapter | None, name: str = "pirate") -> Event:
    made = FeedChange(cursor=cursor, kind="adapter", tenant="acme", name=name, adapter=adapter)
    return Event("change", encode(made).decode())


async def play(monkeypatch: pytest.MonkeyPatch, *connections: list[Event]) -> tuple[Feed, Script, dict[str, int]]:
    monkeypatch.setattr(feed_module, "_RECONNECT", Backoff(first=0.001, cap=0.001))
    script, counts = Script(*connections), {"wake": 0, "connect": 0, "tenant": 0}

    def count(what: str) -> Any:
        def counted(*_: object) -> None:
            counts[what] += 1

        return counted

    client: Any = script
    made = Feed(client, wake=count("wake"), on_connect=count("connect"), on_tenant=count("tenant"))
    with pytest.raises(StopAsyncIterationError):
        await made.run()
    return made, script, counts


def seen(made: Feed) -> RegistryView:
    view = made.view()
    assert view is not None
    return view


async def test_snapshot_and_changes_are_folded(monkeypatch: pytest.MonkeyPatch) -> None:
    two = entry("pirate", version(), version(number=2))
    made, _, _ = await play(monkeypatch, [snapshot(5, entry()), change(6, two), change(7, entry("json"), "json")])
    view = seen(made)
    assert (view.cursor, view.tenants) == (7, frozenset({"acme"}))
    assert len(view.adapters["acme", "pirate"].versions) == 2
    assert ("acme", "json") in view.adapters


async def test_reconnects_from_its_cursor_and_keeps_its_view_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    made, script, counts = await play(monkeypatch, [snapshot(5, entry())], [change(6, entry())], [])
    assert script.cursors[:3] == [None, 5, 6]
    assert counts["connect"] == 2  # the third stream told nothing
    view = seen(made)
    assert (view.live, list(view.adapters)) == (False, [("acme", "pirate")])


async def test_removed_versions_are_withdrawn_until_they_return(monkeypatch: pytest.MonkeyPatch) -> None:
    two = entry("pirate", version(), version(number=2))
    gone, _, _ = await play(monkeypatch, [snapshot(5, two), change(6, entry())])
    assert seen(gone).withdrawn == {AdapterRef("acme", "pirate", 2)}
    whole, _, _ = await play(monkeypatch, [snapshot(5, two), change(6, None)])
    assert len(seen(whole).withdrawn) == 2
    back, _, _ = await play(monkeypatch, [snapshot(5, two), change(6, entry()), change(7, two)])
    assert seen(back).withdrawn == frozenset()


async def test_version_missing_after_a_gap_is_withdrawn_too(monkeypatch: pytest.MonkeyPatch) -> None:
    two = entry("pirate", version(), version(number=2))
    made, _, _ = await play(monkeypatch, [snapshot(5, two)], [snapshot(90, entry())])
    assert seen(made).withdrawn == {AdapterRef("acme", "pirate", 2)}


async def test_unreadable_change_makes_it_take_the_full_list(monkeypatch: pytest.MonkeyPatch) -> None:
    made, script, _ = await play(monkeypatch, [snapshot(5), Event("change", "{")], [snapshot(9, entry())])
    assert script.cursors[:2] == [None, None]
    assert seen(made).cursor == 9


async def test_heartbeats_wake_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, counts = await play(monkeypatch, [snapshot(5), *[Event("", "")] * 10])
    assert counts["wake"] == 2  # the snapshot and the end


async def test_feed_that_brings_its_list_and_ends_is_asked_for_ever_more_rarely(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each time costs the registry all it knows, and makes the operator report its pools again."""
    asked: list[int] = []

    class Counting:
        def delay(self, attempts: int) -> float:
            asked.append(attempts)
            return 0.0

    client: Any = Script(*[[snapshot(number)] for number in range(4)])
    made = Feed(client, wake=lambda: None, on_connect=lambda: None, on_tenant=lambda _: None)
    monkeypatch.setattr(feed_module, "_RECONNECT", Counting())
    with pytest.raises(StopAsyncIterationError):
        await made.run()
    assert asked == [1, 2, 3, 4]


async def test_sse_lines() -> None:
    async def lines() -> AsyncIterator[str]:
        for line in [": hi", "event: change", "id: 7", "data: {", "data:}", "", "data", "", "event: x", ""]:
            yield line

    assert [event async for event in events(lines())] == [Event("", ""), Event("change", "{\n}"), Event("message", "")]


def test_backoff_grows_to_its_cap_with_jitter() -> None:
    made = Backoff(first=1, cap=8)
    assert [made.delay(attempts, jitter=0.0) for attempts in (1, 2, 3, 4, 9, 5000)] == [0.5, 1, 2, 4, 4, 4]
    assert made.delay(1, jitter=0.999) < 1
