"""Health and metrics: no credentials, no secrets, no tenant content beyond tenant and adapter names."""

from collections.abc import Callable

from prometheus_client import generate_latest
from starlette.routing import BaseRoute, Route, Router
from starlette.types import Receive, Scope, Send

from loraplane_core.errors import Unavailable
from loraplane_engine.server.asgi import Endpoint, not_found, send_json, start_message
from loraplane_engine.server.metrics import Metrics

HEALTH_PREFIX = "/health/"
_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Health:
    """`why_not` is empty when ready: the base is loaded and the core answers. Never an adapter's business."""

    def __init__(self, why_not: Callable[[], str]) -> None:
        self._why_not = why_not

    def routes(self) -> list[BaseRoute]:
        return [
            Route("/health/live", Endpoint("GET", self._live)),
            Route("/health/ready", Endpoint("GET", self._ready)),
        ]

    async def _live(self, scope: Scope, receive: Receive, send: Send) -> None:
        del scope, receive
        await send_json(send, 200, b'{"live":true}', {})

    async def _ready(self, scope: Scope, receive: Receive, send: Send) -> None:
        del scope, receive
        reason = self._why_not()
        if reason:
            raise Unavailable(reason)
        await send_json(send, 200, b'{"ready":true}', {})


def metrics_router(metrics: Metrics, health: Health) -> Router:
    async def scrape(scope: Scope, receive: Receive, send: Send) -> None:
        del scope, receive
        await send(start_message(200, {"content-type": _CONTENT_TYPE}))
        await send({"type": "http.response.body", "body": generate_latest(metrics.registry)})

    routes: list[BaseRoute] = [Route("/metrics", Endpoint("GET", scrape)), *health.routes()]
    return Router(routes, default=not_found, redirect_slashes=False)
