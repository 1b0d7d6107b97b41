"""The change feed, folded into a view. It reconnects from its cursor with back-off and jitter."""

import asyncio
import contextlib
import logging
from collections.abc import Callable

from loraplane_core.errors import InvalidRequest, LoraplaneError
from loraplane_core.identity import AdapterRef
from loraplane_core.wire import check_protocol, decode
from loraplane_core.wire.registry import Adapter, FeedChange, FeedSnapshot
from loraplane_operator.backoff import Backoff
from loraplane_operator.registry.client import RegistryClient
from loraplane_operator.words import AdapterKey, RegistryView

log = logging.getLogger(__name__)
_RECONNECT = Backoff(first=0.2, cap=5.0)
#: A stream that ended sooner than this began badly, whatever it brought: the next try waits longer.
STEADY_SECONDS = 5.0
#: Removed versions that are remembered; an engine that holds an older one loses it after the planner's grace.
_WITHDRAWN_MAX = 10_000


class Feed:
    """`on_connect` is called for each new stream (answers learnt before may be void), `on_tenant` when
    something about a tenant changed, `wake` on every change."""

    def __init__(
        self,
        client: RegistryClient,
        *,
        wake: Callable[[], None],
        on_connect: Callable[[], None],
        on_tenant: Callable[[str], None],
    ) -> None:
        self._client = client
        self._wake = wake
        self._on_connect = on_connect
        self._on_tenant = on_tenant
        self._cursor: int | None = None
        self._adapters: dict[AdapterKey, Adapter] = {}
        self._tenants: set[str] = set()
        self._withdrawn: dict[AdapterRef, None] = {}
        self._known = False  # a snapshot came
        self._live = False
        self._view: RegistryView | None = None

    def view(self) -> RegistryView | None:
        """None until the first snapshot."""
        if self._view is None and self._known:
            self._view = RegistryView(
                cursor=self._cursor or 0,
                adapters=dict(self._adapters),
                tenants=frozenset(self._tenants),
                withdrawn=frozenset(self._withdrawn),
                live=self._live,
            )
        return self._view

    async def run(self) -> None:
        failures, loop = 0, asyncio.get_running_loop()
        while True:
            begun = loop.time()
            try:
                await self._read()
                trouble = "the stream ended"
            except InvalidRequest as error:
                trouble, self._cursor = error.message, None  # unreadable: take the full list
            except LoraplaneError as error:
                trouble = error.message
            failures = 1 if loop.time() - begun >= STEADY_SECONDS else failures + 1
            log.warning("the change feed is down", extra={"error": trouble, "attempts": failures})
            self._live, self._view = False, None
            self._wake()
            await asyncio.sleep(_RECONNECT.delay(failures))

    async def _read(self) -> None:
        async with contextlib.aclosing(self._client.feed(self._cursor)) as stream:
            async for event in stream:
                if event.kind == "snapshot":
                    self._replace(decode(event.data.encode(), FeedSnapshot))
                elif event.kind == "change":
                    self._fold(decode(event.data.encode(), FeedChange))
                elif self._live:
                    continue  # a heartbeat is no news
                self._view = None
                if not self._live and self._known:
                    self._live = True
                    self._on_connect()
                self._wake()

    def _replace(self, snapshot: FeedSnapshot) -> None:
        check_protocol(snapshot.protocol, "the registry")
        before = self._adapters
        self._known = True
        self._cursor = snapshot.cursor
        self._adapters = {(each.tenant, each.adapter): each for each in snapshot.adapters}
        self._tenants = set(snapshot.tenants)
        for key in {*before, *self._adapters}:
            self._compare(before.get(key), self._adapters.get(key))
        for tenant in snapshot.tenants:
            self._on_tenant(tenant)

    def _fold(self, change: FeedChange) -> None:
        self._cursor = change.cursor
        if change.kind == "adapter":
            key = (change.tenant, change.name)
            self._compare(self._adapters.get(key), change.adapter)
            if change.adapter is None:
                self._adapters.pop(key, None)
            else:
                self._adapters[key] = change.adapter
        elif change.kind == "tenant":
            # Whether it came or went is not said; a claim for one that went is refused by the registry.
            self._tenants.add(change.tenant)
        self._on_tenant(change.tenant)

    def _compare(self, before: Adapter | None, after: Adapter | None) -> None:
        """Remember the versions that went, forget those that are (again) there."""
        there = _refs(after)
        for ref in _refs(before) - there:
            self._withdrawn[ref] = None
        for ref in there & self._withdrawn.keys():
            del self._withdrawn[ref]
        while len(self._withdrawn) > _WITHDRAWN_MAX:
            del self._withdrawn[next(iter(self._withdrawn))]


def _refs(adapter: Adapter | None) -> set[AdapterRef]:
    if adapter is None:
        return set()
    return {AdapterRef(each.tenant, each.adapter, each.version) for each in adapter.versions}
