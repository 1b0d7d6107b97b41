"""HTTP/1.1 as both gateway processes speak it: uvicorn's h11 protocol with our refusals and a deadline for heads."""

import asyncio
import json

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from loraplane_core.errors import DeadlineExceeded, InvalidRequest, LoraplaneError, error_object

#: From the first byte (of a new connection: from its start) to the end of the request's head.
HEAD_SECONDS = 15.0


class JsonH11Protocol(H11Protocol):
    """Malformed requests are refused in our error form; a head that never ends does not hold its connection for ever.

    uvicorn limits only the silence after a response, so connections that send nothing, or a head byte by
    byte, would pile up until the process has no descriptor left.
    """

    _head_deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_watch()
        super().connection_lost(exc)

    def handle_events(self) -> None:
        super().handle_events()
        self._watch_head()

    def send_400_response(self, msg: str) -> None:
        self._refuse(b"400 Bad Request", InvalidRequest("The HTTP request is malformed."))

    def _watch_head(self) -> None:
        """A deadline runs exactly while part of a head is awaited; between requests the keep-alive time does."""
        awaited = self.conn.their_state is h11.IDLE and self.timeout_keep_alive_task is None
        if not awaited or self.transport.is_closing():
            self._end_watch()
        elif self._head_deadline is None:
            self._head_deadline = self.loop.call_later(HEAD_SECONDS, self._head_is_late)

    def _end_watch(self) -> None:
        if self._head_deadline is not None:
            self._head_deadline.cancel()
            self._head_deadline = None

    def _head_is_late(self) -> None:
        late = DeadlineExceeded(f"The head of the request did not arrive within {HEAD_SECONDS:g} s.")
        self._refuse(b"408 Request Timeout", late)

    def _refuse(self, status: bytes, error: LoraplaneError) -> None:
        if self.transport.is_closing():
            return
        body = json.dumps(error_object(error)).encode()
        self.transport.write(
            b"HTTP/1.1 %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%b"
            % (status, len(body), body)
        )
        self.transport.close()
