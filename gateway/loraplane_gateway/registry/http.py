"""Reading requests and writing answers: bounded bodies, strict JSON, one renderer of errors."""

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from fastapi import FastAPI
from psycopg import DataError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from loraplane_core import headers
from loraplane_core.credentials import bearer
from loraplane_core.errors import (
    BodyTooLarge,
    DeadlineExceeded,
    InvalidParameter,
    InvalidRequest,
    LoraplaneError,
    NotFound,
    Unavailable,
    error_object,
    render,
)
from loraplane_core.identity import check_name
from loraplane_core.jsonbody import parse_object
from loraplane_core.wire import decode, encode
from loraplane_gateway.db.engine import AWAY, named
from loraplane_gateway.registry.auth import Caller
from loraplane_gateway.registry.state import RegistryState

T = TypeVar("T")
BODY_SECONDS = 15.0
MAX_WAIT_SECONDS = 300.0
log = logging.getLogger("loraplane.registry")


def state_of(request: Request) -> RegistryState:
    state: RegistryState = request.app.state.registry
    return state


async def caller_of(request: Request) -> Caller:
    return await state_of(request).authenticator.caller(bearer(request.headers.get("authorization")))


async def read(request: Request, kind: type[T]) -> T:
    """The body as `kind`. Raises InvalidRequest (also on a duplicate key), BodyTooLarge, DeadlineExceeded."""
    limit = state_of(request).settings.max_body
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for chunk in request.stream():
                body += chunk
                if len(body) > limit:
                    raise BodyTooLarge(f"the body is larger than {limit} bytes")
    except TimeoutError as error:
        raise DeadlineExceeded(f"the body did not arrive within {BODY_SECONDS:.0f} s") from error
    parse_object(bytes(body))
    return decode(bytes(body), kind)


def answer(value: object, status: int = 200) -> Response:
    return Response(encode(value), status_code=status, media_type="application/json")


def number(text: str | None, param: str, *, default: int | None = None) -> int:
    """A non-negative integer from a path or a query."""
    if text is None and default is not None:
        return default
    if text is None or not (text.isascii() and text.isdigit()) or len(text) > 18:
        raise InvalidParameter(f"{param} must be a non-negative integer", param=param)
    return int(text)


def wait_seconds(request: Request) -> float:
    """`?wait=SECONDS`; 0 when absent."""
    text = request.query_params.get("wait")
    if text is None:
        return 0.0
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= MAX_WAIT_SECONDS:
        raise InvalidParameter(f"wait must be between 0 and {MAX_WAIT_SECONDS:.0f} seconds", param="wait")
    return seconds


def error_answer(error: BaseException) -> Response:
    status, body, extra = render(error)
    return JSONResponse(body, status_code=status, headers=extra)


async def _refused(_: Request, error: Exception) -> Response:
    return error_answer(error)


async def _no_database(_: Request, error: Exception) -> Response:
    log.warning("Postgres did not answer: %s", named(error))
    return error_answer(Unavailable("the registry's database does not answer", code="database_unavailable"))


async def _not_storable(_: Request, error: Exception) -> Response:
    return error_answer(InvalidRequest("a value cannot be stored: it is out of range or holds a NUL"))


async def _framework(_: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    if status == 404:
        return error_answer(NotFound("there is no such route"))
    refusal = InvalidRequest("the method is not allowed here", code="method_not_allowed")
    extra = dict(error.headers or {}) if isinstance(error, HTTPException) else {}
    return JSONResponse(error_object(refusal), status_code=status, headers=extra)


def new_app(state: RegistryState) -> FastAPI:
    """An app whose every refusal comes from the one renderer; unknown exceptions are logged by the server as 500."""
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
    app.state.registry = state
    handlers: dict[type[Exception], Callable[[Request, Exception], Awaitable[Response]]] = {
        LoraplaneError: _refused,
        **dict.fromkeys(AWAY, _no_database),
        DataError: _not_storable,
        HTTPException: _framework,
        Exception: _refused,
    }
    for kind, handler in handlers.items():
        app.add_exception_handler(kind, handler)
    app.add_middleware(RequestIds)
    return app


class RequestIds:
    """Gives every answer an x-request-id, the client's own when it is harmless."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        name = headers.REQUEST_ID.encode()
        given = next((value for key, value in scope["headers"] if key == name), b"")
        request_id = (
            given if 0 < len(given) <= 64 and given.replace(b"-", b"").isalnum() else secrets.token_hex(8).encode()
        )

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", []), (name, request_id)]}
            await send(message)

        await self._app(scope, receive, send_with_id)


def path(request: Request, name: str) -> str:
    value: Any = request.path_params[name]
    return str(value)


def tenant_of(request: Request) -> str:
    return check_name(path(request, "tenant"), "tenant")


def adapter_of(request: Request) -> str:
    return check_name(path(request, "adapter"), "adapter")
