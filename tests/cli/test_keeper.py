"""One kept process: when it counts as ready."""

import asyncio
import contextlib
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import httpx
import pytest

from loraplane_cli.errors import StartFailed
from loraplane_cli.supervisor.keeper import Component, Keeper
from loraplane_cli.supervisor.probes import http_ready
from loraplane_cli.supervisor.record import RunRecord
from loraplane_cli.supervisor.spec import ProcessSpec


class Healthy(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextlib.contextmanager
def somebody_elses_server() -> Iterator[int]:
    server = HTTPServer(("127.0.0.1", 0), Healthy)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        thread.join(5)
        server.server_close()


async def test_a_foreign_server_on_the_port_does_not_make_a_part_ready(tmp_path: Path) -> None:
    """Two `up`s that chose one port at once: the later must not announce the earlier's server as its own."""
    bind_late = "import sys, time; time.sleep(1); sys.exit('cannot listen')"
    with somebody_elses_server() as port:
        async with httpx.AsyncClient(trust_env=False) as client:
            component = Component(
                "gateway-0",
                lambda: ProcessSpec(name="gateway-0", argv=(sys.executable, "-I", "-S", "-c", bind_late), env={}),
                http_ready(client, lambda: port, "/health/ready"),
                port=lambda: port,
            )
            keeper = Keeper(component, log=tmp_path / "log", run=RunRecord(tmp_path / "run.json", tmp_path))
            try:
                with pytest.raises(StartFailed, match="cannot listen"):
                    await asyncio.wait_for(keeper.start(), 20)
            finally:
                await keeper.stop()


async def test_a_probe_that_ends_in_the_moment_of_the_stop_does_not_outlive_it(tmp_path: Path) -> None:
    """`asyncio.wait_for` of Python 3.11 loses a cancellation that meets a result: `up` then never ended."""
    asked, answer = asyncio.Event(), asyncio.Event()

    async def probe() -> bool:
        asked.set()
        await answer.wait()
        return False

    sleeps = (sys.executable, "-I", "-S", "-c", "import time; time.sleep(60)")
    component = Component("operator", lambda: ProcessSpec(name="operator", argv=sleeps, env={}), probe)
    keeper = Keeper(component, log=tmp_path / "log", run=RunRecord(tmp_path / "run.json", tmp_path))
    keeper.begin()
    await asked.wait()
    answer.set()
    await asyncio.sleep(0)  # the probe has its result now, and its caller does not know yet
    stopping = asyncio.create_task(keeper.stop())
    done, _ = await asyncio.wait({stopping}, timeout=10)
    assert done, "the keeper kept on"
    assert keeper.pid == 0
