"""Our ports: sockets bound early, uvicorn without its own signal handling."""

import asyncio
import contextlib
import socket
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp

from loraplane_core.listener import HeadDeadline

#: Longer than any client's or gateway's own keep-alive, so that the server is not the one that closes
#: a connection just as a request is sent on it.
KEEP_ALIVE_SECONDS = 75
BACKLOG = 1024


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # one handler for the whole process, in its composition


class Listener:
    """One port and its app."""

    def __init__(self, host: str, port: int, app: ASGIApp) -> None:
        self._socket = _bind(host, port)
        self.port: int = self._socket.getsockname()[1]
        self._server = _Server(
            uvicorn.Config(
                app,
                http=HeadDeadline,
                ws="none",
                lifespan="off",
                loop="asyncio",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=None,
            )
        )
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._server.serve(sockets=[self._socket]))

    async def stop(self, drain_seconds: float) -> None:
        """Accept nothing more, let running requests end within `drain_seconds`, then cut them off."""
        self._server.config.timeout_graceful_shutdown = max(1, round(drain_seconds))
        self._server.should_exit = True
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)
        self._socket.close()


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    found = socket.socket(family, socket.SOCK_STREAM)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind((host, port))
        found.listen(BACKLOG)
    except OSError:
        found.close()
        raise
    found.setblocking(False)
    return found
