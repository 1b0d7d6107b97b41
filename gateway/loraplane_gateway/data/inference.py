"""The way of an inference request through the data gateway (design §3)."""

import asyncio
import datetime
import secrets
import time
from collections.abc import Callable, Coroutine
from typing import Any

from starlette.types import Receive, Scope

from loraplane_core.errors import DeadlineExceeded, InvalidRequest, LoraplaneError, Unavailable, render
from loraplane_gateway.data.accounting import UsageLog
from loraplane_gateway.data.admission import Admission
from loraplane_gateway.data.auth import Authenticator
from loraplane_gateway.data.http import ClientGone, Responder, check_framing, disconnected, header, read_body
from loraplane_gateway.data.metrics import Metrics
from loraplane_gateway.data.proxy import Outcome, Proxy
from loraplane_gateway.data.request import InferenceRequest, parse
from loraplane_gateway.data.resolve import Target, resolve
from loraplane_gateway.data.routing.router import adapter_key
from loraplane_gateway.data.settings import DataSettings
from loraplane_gateway.data.snapshot import Registry
from loraplane_gateway.data.traffic import sticky_key
from loraplane_gateway.data.upstream import call_of
from loraplane_gateway.db.serving import Principal, UsageEvent
from loraplane_gateway.limits.demand import Demand

CLIENT_CLOSED = 499


class Inference:
    def __init__(
        self,
        settings: DataSettings,
        *,
        authenticator: Authenticator,
        registry: Registry,
        admission: Admission,
        demand: Demand,
        proxy: Proxy,
        usage: UsageLog,
        metrics: Metrics,
    ) -> None:
        self._settings = settings
        self._authenticator = authenticator
        self._registry = registry
        self._admission = admission
        self._demand = demand
        self._proxy = proxy
        self._usage = usage
        self._metrics = metrics

    async def handle(self, scope: Scope, receive: Receive, responder: Responder) -> None:
        """Raises LoraplaneError while nothing has been sent; ClientGone at any time."""
        started = time.monotonic()
        check_framing(scope)
        principal = await self._authenticator.authenticate(header(scope, "authorization"))
        if scope["query_string"]:
            raise InvalidRequest("This route takes no query: everything, `model` too, belongs into the body.")
        with self._admission.admit():
            body = await read_body(scope, receive, self._settings.max_body, self._settings.body_timeout)
            request = parse(scope["path"], body)
            key = sticky_key(scope, request)

            def resolved() -> Target:
                return resolve(self._registry.current(), principal.tenant, request.model, key)

            target = resolved()
            outcome = Outcome(target, started)
            self._demand.arrived(adapter_key(target))
            try:
                await self._run(self._forward(scope, request, resolved, outcome, responder), receive, responder)
                outcome.status = responder.status
            except ClientGone:
                outcome.status = CLIENT_CLOSED
                raise
            except Exception as error:
                outcome.status = responder.status or render(error)[0]
                raise
            finally:
                self._settle(principal, outcome, responder.request_id)

    async def _forward(
        self,
        scope: Scope,
        request: InferenceRequest,
        resolved: Callable[[], Target],
        outcome: Outcome,
        responder: Responder,
    ) -> None:
        async def resolve_again() -> Target:
            await self._registry.refresh()
            return resolved()

        call = call_of(scope, request, responder.request_id)
        await self._proxy.forward(call, outcome, responder, resolve_again)

    async def _run(self, work: Coroutine[Any, Any, None], receive: Receive, responder: Responder) -> None:
        """`work` until it ends, the client leaves, or the request's time is over.

        Only here is the work cancelled, and once: a second cancellation could hit its clean-up (G49).
        """
        task = asyncio.create_task(work, name=f"request {responder.request_id}")
        gone = asyncio.create_task(disconnected(receive), name=f"client of {responder.request_id}")
        try:
            await asyncio.wait({task, gone}, timeout=self._settings.request_timeout, return_when="FIRST_COMPLETED")
            if responder.finished:  # the server reports a disconnect then, too; only clean-up is left
                await asyncio.wait({task})
            if not task.done():
                task.cancel()
                await asyncio.wait({task})
                if gone.done():
                    raise ClientGone
                late = DeadlineExceeded(f"The request took longer than {self._settings.request_timeout:g} s.")
                await self._cut_off(responder, late)
                return
        except asyncio.CancelledError:  # the server stops and has waited for its requests long enough
            task.cancel()
            await asyncio.wait({task})
            await self._cut_off(responder, Unavailable("This gateway is stopping.", retry_after=1))
            return
        finally:
            gone.cancel()
        task.result()

    async def _cut_off(self, responder: Responder, error: LoraplaneError) -> None:
        """Tell a client whose request was cancelled from here, in the form that is still possible."""
        if not responder.status:
            raise error
        if not responder.finished:
            await self._proxy.end_broken(responder, error)

    def _settle(self, principal: Principal, outcome: Outcome, request_id: str) -> None:
        target = outcome.target
        adapter = target.adapter.name if target.adapter is not None else target.base_model
        first = outcome.first_byte - outcome.started if outcome.first_byte is not None else None
        self._metrics.served(target.tenant, adapter, outcome.status, first, outcome.residency)
        if outcome.status == 200:
            self._demand.served(time.monotonic() - outcome.started)
        if outcome.first_byte is None:
            return
        prompt = outcome.usage.prompt_tokens if outcome.usage is not None else 0
        # A stream that ended before its usage chunk is settled on what the client got to see (G61).
        completion = outcome.usage.completion_tokens if outcome.usage is not None else outcome.events
        self._metrics.settled(target.tenant, adapter, prompt, completion)
        self._usage.add(
            UsageEvent(
                # The client chooses its request id, so alone it must not decide what counts as a replay.
                request_id=f"{request_id}:{secrets.token_hex(8)}",
                at=datetime.datetime.now(datetime.UTC),
                tenant=principal.tenant,
                key_id=principal.key_id,
                pool=str(target.pools[0]),
                base_model=target.base_model,
                adapter=target.adapter.name if target.adapter is not None else "",
                version=target.version.id.version if target.version is not None else 0,
                status=outcome.status,
                prompt_tokens=prompt,
                completion_tokens=completion,
            )
        )
