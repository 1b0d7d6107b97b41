"""A fake engine at our own interface: the data port and `/state`, with scripted residency, delays and deaths.

It runs in the test's own loop, on real sockets. `Plan` says how the next request goes; every request and
every client that left early is recorded.
"""

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from loraplane_core.credentials import bearer, engine_credential
from loraplane_core.identity import ReplicaId
from loraplane_core.wire import encode
from loraplane_core.wire.endpoints import Endpoint, to_slice
from loraplane_core.wire.engine import (
    Capacity,
    Delta,
    Heartbeat,
    Hello,
    Load,
    Residence,
    ResidencyClass,
    Snapshot,
    StateMessage,
)
from tests.fakes.serving import cut, halt

HEARTBEAT = 0.2
#: "headers" (nothing sent), "first" (headers sent), "body" (half of an unstreamed body), or so many chunks sent.
Place = str | int
CAPACITY = Capacity(
    slots=4, adapter_bytes=1 << 20, used_bytes=0, host_bytes=1 << 20, kv_tokens=1000, kv_tokens_displaced=0
)


@dataclass(slots=True)
class Plan:
    """How a request goes. `hold` waits at a place until `release`; `die` kills the engine there.

    With `die="drop"` only the connection breaks. An `error_code` at status 200 is a stream's first event.
    """

    tokens: tuple[str, ...] = ("one", "two", "three")
    status: int = 200
    error_code: str = ""
    hold: Place | None = None
    die: Place | None = None
    release: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(slots=True)
class Recorded:
    path: str
    headers: dict[str, str]
    body: dict[str, Any]
    raw: bytes
    reached: asyncio.Event = field(default_factory=asyncio.Event)  # the place it is held at
    gone: asyncio.Event = field(default_factory=asyncio.Event)  # the gateway closed it before its end
    finished: asyncio.Event = field(default_factory=asyncio.Event)


class _Gone(Exception):
    pass


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.up = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.up.set()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class FakeEngine:
    def __init__(self, replica: ReplicaId, base: str, base_digest: str, keys: dict[str, bytes]) -> None:
        """`keys` holds the role keys `data` and `state`."""
        self.replica = replica
        self.base = base
        self.base_digest = base_digest
        self.boot = "boot-1"
        self.epoch = 1
        self.protocol = 1
        self.state_replica = str(replica)
        self.residency: dict[tuple[str, str], ResidencyClass] = {}
        self.requests: list[Recorded] = []
        self.plans: list[Plan] = []  # taken from the front; then `default`
        self.default = Plan()
        self.silent = False  # /state says nothing more, but stays open
        self.state_status = 200
        self.frozen = False  # with `silent`: new readers are accepted and told nothing either, as after SIGSTOP
        self.state_gap = self.state_garbage = False
        self.data_port = self.admin_port = 0
        self._keys = keys
        self._servers: list[_Server] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._wake: set[asyncio.Event] = set()
        self._new = asyncio.Event()

    async def start(self) -> None:
        self.data_port = await self._serve(self._data)
        self.admin_port = await self._serve(self._admin)

    async def _serve(self, app: ASGIApp, port: int = 0) -> int:
        listener = socket.create_server(("127.0.0.1", port))
        config = uvicorn.Config(
            app, ws="none", lifespan="off", interface="asgi3", proxy_headers=False, log_config=None, http="h11"
        )
        server = _Server(config)
        self._servers.append(server)
        self._tasks.append(asyncio.create_task(server.serve(sockets=[listener])))
        async with asyncio.timeout(5):
            await server.up.wait()
        return int(listener.getsockname()[1])

    def kill(self) -> None:
        """As kill -9 looks from outside: listeners and connections are reset."""
        for server in self._servers:
            cut(server)

    def drop_state(self) -> None:
        """The stream breaks; the data port lives on."""
        for connection in list(self._servers[1].server_state.connections):
            connection.transport.abort()

    async def stop(self) -> None:
        for server, task in zip(self._servers, self._tasks, strict=True):
            await halt(server, task)
        self._servers.clear()
        self._tasks.clear()

    def set_residency(self, ref: str, digest: str, residency: ResidencyClass) -> None:
        self.residency[ref, digest] = residency
        for event in self._wake:
            event.set()

    def endpoint(self, *, ready: bool = True, terminating: bool = False) -> Endpoint:
        return Endpoint(
            replica=self.replica,
            address="127.0.0.1",
            data_port=self.data_port,
            admin_port=self.admin_port,
            metrics_port=1,
            ready=ready,
            terminating=terminating,
            epoch=self.epoch,
        )

    def publish(self, folder: Path, *, ready: bool = True, terminating: bool = False) -> Path:
        """Write its EndpointSlice file as the supervisor does."""
        file = folder / f"{self.replica.namespace}.{self.replica.pod}.json"
        temporary = file.with_suffix(".tmp")
        temporary.write_text(json.dumps(to_slice(self.endpoint(ready=ready, terminating=terminating))))
        temporary.replace(file)
        return file

    async def request(self, number: int = 0) -> Recorded:
        """The request of that number, once it is here."""
        async with asyncio.timeout(5):
            while len(self.requests) <= number:
                self._new.clear()
                await self._new.wait()
        return self.requests[number]

    # The data port.

    async def _data(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = {key.decode(): value.decode("latin-1") for key, value in scope["headers"]}
        raw = await _body(receive)
        recorded = Recorded(scope["path"], headers, json.loads(raw), raw)
        self.requests.append(recorded)
        self._new.set()
        plan = self.plans.pop(0) if self.plans else self.default
        expected = engine_credential(self._keys["data"], self.replica.pool_ref, self.epoch)
        gone = asyncio.create_task(_until_disconnect(receive))
        try:
            if bearer(headers.get("authorization")) != expected:
                plan = Plan(status=401, error_code="invalid_api_key")
            await self._answer(plan, recorded, scope, send, gone)
            recorded.finished.set()
        except _Gone:
            recorded.gone.set()
        finally:
            gone.cancel()

    def _drop(self, scope: Scope) -> None:
        for connection in list(self._servers[0].server_state.connections):
            assert isinstance(connection, H11Protocol)
            if connection.cycle is not None and connection.cycle.scope is scope:
                connection.transport.abort()

    async def _answer(
        self, plan: Plan, recorded: Recorded, scope: Scope, send: Send, gone: "asyncio.Task[None]"
    ) -> None:
        async def place(name: Place) -> None:
            if plan.die == name:
                self.kill()
                raise _Gone
            if plan.die == "drop":
                self._drop(scope)
                raise _Gone
            if plan.hold == name:
                recorded.reached.set()
                release = asyncio.create_task(plan.release.wait())
                await asyncio.wait({release, gone}, return_when="FIRST_COMPLETED")
                release.cancel()
            if gone.done():
                raise _Gone

        await place("headers")
        own = self._headers(recorded)
        if plan.status != 200:
            error = {"message": "scripted", "type": "server_error", "param": None, "code": plan.error_code}
            await _whole(send, plan.status, {"error": error}, own)
            return
        text, model = " ".join(plan.tokens), recorded.body["model"]
        usage = {"prompt_tokens": 7, "completion_tokens": len(plan.tokens), "total_tokens": 7 + len(plan.tokens)}
        kind = b"text/event-stream" if recorded.body.get("stream") else b"application/json"
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", kind), *own]})
        if not recorded.body.get("stream"):
            message = {"role": "assistant", "content": text}
            choice = {"index": 0, "text": text, "message": message, "finish_reason": "stop"}
            body = json.dumps(_envelope(recorded.path, model, [choice], usage, whole=True)).encode()
            await place("first")
            await send({"type": "http.response.body", "body": body[:20], "more_body": True})
            await place("body")
            await send({"type": "http.response.body", "body": body[20:], "more_body": False})
            return
        await place("first")
        if plan.error_code:
            error = {"message": "scripted", "type": "server_error", "param": None, "code": plan.error_code}
            await _event(send, {"error": error})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
            return
        for number, token in enumerate(plan.tokens):
            await place(number)
            choice = {"index": 0, "text": token, "delta": {"content": token}, "finish_reason": None}
            await _event(send, _envelope(recorded.path, model, [choice], None, whole=False))
        if (recorded.body.get("stream_options") or {}).get("include_usage"):
            await _event(send, _envelope(recorded.path, model, [], usage, whole=False))
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})

    def _headers(self, recorded: Recorded) -> list[tuple[bytes, bytes]]:
        reference = recorded.headers.get("x-loraplane-adapter", "")
        digest = recorded.headers.get("x-loraplane-digest", "")
        residency = self.residency.get((reference, digest), "absent")
        found = {
            "x-loraplane-adapter-id": f"{reference}#{digest[:12]}" if digest else reference,
            "x-loraplane-replica": str(self.replica),
            "x-loraplane-boot": self.boot,
            "x-loraplane-residency": "hit" if residency in ("device", "host") or not digest else "cold",
            "x-loraplane-queue-ms": "0",
            "x-loraplane-internal": "not for clients",
            "x-request-id": "the engine's own",
        }
        return [(key.encode(), value.encode()) for key, value in found.items()]

    # The admin port.

    async def _admin(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = {key.decode(): value.decode() for key, value in scope["headers"]}
        expected = engine_credential(self._keys["state"], self.replica.pool_ref, self.epoch)
        if self.frozen:
            await _until_disconnect(receive)
            return
        if self.state_status != 200:
            await _whole(send, self.state_status, {}, [])
            return
        if scope["path"] != "/state" or bearer(headers.get("authorization")) != expected:
            await _whole(send, 401, {"error": {"message": "no", "type": "t", "param": None, "code": "c"}}, [])
            return
        await receive()  # the empty body
        gone = asyncio.create_task(_until_disconnect(receive))
        wake = asyncio.Event()
        self._wake.add(wake)
        try:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            if self.state_garbage:
                await send({"type": "http.response.body", "body": b'{"type":"hello"}\n', "more_body": True})
            async for message in self._messages(wake, gone):
                await send({"type": "http.response.body", "body": encode(message) + b"\n", "more_body": True})
        finally:
            self._wake.discard(wake)
            gone.cancel()

    async def _messages(self, wake: asyncio.Event, gone: "asyncio.Task[None]") -> AsyncIterator[StateMessage]:
        yield Hello(
            protocol=self.protocol,
            replica=self.state_replica,
            boot=self.boot,
            base=self.base,
            base_digest=self.base_digest,
            capacity=CAPACITY,
        )
        if self.state_gap:
            yield Heartbeat(seq=9)
        yield Snapshot(seq=1, adapters=self._residences(), capacity=CAPACITY, load=Load())
        seq = 1
        while not gone.done():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(HEARTBEAT):
                    await wake.wait()
            if self.silent:
                continue
            seq += 1
            yield Delta(seq=seq, adapters=self._residences()) if wake.is_set() else Heartbeat(seq=seq)
            wake.clear()

    def _residences(self) -> list[Residence]:
        return [Residence(ref=ref, digest=digest, residency=at) for (ref, digest), at in self.residency.items()]


@asynccontextmanager
async def engines(*fakes: FakeEngine) -> AsyncIterator[None]:
    """Starts them; stops all on leaving."""
    try:
        for fake in fakes:
            await fake.start()
        yield
    finally:
        for fake in fakes:
            await fake.stop()


def _envelope(path: str, model: str, choices: list[Any], usage: Any, *, whole: bool) -> dict[str, Any]:
    kind = "chat.completion" if path.endswith("/chat/completions") else "text_completion"
    if not whole and kind == "chat.completion":
        kind += ".chunk"
    return {"id": "x-1", "object": kind, "created": 1, "model": model, "choices": choices, "usage": usage}


async def _body(receive: Receive) -> bytes:
    body = bytearray()
    while True:
        message: Message = await receive()
        body += message.get("body", b"")
        if not message.get("more_body"):
            return bytes(body)


async def _until_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _whole(send: Send, status: int, value: Any, headers: list[tuple[bytes, bytes]]) -> None:
    raw = [(b"content-type", b"application/json"), *headers]
    await send({"type": "http.response.start", "status": status, "headers": raw})
    await send({"type": "http.response.body", "body": json.dumps(value).encode(), "more_body": False})


async def _event(send: Send, value: Any) -> None:
    await send(
        {"type": "http.response.body", "body": b"data: " + json.dumps(value).encode() + b"\n\n", "more_body": True}
    )
