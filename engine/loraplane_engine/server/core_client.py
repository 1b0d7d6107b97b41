"""The server's end of messages.py: one zmq PAIR socket, messages routed to whoever waits for them."""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable

import zmq
import zmq.asyncio

from loraplane_core.errors import LoraplaneError, Unavailable
from loraplane_engine import messages as m

log = logging.getLogger(__name__)

RequestMessage = m.Scheduled | m.Output | m.RequestFailed
Sink = Callable[[RequestMessage | LoraplaneError], None]


class CoreClient:
    """`on_adapter` and `on_stats` are called for messages that belong to no request."""

    def __init__(
        self,
        endpoint: str,
        *,
        on_adapter: Callable[[m.AdapterState | m.AdapterFailed], None],
        on_stats: Callable[[m.StepStats], None],
    ) -> None:
        self._on_adapter = on_adapter
        self._on_stats = on_stats
        self._sinks: dict[str, Sink] = {}
        self._dead: LoraplaneError | None = None
        self.ready: asyncio.Future[m.CoreReady] = asyncio.get_running_loop().create_future()
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.PAIR)
        # The server bounds what is in flight (generation.py), so the queue to the core needs no bound.
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(endpoint)

    @property
    def in_flight(self) -> int:
        return len(self._sinks)

    def send(self, *batch: m.ToCore) -> None:
        """One zmq message. Never blocks; lost when the core is dead."""
        if self._dead is None and batch:
            self._socket.send_multipart([m.encoder.encode(message) for message in batch])

    def submit(self, batch: Iterable[tuple[m.Generate, Sink]]) -> None:
        """Hand requests over together, so that they can share their first step."""
        if self._dead is not None:
            raise self._dead.with_traceback(None)
        pairs = list(batch)
        for message, sink in pairs:
            self._sinks[message.request] = sink
        self.send(*(message for message, _ in pairs))

    def abort(self, requests: Iterable[str]) -> None:
        """Stop those that still run; their sinks hear nothing more."""
        running = [request for request in requests if self._sinks.pop(request, None) is not None]
        self.send(*(m.Abort(request=request) for request in running))

    async def run(self) -> None:
        """Route what the core says until cancelled."""
        while True:
            for frame in await self._socket.recv_multipart():
                self._route(m.from_core_decoder.decode(frame))

    def fail(self, error: LoraplaneError) -> None:
        """The core is gone: everybody who waits hears it, and nobody can ask again."""
        self._dead = error
        sinks, self._sinks = self._sinks, {}
        for sink in sinks.values():
            sink(error)
        if not self.ready.done():
            self.ready.set_exception(error)

    def close(self) -> None:
        if self._dead is None:
            self._dead = Unavailable("the engine is stopping")
        if not self.ready.done():
            self.ready.cancel()
        with contextlib.suppress(zmq.ZMQError):
            self._socket.close(linger=500)  # let Shutdown out
        self._context.term()

    def _route(self, message: m.FromCore) -> None:
        if isinstance(message, m.Output):
            # An unknown request was aborted; its last tokens may still have been on the way.
            sink = self._sinks.pop(message.request, None) if message.finish else self._sinks.get(message.request)
            if sink is not None:
                sink(message)
        elif isinstance(message, m.Scheduled):
            sink = self._sinks.get(message.request)
            if sink is not None:
                sink(message)
        elif isinstance(message, m.RequestFailed):
            sink = self._sinks.pop(message.request, None)
            if sink is not None:
                sink(message)
        elif isinstance(message, m.AdapterState | m.AdapterFailed):
            self._on_adapter(message)
        elif isinstance(message, m.StepStats):
            self._on_stats(message)
        elif not self.ready.done():
            self.ready.set_result(message)
