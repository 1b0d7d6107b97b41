"""HTTP/1.1 of our listeners below ASGI: a request's head has a deadline, and what is no HTTP is refused in our form.

Needs uvicorn and h11, which the processes that listen bring; nothing else in core imports this.
"""

import asyncio

import h11
import msgspec
from uvicorn.protocols.http.h11_impl import H11Protocol

from loraplane_core.errors import DeadlineExceeded, InvalidRequest, LoraplaneError, error_object

#: From a connection's start, or from the first byte of a later request on it, to the end of that request's head.
HEAD_SECONDS = 15.0


class HeadDeadline(H11Protocol):
    """uvicorn limits only the silence after an answer: connections that send nothing, or a head byte by byte, would
    be kept until the process has no descriptor left.
    """

    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._mind_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget_head()
        super().connection_lost(exc)

    def handle_events(self) -> None:
        super().handle_events()
        self._mind_head()

    def send_400_response(self, msg: str) -> None:
        del msg
        self._refuse(b"400 Bad Request", InvalidRequest("the request is not well-formed HTTP/1.1"))

    def _mind_head(self) -> None:
        """Between two requests the keep-alive time runs; while a body is read or answered, the handler's own."""
        in_head = self.conn.their_state is h11.IDLE and self.timeout_keep_alive_task is None
        if not in_head or self.transport.is_closing():
            self._forget_head()
        elif self._late is None:
            self._late = self.loop.call_later(HEAD_SECONDS, self._head_late)

    def _forget_head(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _head_late(self) -> None:
        error = DeadlineExceeded(f"the head of the request did not arrive within {HEAD_SECONDS:g} seconds")
        self._refuse(b"408 Request Timeout", error)

    def _refuse(self, status: bytes, error: LoraplaneError) -> None:
        answering = self.cycle is not None and self.cycle.response_started and not self.cycle.response_complete
        if not (answering or self.transport.is_closing()):  # into an answer under way nothing may be written
            body = msgspec.json.encode(error_object(error))
            self.transport.write(
                b"HTTP/1.1 %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%b"
                % (status, len(body), body)
            )
        self.transport.close()
