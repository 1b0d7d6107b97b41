"""The composition root: every part is made, started and released here; `App` is the ASGI application."""

import asyncio
import logging
import os
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict

import httpx
from starlette.types import Receive, Scope, Send

from loraplane_core.credentials import read_key
from loraplane_core.errors import InvalidRequest, LoraplaneError, ModelNotFound, NotFound, Unavailable
from loraplane_core.identity import ReplicaId
from loraplane_core.wire.engine import STATE_TIMEOUT_SECONDS
from loraplane_gateway.data.accounting import UsageLog
from loraplane_gateway.data.admission import Admission
from loraplane_gateway.data.auth import Authenticator
from loraplane_gateway.data.http import ENDS_CONNECTION, ClientGone, Responder, check_framing, header, request_id
from loraplane_gateway.data.inference import Inference
from loraplane_gateway.data.metrics import Metrics
from loraplane_gateway.data.proxy import Proxy
from loraplane_gateway.data.resolve import ListedModel, list_models
from loraplane_gateway.data.routing.endpoints import EndpointFolder
from loraplane_gateway.data.routing.inflight import InFlight
from loraplane_gateway.data.routing.replicas import Fleet
from loraplane_gateway.data.routing.router import Router
from loraplane_gateway.data.routing.slices import ApiServer, EndpointSlices
from loraplane_gateway.data.routing.spread import Spread
from loraplane_gateway.data.settings import DataSettings
from loraplane_gateway.data.snapshot import Registry
from loraplane_gateway.data.upstream import Engines, new_client
from loraplane_gateway.db.engine import create_engine
from loraplane_gateway.db.serving import ServingRepository, Snapshot
from loraplane_gateway.db.sessions import session_maker
from loraplane_gateway.limits.demand import Demand
from loraplane_gateway.limits.ledger import Ledger
from loraplane_gateway.limits.redis import RedisPort
from loraplane_gateway.limits.revocations import Revocations

log = logging.getLogger(__name__)
INFERENCE_PATHS = frozenset({"/v1/completions", "/v1/chat/completions"})
MODELS_PATH = "/v1/models"
RESTART_SECONDS = 1.0
Jobs = dict[str, Callable[[], Awaitable[None]]]
_UNPOOLED = httpx.Limits(max_connections=None, max_keepalive_connections=0)


class MethodNotAllowed(InvalidRequest):
    status = 405
    code = "method_not_allowed"


class App:
    """Routes; everything that is not listed here is 404."""

    def __init__(
        self,
        inference: Inference,
        authenticator: Authenticator,
        registry: Registry,
        in_flight: InFlight,
        *,
        fleet: Fleet,
        metrics: Metrics,
    ) -> None:
        self._inference = inference
        self._authenticator = authenticator
        self._registry = registry
        self._in_flight = in_flight
        self._fleet = fleet
        self.metrics = metrics
        self.draining = False

    @property
    def is_ready(self) -> bool:
        return self._registry.is_loaded and self._fleet.is_known and not self.draining

    @property
    def snapshot(self) -> Snapshot:
        return self._registry.current()

    def load(self, replica: ReplicaId) -> float:
        """Requests in flight there, of all gateways."""
        return self._in_flight.load(replica)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise RuntimeError(f"this application does not speak {scope['type']}")
        responder = Responder(send, request_id(scope), lambda: self.draining)
        try:
            await self._route(scope, receive, responder)
        except ClientGone:
            self.metrics.disconnects.inc()
        except Exception as error:
            await self._fail(error, responder)

    async def _route(self, scope: Scope, receive: Receive, responder: Responder) -> None:
        method, path = scope["method"], scope["path"]
        if path in INFERENCE_PATHS:
            _allow(method, "POST")
            await self._inference.handle(scope, receive, responder)
        elif path == MODELS_PATH or path.startswith(MODELS_PATH + "/"):
            _allow(method, "GET")
            await self._models(scope, path.removeprefix(MODELS_PATH).removeprefix("/"), responder)
        elif path in ("/health/live", "/health/ready"):
            _allow(method, "GET")
            await self._health(path.endswith("ready"), responder)
        else:
            raise NotFound(f"Unknown request URL: {method} {path[:200]}")

    async def _models(self, scope: Scope, wanted: str, responder: Responder) -> None:
        check_framing(scope)
        principal = await self._authenticator.authenticate(header(scope, "authorization"))
        models = list_models(self._registry.current(), principal.tenant)
        if not wanted:
            await responder.json(200, {"object": "list", "data": [_card(model) for model in models]})
            return
        found = next((model for model in models if model.id == wanted), None)
        if found is None:
            raise ModelNotFound(wanted)
        await responder.json(200, _card(found))

    async def _health(self, ready: bool, responder: Responder) -> None:
        if ready and self.draining:
            raise Unavailable("shutting down")
        if ready:
            self._registry.current()
        if ready and not self._fleet.is_known:
            raise Unavailable("where engines are is not known yet")
        await responder.json(200, {"status": "ok"})

    async def _fail(self, error: Exception, responder: Responder) -> None:
        if not isinstance(error, LoraplaneError):
            log.error("request %s failed", responder.request_id, exc_info=error)
        if responder.status:  # too late to say anything; the server closes the connection
            raise error
        if isinstance(error, LoraplaneError):
            self.metrics.refused.labels(error.code).inc()
        extra = {"connection": "close"} if isinstance(error, ENDS_CONNECTION) else {}
        await responder.error(error, extra)


def _allow(method: str, allowed: str) -> None:
    if method != allowed:
        raise MethodNotAllowed(f"Only {allowed} is allowed here.")


def _card(model: ListedModel) -> dict[str, object]:
    return {"object": "model", "root": model.parent or model.id, **asdict(model)}


@asynccontextmanager
async def running(settings: DataSettings) -> AsyncIterator[App]:
    """The application with everything behind it started; on leaving, all of it is released."""
    async with AsyncExitStack() as stack:
        metrics = Metrics()
        database_url = settings.database_url.get_secret_value()
        engine = create_engine(database_url, application="loraplane-data")
        stack.push_async_callback(engine.dispose)
        repository = ServingRepository(session_maker(engine))
        authenticator = Authenticator(
            repository, read_key(settings.key_pepper_file), ttl=settings.key_ttl, limit=settings.snapshot_limit
        )
        registry = Registry(repository, authenticator, database_url, limit=settings.snapshot_limit)
        usage = UsageLog(repository, metrics.usage_dropped.inc)
        stack.push_async_callback(usage.close)
        jobs: Jobs = {"registry": registry.run, "usage": usage.run}
        demand, in_flight = _shared(settings, authenticator, metrics, stack, jobs)
        fleet = await _fleet(settings, metrics, stack, jobs)
        spread = Spread(settings.target_in_flight, asyncio.get_running_loop().time)
        router = Router(fleet, in_flight, spread, demand.concurrency)
        client = new_client(
            connect=settings.connect_timeout, silence=settings.silence_timeout, connections=settings.max_in_flight
        )
        await stack.enter_async_context(client)
        proxy = Proxy(
            router,
            Engines(client, read_key(settings.data_key_file)),
            metrics,
            retries=settings.retries,
            route_timeout=settings.route_timeout,
            max_response=settings.max_response,
        )
        admission = Admission(settings.max_in_flight)
        _observe(metrics, registry, admission, in_flight, usage)
        inference = Inference(
            settings,
            authenticator=authenticator,
            registry=registry,
            admission=admission,
            demand=demand,
            proxy=proxy,
            usage=usage,
            metrics=metrics,
        )
        await stack.enter_async_context(_kept(jobs))  # last in, first out: no job outlives what it uses
        yield App(inference, authenticator, registry, in_flight, fleet=fleet, metrics=metrics)


def _shared(
    settings: DataSettings, authenticator: Authenticator, metrics: Metrics, stack: AsyncExitStack, jobs: Jobs
) -> tuple[Demand, InFlight]:
    """What the gateways share through Redis; without it each one has its own."""
    if settings.redis_url is None:
        return Demand(None), InFlight(lambda _: 0.0, lambda: None)
    url = settings.redis_url.get_secret_value()
    redis = RedisPort(url)
    stack.push_async_callback(redis.close)
    metrics.gauge("redis_away", "1 while the breaker on Redis is open", lambda: float(redis.is_away))
    demand = Demand(redis)
    jobs["demand"] = demand.run
    ledger = Ledger(redis, f"gw-{secrets.token_hex(8)}", lambda: _by_name(in_flight))
    in_flight = InFlight(lambda replica: ledger.others(str(replica)), ledger.changed)
    jobs["ledger"] = ledger.run
    revocations = Revocations(url, lambda key_id: authenticator.drop_keys([key_id]), authenticator.distrust)
    jobs["revocations"] = revocations.run
    return demand, in_flight


async def _fleet(settings: DataSettings, metrics: Metrics, stack: AsyncExitStack, jobs: Jobs) -> Fleet:
    state_client = await stack.enter_async_context(
        httpx.AsyncClient(timeout=STATE_TIMEOUT_SECONDS, limits=_UNPOOLED, trust_env=False)
    )
    fleet = Fleet(state_client, read_key(settings.state_key_file), lost_timeout=settings.lost_timeout)
    stack.push_async_callback(fleet.close)
    jobs["endpoints"] = await _endpoints(settings, fleet, stack)
    metrics.gauge("replicas", "Replicas known from endpoints", lambda: len(fleet.views()))
    metrics.gauge(
        "residences",
        "Adapter versions on replicas, each replica counted",
        lambda: sum(v.residences for v in fleet.views()),
    )
    metrics.gauge("replicas_alive", "Replicas that are ready and whose /state is in step", fleet.alive)
    return fleet


async def _endpoints(settings: DataSettings, fleet: Fleet, stack: AsyncExitStack) -> Callable[[], Awaitable[None]]:
    if settings.endpoints_dir is not None:
        return EndpointFolder(settings.endpoints_dir, fleet.set_endpoints).watch
    api = ApiServer.in_cluster(os.environ)
    client = await stack.enter_async_context(api.client())
    return EndpointSlices(client, api.headers, settings.watched_namespaces, fleet.set_endpoints).watch


def _observe(metrics: Metrics, registry: Registry, admission: Admission, in_flight: InFlight, usage: UsageLog) -> None:
    metrics.gauge("snapshot_age_seconds", "Since Postgres confirmed the registry snapshot", lambda: registry.age)
    metrics.gauge("in_flight", "Requests admitted and not finished", lambda: admission.admitted)
    metrics.gauge("dispatched", "Requests dispatched to replicas", lambda: in_flight.dispatched)
    metrics.gauge(
        "released", "Dispatched requests that ended; equal to dispatched when idle", lambda: in_flight.released
    )
    metrics.gauge("usage_queued", "Usage events not written yet", lambda: len(usage))


def _by_name(in_flight: InFlight) -> dict[str, int]:
    return {str(replica): count for replica, count in in_flight.own().items()}


@asynccontextmanager
async def _kept(jobs: Jobs) -> AsyncIterator[None]:
    """Runs endless jobs. One that fails is logged and started again; all end with the context."""

    async def keep(name: str, job: Callable[[], Awaitable[None]]) -> None:
        while True:
            try:
                await job()
            except Exception:
                log.exception("the job %s failed and is started again", name)
            await asyncio.sleep(RESTART_SECONDS)

    tasks = [asyncio.create_task(keep(name, job), name=name) for name, job in jobs.items()]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
