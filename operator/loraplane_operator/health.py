"""The health and metrics port: /health/live, /health/ready, /metrics. No secrets, no tenant content."""

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from loraplane_operator import metrics

#: The loop turns at least every 30 s; one that has not for this long hangs.
STALLED_SECONDS = 90.0


@asynccontextmanager
async def serve(
    host: str, port: int, *, passed_at: Callable[[], float], turned_at: Callable[[], float]
) -> AsyncIterator[int]:
    """Yields the port it listens on. Monotonic times: `passed_at` of the last whole pass, 0 before the first;
    `turned_at` of the loop's last turn. A loop that turns without a view, because the API server is away, is
    alive: a restart would mend nothing."""

    async def live(_: web.Request) -> web.Response:
        quiet = time.monotonic() - turned_at()
        return web.Response(status=200 if quiet < STALLED_SECONDS else 503, text=f"last turn {quiet:.0f} s ago\n")

    async def ready(_: web.Request) -> web.Response:
        done = passed_at() > 0
        return web.Response(status=200 if done else 503, text="ready\n" if done else "no complete view yet\n")

    async def exposition(_: web.Request) -> web.Response:
        return web.Response(body=generate_latest(metrics.REGISTRY), headers={"content-type": CONTENT_TYPE_LATEST})

    app = web.Application()
    app.add_routes([web.get("/health/live", live), web.get("/health/ready", ready), web.get("/metrics", exposition)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        site = web.TCPSite(runner, host, port)
        await site.start()
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()
