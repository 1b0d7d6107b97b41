"""What each engine says of itself: one `/state` reader per endpoint (design §3, Routable).

A lost, silent or inconsistent stream takes the replica out at once and empties its residency; only a
new Hello and Snapshot bring it back.
"""

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Callable, Iterator

import httpx
import msgspec

from loraplane_core.credentials import engine_credential
from loraplane_core.errors import LoraplaneError
from loraplane_core.identity import AdapterId, PoolRef, ReplicaId
from loraplane_core.wire import check_protocol
from loraplane_core.wire.endpoints import Endpoint
from loraplane_core.wire.engine import (
    STATE_TIMEOUT_SECONDS,
    Delta,
    Heartbeat,
    Hello,
    Residence,
    ResidencyClass,
    Snapshot,
    StateMessage,
)

log = logging.getLogger(__name__)
LINE_MAX = 64 << 20
RETRY_FIRST, RETRY_MAX = 0.1, 1.0


class StreamBroken(Exception):
    """The engine's stream contradicts the protocol."""


class ReplicaView:
    """The gateway's picture of one engine; written by its reader only."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.hello: Hello | None = None
        self.in_step = False  # Hello and Snapshot received, no gap since
        self.heard_at = float("-inf")
        self.out_since: float | None = None  # when it fell out of step
        self._residency: dict[tuple[str, str], ResidencyClass] = {}
        self._seq: int | None = None
        self._mourners: set[Callable[[], None]] = set()

    @property
    def replica(self) -> ReplicaId:
        return self.endpoint.replica

    @property
    def boot(self) -> str:
        return self.hello.boot if self.hello is not None else ""

    def is_routable(self, base_digest: str, now: float) -> bool:
        return (
            self.endpoint.ready
            and not self.endpoint.terminating
            and self.in_step
            and now - self.heard_at <= STATE_TIMEOUT_SECONDS
            and self.hello is not None
            and self.hello.base_digest == base_digest
        )

    @property
    def residences(self) -> int:
        """How many adapter versions it holds in some tier."""
        return len(self._residency)

    def residency_of(self, adapter: AdapterId) -> ResidencyClass:
        return self._residency.get((str(adapter.ref), adapter.digest), "absent")

    @contextlib.contextmanager
    def on_loss(self, callback: Callable[[], None]) -> Iterator[None]:
        """`callback` is called if the engine process of now is given up while the context lasts."""
        self._mourners.add(callback)
        try:
            yield
        finally:
            self._mourners.discard(callback)

    def give_up(self) -> None:
        for callback in tuple(self._mourners):
            callback()

    def lose(self, now: float) -> None:
        if self.in_step:
            self.out_since = now
        self.in_step = False
        self._seq = None
        self._residency.clear()

    def hear(self, message: StateMessage, now: float) -> None:
        """Raises StreamBroken, ProtocolMismatch."""
        self.heard_at = now
        match message:
            case Hello():
                self._greet(message, now)
            case Snapshot():
                if self.hello is None:
                    raise StreamBroken("a snapshot came before the hello")
                self._step(message.seq)
                self._residency.clear()
                self._note(message.adapters)
                self.in_step = True
                self.out_since = None
            case Delta():
                self._step(message.seq)
                self._note(message.adapters)
            case Heartbeat():
                self._step(message.seq)

    def _greet(self, hello: Hello, now: float) -> None:
        check_protocol(hello.protocol, f"the engine {hello.replica}")
        if hello.replica != str(self.replica):
            raise StreamBroken(f"it is {hello.replica}, not {self.replica}")
        if self.hello is not None and hello.boot != self.hello.boot:
            self.give_up()
        self.lose(now)
        self.hello = hello

    def _step(self, seq: int) -> None:
        if self._seq is not None and seq != self._seq + 1:
            raise StreamBroken(f"message {seq} followed {self._seq}")
        self._seq = seq

    def _note(self, residences: list[Residence]) -> None:
        for residence in residences:
            key = (residence.ref, residence.digest)
            if residence.residency == "absent":
                self._residency.pop(key, None)
            else:
                self._residency[key] = residence.residency


class Fleet:
    """All known replicas and their readers. `changed` is set whenever something might have become routable."""

    def __init__(
        self,
        client: httpx.AsyncClient,
        state_key: bytes,
        *,
        lost_timeout: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`client` has STATE_TIMEOUT_SECONDS as every timeout: an engine silent for longer gets no more requests.

        After `lost_timeout` seconds out of step the requests it still holds are given up: a lost node
        closes no connection.
        """
        self._lost_timeout = lost_timeout
        self._client = client
        self._state_key = state_key
        self._clock = clock
        self._views: dict[ReplicaId, ReplicaView] = {}
        self._readers: dict[ReplicaId, asyncio.Task[None]] = {}
        self._waiters: set[asyncio.Event] = set()
        self.is_known = False  # endpoints were told, though there may be none; before, nothing could be routed

    def set_endpoints(self, endpoints: dict[ReplicaId, Endpoint]) -> None:
        self.is_known = True
        for replica in self._views.keys() - endpoints.keys():
            self._stop(replica)
        for replica, endpoint in endpoints.items():
            view = self._views.get(replica)
            if view is not None and _same_door(view.endpoint, endpoint):
                view.endpoint = endpoint
            else:
                if view is not None:
                    self._stop(replica)
                self._start(endpoint)
        self._wake()

    def replicas_of(self, pools: tuple[PoolRef, ...]) -> list[ReplicaId]:
        """All replicas of these pools, routable or not: placement is computed over all of them."""
        return [replica for replica in self._views if replica.pool_ref in pools]

    def routable(self, pools: tuple[PoolRef, ...], base_digest: str) -> Iterator[ReplicaView]:
        now = self._clock()
        for replica, view in self._views.items():
            if replica.pool_ref in pools and view.is_routable(base_digest, now):
                yield view

    def views(self) -> list[ReplicaView]:
        """A copy: the thread that answers scrapes reads it too."""
        return list(self._views.values())

    def alive(self) -> int:
        now = self._clock()
        return sum(view.is_routable(view.hello.base_digest, now) for view in self.views() if view.hello)

    @contextlib.contextmanager
    def watching(self) -> Iterator[asyncio.Event]:
        """An event that is set on every change while the context lasts; the waiter clears it."""
        event = asyncio.Event()
        self._waiters.add(event)
        try:
            yield event
        finally:
            self._waiters.discard(event)

    async def close(self) -> None:
        readers = list(self._readers.values())
        for replica in list(self._views):
            self._stop(replica)
        await asyncio.gather(*readers, return_exceptions=True)

    def _wake(self) -> None:
        for event in self._waiters:
            event.set()

    def _start(self, endpoint: Endpoint) -> None:
        view = ReplicaView(endpoint)
        self._views[endpoint.replica] = view
        self._readers[endpoint.replica] = asyncio.create_task(self._follow(view), name=f"state of {endpoint.replica}")

    def _stop(self, replica: ReplicaId) -> None:
        view = self._views.pop(replica)
        view.lose(self._clock())
        self._readers.pop(replica).cancel()
        # A replica that leaves in order finishes what it has; one that is gone never will.
        asyncio.get_running_loop().call_later(self._lost_timeout, view.give_up)

    async def _follow(self, view: ReplicaView) -> None:
        pause = RETRY_FIRST
        while True:
            reason = "the engine closed it"
            try:
                await self._read(view)
            except (httpx.HTTPError, msgspec.DecodeError, StreamBroken, LoraplaneError) as error:
                reason = str(error) or type(error).__name__
            was_in_step = view.in_step
            view.lose(self._clock())
            if view.out_since is not None and self._clock() - view.out_since >= self._lost_timeout:
                view.give_up()
            if was_in_step:
                pause = RETRY_FIRST
                log.warning("the state stream of %s ended: %s", view.replica, reason)
            elif pause == RETRY_FIRST:  # once per outage, not once per try
                log.warning("no state stream from %s: %s", view.replica, reason)
            await asyncio.sleep(pause * random.uniform(0.8, 1.2))  # noqa: S311 - spreads reconnects
            pause = min(pause * 2, RETRY_MAX)

    async def _read(self, view: ReplicaView) -> None:
        endpoint = view.endpoint
        token = engine_credential(self._state_key, endpoint.replica.pool_ref, endpoint.epoch)
        url = f"http://{endpoint.address}:{endpoint.admin_port}/state"
        headers = {"authorization": f"Bearer {token}"}
        async with self._client.stream("GET", url, headers=headers) as answer:
            if answer.status_code != 200:
                raise StreamBroken(f"GET /state answered {answer.status_code}")
            rest = b""
            async for chunk in answer.aiter_raw():
                *lines, rest = (rest + chunk).split(b"\n")
                for line in filter(None, lines):
                    view.hear(_DECODER.decode(line), self._clock())
                if len(rest) > LINE_MAX:
                    raise StreamBroken(f"a message is longer than {LINE_MAX} bytes")
                if view.in_step:
                    self._wake()


_DECODER = msgspec.json.Decoder(StateMessage)


def _same_door(one: Endpoint, other: Endpoint) -> bool:
    return (one.address, one.data_port, one.admin_port, one.epoch) == (
        other.address,
        other.data_port,
        other.admin_port,
        other.epoch,
    )
