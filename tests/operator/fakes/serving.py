"""A small aiohttp application on a free loopback port."""

from typing import Any

import msgspec
from aiohttp import web

from loraplane_core.errors import LoraplaneError, Unauthenticated, render
from loraplane_core.wire import encode


class Served:
    """Starts and stops the application that a subclass routes."""

    def __init__(self, token: str) -> None:
        self.token = token
        self.port = 0
        self._runner: web.AppRunner | None = None

    def routes(self) -> list[web.RouteDef]:
        raise NotImplementedError

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        app = web.Application(middlewares=[self._guard])
        app.add_routes(self.routes())
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    @web.middleware
    async def _guard(self, request: web.Request, handler: Any) -> web.StreamResponse:
        try:
            if request.headers.get("authorization") != f"Bearer {self.token}":
                raise Unauthenticated("wrong credential")
            answer: web.StreamResponse = await handler(request)
            return answer
        except LoraplaneError as error:
            status, body, headers = render(error)
            return web.json_response(body, status=status, headers=headers)
        except ConnectionResetError:  # the operator left the stream
            return web.Response()


def answer(value: object) -> web.Response:
    return web.Response(body=encode(value), content_type="application/json")


async def read(request: web.Request, kind: Any) -> Any:
    return msgspec.json.decode(await request.read(), type=kind)
