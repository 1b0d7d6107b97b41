"""The admin port (wire/engine.py lists its routes)."""

from collections.abc import Callable

from starlette.routing import Route, Router
from starlette.types import Receive, Scope, Send

from loraplane_core import headers as names
from loraplane_core.errors import InvalidParameter, Unavailable
from loraplane_core.wire import decode, encode
from loraplane_core.wire.engine import Adapters, ModelInfo, Pin, PutAdapter
from loraplane_engine.server.adapters import AdapterStore
from loraplane_engine.server.asgi import (
    Endpoint,
    Handler,
    header,
    not_found,
    query,
    read_body,
    send_json,
    start_message,
    while_connected,
)
from loraplane_engine.server.reference import admin_id
from loraplane_engine.server.state import StateHub

_BODY_LIMIT = 64 << 10
_MAX_DRAIN_SECONDS = 600.0
_DEFAULT_DRAIN_SECONDS = 30.0
_MAX_PUT_SECONDS = 600.0


class AdminRoutes:
    """`info` is None until the base is loaded; until then everything answers 503."""

    def __init__(
        self,
        *,
        adapters: AdapterStore,
        hub: StateHub,
        replica: str,
        boot: str,
        info: Callable[[], ModelInfo | None],
    ) -> None:
        self._adapters = adapters
        self._hub = hub
        self._replica = replica
        self._boot = boot
        self._info = info

    def router(self) -> Router:
        one = "/adapters/{tenant}/{adapter}/{version}"
        routes = [
            Route("/adapters", Endpoint("GET", self._list)),
            Route("/state", Endpoint("GET", self._state)),
            Route("/model", Endpoint("GET", self._model)),
            Route(one, _PutOrDelete(self._put, self._delete)),
            Route(f"{one}/pin", Endpoint("POST", self._pin)),
        ]
        return Router(routes, default=not_found, redirect_slashes=False)

    async def _put(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._ready()
        wanted = decode(await read_body(scope, receive, _BODY_LIMIT), PutAdapter)
        if not 0 < wanted.deadline_s <= _MAX_PUT_SECONDS:
            raise InvalidParameter(f"deadline_s lies between 0 and {_MAX_PUT_SECONDS:g}", param="deadline_s")
        if wanted.bytes < 0:
            raise InvalidParameter("bytes is negative", param="bytes")
        adapter = admin_id(*_path(scope), wanted.digest)
        await send_json(send, 200, encode(await self._adapters.put(adapter, wanted)), {})

    async def _delete(self, scope: Scope, receive: Receive, send: Send) -> None:
        del receive
        self._ready()
        adapter = admin_id(*_path(scope), header(scope, names.DIGEST))
        residence = await self._adapters.delete(adapter, _drain(query(scope).get("drain_s")))
        await send_json(send, 200, encode(residence), {})

    async def _pin(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._ready()
        wanted = decode(await read_body(scope, receive, _BODY_LIMIT), Pin)
        adapter = admin_id(*_path(scope), header(scope, names.DIGEST))
        await send_json(send, 200, encode(await self._adapters.pin(adapter, wanted)), {})

    async def _list(self, scope: Scope, receive: Receive, send: Send) -> None:
        del scope, receive
        self._ready()
        adapters = Adapters(boot=self._boot, adapters=self._adapters.residences(), capacity=self._hub.capacity())
        await send_json(send, 200, encode(adapters), {})

    async def _model(self, scope: Scope, receive: Receive, send: Send) -> None:
        del scope, receive
        await send_json(send, 200, encode(self._ready()), {})

    async def _state(self, scope: Scope, receive: Receive, send: Send) -> None:
        info = self._ready()
        await read_body(scope, receive, _BODY_LIMIT)
        await send(start_message(200, {"content-type": "application/x-ndjson", "cache-control": "no-store"}))

        async def write(line: bytes) -> None:
            await send({"type": "http.response.body", "body": line, "more_body": True})

        async def work() -> None:
            await self._hub.serve(
                write, replica=self._replica, boot=self._boot, base=info.base, base_digest=info.base_digest
            )
            await send({"type": "http.response.body", "body": b""})

        await while_connected(receive, work())

    def _ready(self) -> ModelInfo:
        info = self._info()
        if info is None:
            raise Unavailable("the model is still loading")
        return info


class _PutOrDelete:
    def __init__(self, put: Handler, delete: Handler) -> None:
        self._put, self._delete = Endpoint("PUT", put), Endpoint("DELETE", delete)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await (self._put if scope["method"] == "PUT" else self._delete)(scope, receive, send)


def _path(scope: Scope) -> tuple[str, str, str]:
    path = scope["path_params"]
    return path["tenant"], path["adapter"], path["version"]


def _drain(text: str | None) -> float:
    if text is None:
        return _DEFAULT_DRAIN_SECONDS
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= _MAX_DRAIN_SECONDS:
        raise InvalidParameter(f"drain_s lies between 0 and {_MAX_DRAIN_SECONDS:g}", param="drain_s")
    return seconds
