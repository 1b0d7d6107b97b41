"""The little of HTTP and ASGI that the data path needs, without a layer that touches bodies."""

import asyncio
import json
import re
import secrets
from collections.abc import Callable, Iterable
from typing import Any

from starlette.types import Receive, Scope, Send

from loraplane_core import headers as names
from loraplane_core.errors import BodyTooLarge, DeadlineExceeded, InvalidRequest, render

RawHeaders = list[tuple[bytes, bytes]]
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
#: How much of an oversized body is read and thrown away so that the client gets to read the 413.
_LINGER_BYTES = 16 << 20
_LINGER_SECONDS = 1.0


class ClientGone(Exception):
    """The client closed the connection; nobody reads an answer."""


class BadFraming(InvalidRequest):
    """Two readers could see the request's body end at different places."""


class BodyLate(DeadlineExceeded):
    pass


def header(scope: Scope, name: str) -> str | None:
    """The first header of that lower-case name."""
    wanted = name.encode()
    return next((value.decode("latin-1") for key, value in scope["headers"] if key == wanted), None)


def request_id(scope: Scope) -> str:
    """The client's x-request-id if it is short and printable, else a new one."""
    given = header(scope, names.REQUEST_ID)
    return given if given and _REQUEST_ID.fullmatch(given) else f"req-{secrets.token_hex(12)}"


def check_framing(scope: Scope) -> None:
    """Refuse a body whose length two readers could see differently (G85). h11 refuses the other odd forms."""
    given = {key for key, _ in scope["headers"]}
    if b"content-length" in given and b"transfer-encoding" in given:
        raise BadFraming("a request carries Content-Length or Transfer-Encoding, never both")


async def read_body(scope: Scope, receive: Receive, limit: int, timeout: float) -> bytes:
    """The whole body, at most `limit` bytes. Raises BodyTooLarge, BodyLate, ClientGone."""
    declared = header(scope, "content-length")
    if declared is not None and int(declared) > limit:  # h11 let only digits through
        await _discard(receive)
        raise _too_large(limit)
    chunks: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(timeout):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone
                chunk = message.get("body", b"")
                size += len(chunk)
                if size > limit:
                    break
                chunks.append(chunk)
                if not message.get("more_body"):
                    return b"".join(chunks)
    except TimeoutError as error:
        raise BodyLate(f"the request body did not arrive within {timeout:g} s") from error
    chunks.clear()
    await _discard(receive)
    raise _too_large(limit)


def _too_large(limit: int) -> BodyTooLarge:
    return BodyTooLarge(f"the request body is larger than {limit} bytes")


async def _discard(receive: Receive) -> None:
    left = _LINGER_BYTES
    try:
        async with asyncio.timeout(_LINGER_SECONDS):
            while left > 0:
                message = await receive()
                if message["type"] == "http.disconnect" or not message.get("more_body"):
                    return
                left -= len(message.get("body", b""))
    except TimeoutError:
        return


async def disconnected(receive: Receive) -> None:
    """Returns when the client has gone; call only after the body has been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


#: After these the rest of what the client sends is not another request.
ENDS_CONNECTION = (BadFraming, BodyTooLarge, BodyLate)


class Responder:
    """Sends the one response of a request, and knows how far it is."""

    def __init__(self, send: Send, request_id: str, ends_connection: Callable[[], bool] = lambda: False) -> None:
        """`ends_connection` is asked when the response begins: whether the client shall send no more on this one."""
        self._send = send
        self._ends_connection = ends_connection
        self.request_id = request_id
        self.status = 0  # 0 = nothing sent yet
        self.finished = False

    async def start(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> None:
        self.status = status
        own = [(names.REQUEST_ID.encode(), self.request_id.encode())]
        if self._ends_connection():
            own.append((b"connection", b"close"))
        await self._send({"type": "http.response.start", "status": status, "headers": [*headers, *own]})

    async def body(self, chunk: bytes, *, more: bool) -> None:
        self.finished = not more
        await self._send({"type": "http.response.body", "body": chunk, "more_body": more})

    async def whole(self, status: int, body: bytes, headers: RawHeaders) -> None:
        length = (b"content-length", str(len(body)).encode())
        await self.start(status, [*(pair for pair in headers if pair[0] != b"content-length"), length])
        await self.body(body, more=False)

    async def json(self, status: int, value: Any, headers: dict[str, str] | None = None) -> None:
        raw = [(b"content-type", b"application/json")]
        raw += [(key.encode(), text.encode("latin-1")) for key, text in (headers or {}).items()]
        # ASCII with escapes: a message that echoes a lone surrogate from the client must still be sendable.
        await self.whole(status, json.dumps(value, separators=(",", ":")).encode(), raw)

    async def error(self, error: BaseException, extra: dict[str, str] | None = None) -> None:
        status, body, headers = render(error)
        await self.json(status, body, {**headers, **(extra or {})})
