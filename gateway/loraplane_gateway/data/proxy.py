"""One inference request after it was resolved: lease, send, relay, and again elsewhere before the first byte.

Nothing reaches the client before the engine's first byte is here, so until then another replica can
answer; after it a failure ends the stream with a typed error event. Unstreamed answers are relayed whole.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial

import httpx
import msgspec

from loraplane_core import headers as names
from loraplane_core.errors import (
    ArtifactUnavailable,
    DeadlineExceeded,
    LoraplaneError,
    NoReplica,
    Unavailable,
    error_object,
    from_wire,
    render,
)
from loraplane_gateway.data import sse
from loraplane_gateway.data.admission import RetryBudget
from loraplane_gateway.data.http import RawHeaders, Responder
from loraplane_gateway.data.metrics import Metrics
from loraplane_gateway.data.resolve import Target
from loraplane_gateway.data.routing.router import Lease, Process, Router
from loraplane_gateway.data.upstream import Call, Engines, ReplicaFailed, ReplicaSilent, passed_back, pieces_of, whole

log = logging.getLogger(__name__)
_STREAM_HEADERS = [(b"cache-control", b"no-cache, no-transform"), (b"x-accel-buffering", b"no")]
EVENT_STREAM = "text/event-stream"


@dataclass(slots=True)
class Outcome:
    """What settling needs; filled as the request goes on, so that it is right whenever the request ends."""

    target: Target
    started: float
    status: int = 0
    dispatched: bool = False
    first_byte: float | None = None
    residency: str = ""  # as the engine that answers says
    usage: sse.Usage | None = None
    events: int = 0


class _Refused(Exception):
    """An engine's answer other than 200, read whole."""

    def __init__(self, status: int, body: bytes, headers: RawHeaders) -> None:
        super().__init__(status)
        self.status = status
        self.body = body
        self.headers = headers
        self.code = _code(body)

    @property
    def elsewhere(self) -> bool:
        # 401 and 403 are between the gateway and the engine, and never the client's to see.
        # The artifact's source is one for all replicas, so nobody else would get it either.
        # 410 of a version that was resolved again: it is served, and only that engine has yet to learn it.
        return self.status in (401, 403, 410) or (self.status == 503 and self.code != ArtifactUnavailable.code)


@dataclass(slots=True)
class _Attempts:
    left: int
    route_by: float
    tried: set[Process] = field(default_factory=set)
    refused: _Refused | None = None
    resolved_again: bool = False


class Proxy:
    def __init__(
        self,
        router: Router,
        engines: Engines,
        metrics: Metrics,
        *,
        retries: int,
        route_timeout: float,
        max_response: int,
    ) -> None:
        self._router = router
        self._engines = engines
        self._metrics = metrics
        self._budget = RetryBudget()
        self._retries = retries
        self._route_timeout = route_timeout
        self._max_response = max_response

    async def forward(
        self, call: Call, outcome: Outcome, responder: Responder, resolve_again: Callable[[], Awaitable[Target]]
    ) -> None:
        """Answers the client. Raises LoraplaneError only while nothing has been sent.

        `resolve_again` is asked once, when an engine says that the adapter was withdrawn.
        """
        attempts = _Attempts(self._retries, time.monotonic() + self._route_timeout)
        while True:
            try:
                await self._attempt(call, outcome, responder, attempts)
                self._budget.earn()
                return
            except ReplicaFailed as failure:
                log.warning("request %s: %s", call.request_id, failure)
                self._again(attempts, "failed")
            except ReplicaSilent as error:
                raise DeadlineExceeded("The engine did not answer in time.") from error
            except _Refused as refused:
                if refused.status == 410 and not attempts.resolved_again:
                    attempts.resolved_again = True
                    attempts.tried.clear()
                    outcome.target = await resolve_again()
                elif refused.elsewhere:
                    attempts.refused = refused
                    attempts.route_by = 0.0  # it did answer: ask another one that is there, but wait for none
                    if not self._may_retry(attempts, refused.code or str(refused.status)):
                        await _pass_on(refused, responder)
                        return
                else:
                    await _pass_on(refused, responder)
                    return
            except NoReplica:
                if attempts.refused is None:
                    raise
                await _pass_on(attempts.refused, responder)
                return

    async def _attempt(self, call: Call, outcome: Outcome, responder: Responder, attempts: _Attempts) -> None:
        async with self._router.lease(outcome.target, attempts.tried, attempts.route_by) as lease:
            attempts.tried.add(lease.process)
            outcome.dispatched = True
            work = asyncio.create_task(
                self._exchange(call, outcome, responder, lease), name=f"to {lease.endpoint.replica}"
            )
            with lease.on_loss(partial(_cancel_once, work)):
                try:
                    await asyncio.wait({work})
                except asyncio.CancelledError:
                    _cancel_once(work)
                    await asyncio.wait({work})
                    raise
        if not work.cancelled():
            work.result()
        elif not responder.status:
            raise ReplicaFailed(f"{lease.endpoint.replica} was lost")
        elif not responder.finished:
            await self.end_broken(responder, _lost())

    async def _exchange(self, call: Call, outcome: Outcome, responder: Responder, lease: Lease) -> None:
        async with self._engines.answer(call, outcome.target, lease) as answer:
            if answer.status_code != 200:
                raise await self._refusal(answer)
            outcome.residency = answer.headers.get(names.RESIDENCY, "")
            if answer.headers.get("content-type", "").startswith(EVENT_STREAM):
                await self._relay_stream(answer, call, outcome, responder, lease)
            else:
                await self._relay_whole(answer, outcome, responder)

    def _again(self, attempts: _Attempts, reason: str) -> None:
        if not self._may_retry(attempts, reason):
            raise Unavailable("The replica failed before it answered.", retry_after=1)

    def _may_retry(self, attempts: _Attempts, reason: str) -> bool:
        if attempts.left <= 0 or not self._budget.spend():
            return False
        attempts.left -= 1
        self._metrics.retries.labels(reason).inc()
        return True

    async def _refusal(self, answer: httpx.Response) -> _Refused:
        body = await whole(answer, self._max_response)
        return _Refused(answer.status_code, body, passed_back(answer))

    async def _relay_whole(self, answer: httpx.Response, outcome: Outcome, responder: Responder) -> None:
        body = await whole(answer, self._max_response)
        outcome.usage = sse.usage_of(body)
        outcome.first_byte = time.monotonic()
        await responder.whole(200, body, passed_back(answer))

    async def _relay_stream(
        self, answer: httpx.Response, call: Call, outcome: Outcome, responder: Responder, lease: Lease
    ) -> None:
        scanner = sse.EventScanner(drop_usage=not call.request.wants_usage)
        try:
            async with pieces_of(answer) as pieces:
                async for piece in pieces:
                    ready = scanner.feed(piece)
                    if ready:
                        if not responder.status:
                            _raise_if_refused(ready)
                            outcome.first_byte = time.monotonic()
                            await responder.start(200, [*passed_back(answer), *_STREAM_HEADERS])
                        await responder.body(ready, more=True)
                    outcome.usage, outcome.events = scanner.usage, scanner.events
        except (ReplicaFailed, ReplicaSilent) as failure:
            if not responder.status:
                raise
            log.warning("request %s: %s ended it: %s", call.request_id, lease.endpoint.replica, failure)
            await self.end_broken(responder, _lost())
            return
        if not responder.status:
            raise ReplicaFailed(f"{lease.endpoint.replica}: an empty stream")
        await responder.body(scanner.finish(), more=False)

    async def end_broken(self, responder: Responder, error: LoraplaneError) -> None:
        """End a stream that has begun with an error that clients can read."""
        self._metrics.broken_streams.inc()
        await responder.body(sse.error_event(error_object(error)), more=False)


def _cancel_once(task: "asyncio.Task[None]") -> None:
    """A second cancellation could hit the clean-up after the first (G49)."""
    if not task.cancelling():
        task.cancel()


def _lost() -> Unavailable:
    return Unavailable("The replica failed while it answered.", code="replica_lost")


async def _pass_on(refused: _Refused, responder: Responder) -> None:
    if refused.status in (401, 403):
        log.error("an engine refused this gateway's credential with %d", refused.status)
        raise Unavailable("The engine cannot be used at the moment.", retry_after=5)
    await responder.whole(refused.status, refused.body, refused.headers)


def _raise_if_refused(first: bytes) -> None:
    """An engine that fails after its headers says so in its first event; to the client nothing has begun yet."""
    if not first.startswith(b'data: {"error"'):
        return
    try:
        value = msgspec.json.decode(first.removeprefix(b"data:").partition(b"\n")[0])
    except msgspec.DecodeError:
        return
    status, body, headers = render(from_wire(503, value))
    raw = [(name.encode(), text.encode()) for name, text in headers.items()]
    raise _Refused(status, msgspec.json.encode(body), [(b"content-type", b"application/json"), *raw])


class _ErrorInner(msgspec.Struct):
    code: str | None = None


class _ErrorBody(msgspec.Struct):
    error: _ErrorInner


def _code(body: bytes) -> str:
    try:
        return msgspec.json.decode(body, type=_ErrorBody).error.code or ""
    except msgspec.DecodeError:
        return ""
