"""`loraplane-gateway data`: settings, listeners, signals, ports file."""

import asyncio
import logging
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import uvicorn
from prometheus_client import start_http_server
from pydantic import ValidationError

from loraplane_core.files import write_ports
from loraplane_core.listener import HeadDeadline
from loraplane_gateway.data.app import App, running
from loraplane_gateway.data.settings import DataSettings
from loraplane_gateway.problems import problems
from loraplane_gateway.secret_files import secret_files

log = logging.getLogger("loraplane.data")
HEADERS_MAX = 64 << 10
KEEP_ALIVE_SECONDS = 75
BACKLOG = 2048
CUT_OFF_SECONDS = 3.0


class Server(uvicorn.Server):
    """Leaves signals to `serve`, so that a stop by SIGTERM ends with status 0; ends after its last request."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        if self.server_state.tasks:  # cancelled a moment ago; they still tell their clients and settle
            await asyncio.wait(set(self.server_state.tasks), timeout=CUT_OFF_SECONDS)


def run() -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    try:
        settings = DataSettings(**secret_files())  # and from the environment
    except ValidationError as error:
        for problem in problems(error):
            print(f"loraplane-gateway data: {problem}", file=sys.stderr)  # noqa: T201
        return 2
    try:
        asyncio.run(serve(settings))
    except OSError as error:
        print(f"loraplane-gateway data: cannot listen: {error}", file=sys.stderr)  # noqa: T201
        return 1
    return 0


async def serve(settings: DataSettings) -> None:
    """Serves until SIGTERM or SIGINT. Raises OSError when an address cannot be had."""
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server((settings.host, settings.port), backlog=BACKLOG))
        ports = {"data": listener.getsockname()[1]}
        async with running(settings) as app:
            if settings.metrics_port is not None:
                ports["metrics"] = stack.enter_context(_metrics_listener(app, settings.host, settings.metrics_port))
            server = make_server(app, settings)
            loop = asyncio.get_running_loop()
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, _stop, server, app, settings.linger)
            if settings.ports_file is not None:
                write_ports(settings.ports_file, ports)
            log.info("listening on %s, ports %s", settings.host, ports)
            await server.serve(sockets=[listener])


def make_server(app: App, settings: DataSettings) -> Server:
    config = uvicorn.Config(
        app,
        http=HeadDeadline,
        ws="none",
        lifespan="off",
        interface="asgi3",
        access_log=False,
        log_config=None,
        server_header=False,
        proxy_headers=False,
        h11_max_incomplete_event_size=HEADERS_MAX,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=max(1, round(settings.drain_timeout)),
    )
    return Server(config)


def _stop(server: Server, app: App, linger: float) -> None:
    """A second signal is not waited for.

    Clients keep connections, and a server that closes one cannot know that a request is on its way on it. So they
    are told first, with their next answer; what is closed in the end has been idle for `linger`.
    """
    seconds = 0.0 if app.draining else linger
    app.draining = True
    if seconds:
        asyncio.get_running_loop().call_later(seconds, _end, server)
    else:
        _end(server)


def _end(server: Server) -> None:
    server.should_exit = True


@contextmanager
def _metrics_listener(app: App, host: str, port: int) -> Iterator[int]:
    """The port. Metrics are answered by a thread, so that a scrape takes nothing from the loop."""
    server, thread = start_http_server(port, addr=host, registry=app.metrics.registry)
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join(timeout=5)
