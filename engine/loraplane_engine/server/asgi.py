"""What every listener shares: framing checks, bounded bodies, error answers, and noticing who left."""

import asyncio
import contextlib
import logging
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any
from urllib.parse import parse_qsl

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from loraplane_core import headers as names
from loraplane_core.errors import BodyTooLarge, InvalidRequest, NotFound, render

log = logging.getLogger(__name__)

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
#: After refusing a body, this much of it is still read, so that the client sees the refusal and not a reset.
_LINGER_BYTES = 32 << 20
_LINGER_SECONDS = 2.0
#: A body must arrive within this long.
BODY_SECONDS = 60.0


def header(scope: Scope, name: str) -> str | None:
    """The header's value; refuses one given twice, since two readers could pick differently."""
    found = [value for key, value in scope["headers"] if key == name.encode()]
    if len(found) > 1:
        raise InvalidRequest(f"the header {name} is given {len(found)} times")
    return found[0].decode("latin-1") if found else None


def query(scope: Scope) -> dict[str, str]:
    return dict(parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True))


class Guard:
    """Outermost on each port: refuses odd framing, checks credentials, turns errors into answers."""

    def __init__(self, app: ASGIApp, authorize: Callable[[Scope], None]) -> None:
        self._app = app
        self._authorize = authorize

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        request_id = _request_id(scope)
        scope["request_id"] = request_id
        scope["arrived"] = time.perf_counter()
        started = False
        framed = False

        async def watched_send(message: Message) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        try:
            _check_framing(scope)
            framed = True
            self._authorize(scope)
            await self._app(scope, receive, watched_send)
        except Exception as error:
            status, body, headers = render(error)
            if status == 500:
                log.exception("request %s failed", request_id)
            if not started:
                headers[names.REQUEST_ID] = request_id
                if not framed or isinstance(error, BodyTooLarge | BodyTimeout):
                    headers["connection"] = "close"  # what follows on it cannot be trusted to be a request
                await _refuse(receive, send, status, body, headers)


Handler = Callable[[Scope, Receive, Send], Awaitable[None]]


class Endpoint:
    """One method of one path as an ASGI app (Starlette would wrap a plain method for Request objects)."""

    def __init__(self, method: str, handler: Handler) -> None:
        self._method = method
        self._handler = handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] != self._method:
            await not_found(scope, receive, send)
        await self._handler(scope, receive, send)


async def not_found(scope: Scope, receive: Receive, send: Send) -> None:
    del receive, send
    raise NotFound(f"there is no {scope['method']} {scope['path'][:100]}")


async def read_body(scope: Scope, receive: Receive, limit: int) -> bytes:
    """The whole body; refuses one over `limit` as soon as its size is known or reached."""
    length = header(scope, "content-length")
    if length is not None and int(length) > limit:
        raise BodyTooLarge(f"the body has {length} bytes; the limit is {limit}")
    try:
        async with asyncio.timeout(BODY_SECONDS):
            return await _collect(receive, limit)
    except TimeoutError as error:
        raise BodyTimeout(f"the body did not arrive within {BODY_SECONDS:.0f} seconds") from error


class BodyTimeout(InvalidRequest):
    code = "body_timeout"


async def _collect(receive: Receive, limit: int) -> bytes:
    parts = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise InvalidRequest("the client left while sending its body")
        parts += message.get("body", b"")
        if len(parts) > limit:
            raise BodyTooLarge(f"the body is larger than the limit of {limit} bytes")
        if not message.get("more_body"):
            return bytes(parts)


async def while_connected(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Run `work` and cancel it when the client leaves. The request's body must have been read."""
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_left(receive))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
    finally:
        for each in (task, watch):
            each.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)
    if not task.cancelled():
        task.result()


async def send_json(send: Send, status: int, body: bytes, headers: dict[str, str]) -> None:
    await send(start_message(status, headers | {"content-type": "application/json", "content-length": str(len(body))}))
    await send({"type": "http.response.body", "body": body})


def start_message(status: int, headers: dict[str, str]) -> Message:
    encoded = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
    return {"type": "http.response.start", "status": status, "headers": encoded}


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _request_id(scope: Scope) -> str:
    given = [value for key, value in scope["headers"] if key == names.REQUEST_ID.encode()]
    text = given[0].decode("latin-1") if len(given) == 1 else ""
    return text if _REQUEST_ID.fullmatch(text) else f"req-{secrets.token_hex(12)}"


def _check_framing(scope: Scope) -> None:
    """h11 refuses odd Transfer-Encodings itself; both framings at once it lets pass (case G85)."""
    present = {key for key, _ in scope["headers"]}
    if b"content-length" in present and b"transfer-encoding" in present:
        raise InvalidRequest("a request has Content-Length or Transfer-Encoding, not both")


async def _refuse(receive: Receive, send: Send, status: int, body: dict[str, Any], headers: dict[str, str]) -> None:
    """Send an error; after an oversized body, read on for a while so that the client sees it."""
    content = msgspec.json.encode(body)
    headers |= {"content-type": "application/json", "content-length": str(len(content))}
    unread = status == BodyTooLarge.status
    await send(start_message(status, headers))
    await send({"type": "http.response.body", "body": content, "more_body": unread})
    if unread:
        await _linger(receive)
        await send({"type": "http.response.body", "body": b""})


async def _linger(receive: Receive) -> None:
    left = _LINGER_BYTES
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_LINGER_SECONDS):
            while left > 0:
                message = await receive()
                left -= len(message.get("body", b""))
                if message["type"] == "http.disconnect" or not message.get("more_body"):
                    return
