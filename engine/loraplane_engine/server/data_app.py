"""The data port: OpenAI's routes, one path for streamed and whole answers (case E16)."""

import logging
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from starlette.routing import Route, Router
from starlette.types import Receive, Scope, Send

from loraplane_core import headers as names
from loraplane_core.errors import ArtifactUnavailable, InvalidRequest, LoraplaneError, ModelNotFound, render
from loraplane_core.jsonbody import parse_object
from loraplane_engine import messages as m
from loraplane_engine.server.adapters import AdapterStore
from loraplane_engine.server.asgi import (
    Endpoint,
    not_found,
    query,
    read_body,
    send_json,
    start_message,
    while_connected,
)
from loraplane_engine.server.core_client import CoreClient
from loraplane_engine.server.generation import Generation, Started
from loraplane_engine.server.metrics import Metrics
from loraplane_engine.server.params import ignored_header
from loraplane_engine.server.protocol import GenerateRequest, RequestReader
from loraplane_engine.server.reference import References, Target
from loraplane_engine.server.render import Renderer, event
from loraplane_engine.server.text import Tokenizer

log = logging.getLogger(__name__)

#: The core's answer to a request whose adapter it evicted a moment ago.
NOT_LOADED = ArtifactUnavailable.code


class ModelCard(msgspec.Struct, kw_only=True):
    id: str
    object: str = "model"
    created: int
    owned_by: str = "loraplane"
    root: str
    parent: str | None = None
    max_model_len: int


class OpenAIRoutes:
    def __init__(
        self,
        *,
        core: CoreClient,
        adapters: AdapterStore,
        reader: RequestReader,
        tokenizer: Tokenizer,
        references: References,
        metrics: Metrics,
        models: list[ModelCard],
        identity: dict[str, str],
        base_digest: str,
        max_body: int,
    ) -> None:
        self._core = core
        self._adapters = adapters
        self._reader = reader
        self._tokenizer = tokenizer
        self._references = references
        self._metrics = metrics
        self._models = models
        self._identity = identity  # replica and boot headers
        self._base_digest = base_digest
        self._max_body = max_body

    def router(self) -> Router:
        routes = [
            Route("/v1/completions", Endpoint("POST", self._completions)),
            Route("/v1/chat/completions", Endpoint("POST", self._chat)),
            Route("/v1/models", Endpoint("GET", self._list_models)),
            Route("/v1/models/{model:path}", Endpoint("GET", self._one_model)),
        ]
        return Router(routes, default=not_found, redirect_slashes=False)

    async def _completions(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._counted(scope, receive, send, self._reader.completion)

    async def _chat(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._counted(scope, receive, send, self._reader.chat)

    async def _list_models(self, scope: Scope, receive: Receive, send: Send) -> None:
        del scope, receive
        await send_json(send, 200, msgspec.json.encode({"object": "list", "data": self._models}), {})

    async def _one_model(self, scope: Scope, receive: Receive, send: Send) -> None:
        del receive
        name = scope["path_params"]["model"]
        for card in self._models:
            if card.id == name:
                await send_json(send, 200, msgspec.json.encode(card), {})
                return
        raise ModelNotFound(name)

    async def _counted(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        read: Callable[[dict[str, Any]], Awaitable[GenerateRequest]],
    ) -> None:
        """Read, generate while the client stays, count the outcome."""
        outcome = "disconnected"
        try:
            body = await self._body(scope, receive)

            async def work() -> None:
                nonlocal outcome
                outcome = await self._answer(scope, send, await read(body), body)

            await while_connected(receive, work())
        except LoraplaneError as error:
            outcome = error.code
            raise
        except Exception:
            outcome = "internal_error"
            raise
        finally:
            self._metrics.requests.labels(outcome).inc()

    async def _body(self, scope: Scope, receive: Receive) -> dict[str, Any]:
        if "model" in query(scope):
            # One source of `model` only: whoever checked the body must have checked what is used (case G11).
            raise InvalidRequest("`model` belongs into the body, not into the URL", param="model")
        return parse_object(await read_body(scope, receive, self._max_body))

    async def _answer(self, scope: Scope, send: Send, request: GenerateRequest, body: dict[str, Any]) -> str:
        """Send the whole answer; returns its outcome for the metric. Errors before the first byte are raised."""
        body.clear()  # the text is tokens now; a long stream need not hold it
        target = self._references.resolve(scope, request.model)
        generation, started = await self._start(request, target)
        try:
            headers = self._headers(scope, request, target, started)
            renderer = Renderer(request, self._tokenizer, scope["request_id"])
            if request.stream:
                outcome = await self._stream(send, generation, renderer, headers)
            else:
                async for pieces in generation.pieces():
                    renderer.fold(pieces)
                await send_json(send, 200, renderer.answer(generation.completion_tokens), headers)
                outcome = "ok"
        finally:
            generation.close()
            self._observe(scope, request, generation, started)
        return outcome

    async def _start(self, request: GenerateRequest, target: Target) -> tuple[Generation, Started]:
        """Load if need be and hand over. Tried again once if the core evicted the adapter in between."""
        for attempt in (1, 2):
            cold = False
            key = None
            if target.adapter is not None:
                cold = await self._adapters.ensure(target.adapter, target.bytes)
                key = m.AdapterKey(str(target.adapter.ref), target.adapter.digest)
            generation = Generation(self._core, self._tokenizer, request)
            try:
                return generation, await generation.start(key, target.tenant, cold=cold)
            except LoraplaneError as error:
                generation.close()
                if error.code != NOT_LOADED or target.adapter is None or attempt == 2:
                    raise
                self._adapters.lost(target.adapter)
            except BaseException:
                generation.close()
                raise
        raise AssertionError("the second attempt returns or raises")

    async def _stream(self, send: Send, generation: Generation, renderer: Renderer, headers: dict[str, str]) -> str:
        headers |= {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-store"}
        await send(start_message(200, headers))
        try:
            async for pieces in generation.pieces():
                await send({"type": "http.response.body", "body": renderer.chunks(pieces), "more_body": True})
        except Exception as error:
            # The status is out, so the error is the last event; no [DONE], which would mean a whole answer.
            if not isinstance(error, LoraplaneError):
                log.exception("request %s failed in its stream", headers[names.REQUEST_ID])
            body = render(error)[1]
            await send({"type": "http.response.body", "body": event(body)})
            return str(body["error"]["code"])
        await send({"type": "http.response.body", "body": renderer.last_chunk(generation.completion_tokens)})
        return "ok"

    def _headers(self, scope: Scope, request: GenerateRequest, target: Target, started: Started) -> dict[str, str]:
        headers = self._identity | {
            names.REQUEST_ID: scope["request_id"],
            names.ADAPTER_ID: target.id_header(self._base_digest),
            names.RESIDENCY: "cold" if started.cold else "hit",
            names.QUEUE_MS: f"{started.queue_ms:.1f}",
        }
        if request.ignored:
            headers[names.IGNORED_PARAMS] = ignored_header(request.ignored)
        return headers

    def _observe(self, scope: Scope, request: GenerateRequest, generation: Generation, started: Started) -> None:
        first = generation.first_token_at
        self._metrics.queue.observe(started.queue_ms / 1000)
        if first is not None:
            residency = "cold" if started.cold else "hit"
            self._metrics.time_to_first_token.labels(residency).observe(first - scope["arrived"])
        self._metrics.prompt_tokens.inc(request.prompt_tokens)
        self._metrics.completion_tokens.inc(generation.completion_tokens)
