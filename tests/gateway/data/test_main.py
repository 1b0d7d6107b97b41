"""The process: settings, ports file, signals, metrics listener."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from pydantic import ValidationError

from loraplane_core.process import die_with_parent
from loraplane_gateway.data.app import running
from loraplane_gateway.data.routing.endpoints import EndpointFolder
from loraplane_gateway.data.settings import DataSettings
from tests.gateway.data.harness import Place, World

pytestmark = pytest.mark.timeout(60)
COMMAND = [sys.executable, "-m", "loraplane_gateway", "data"]


def _environment(place: Place, world: World, **changes: str) -> dict[str, str]:
    values = {
        "DATABASE_URL": world.url,
        "KEY_PEPPER_FILE": str(place.folder / "pepper"),
        "DATA_KEY_FILE": str(place.folder / "data"),
        "STATE_KEY_FILE": str(place.folder / "state"),
        "ENDPOINTS_DIR": str(place.endpoints),
        "PORT": "0",
        "METRICS_PORT": "0",
        "PORTS_FILE": str(place.folder / "ports.json"),
        **changes,
    }
    return {**os.environ, **{f"LORAPLANE_{name}": value for name, value in values.items()}}


@contextmanager
def _process(environment: dict[str, str]) -> Iterator["subprocess.Popen[bytes]"]:
    process = subprocess.Popen(
        COMMAND,
        env=environment,
        stderr=subprocess.PIPE,
        preexec_fn=die_with_parent(),  # noqa: PLW1509
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def _wait(path: Path) -> dict[str, int]:
    deadline = time.monotonic() + 30
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    found: dict[str, int] = json.loads(path.read_text())
    return found


def test_it_tells_its_ports_serves_health_and_metrics_and_stops_with_status_0(place: Place, world: World) -> None:
    with _process(_environment(place, world)) as process:
        ports = _wait(place.folder / "ports.json")
        assert ports.keys() == {"data", "metrics"}
        with httpx.Client(trust_env=False) as client:
            url = f"http://127.0.0.1:{ports['data']}"
            deadline = time.monotonic() + 20
            while client.get(f"{url}/health/ready").status_code != 200:
                assert time.monotonic() < deadline
                time.sleep(0.02)
            assert client.get(f"{url}/health/live").json() == {"status": "ok"}
            answer = client.post(f"{url}/v1/completions", json={"model": "x"})
            assert answer.status_code == 401
            text = client.get(f"http://127.0.0.1:{ports['metrics']}/metrics").text
            assert 'loraplane_gateway_refused_total{code="invalid_api_key"} 1.0' in text
            assert "loraplane_gateway_snapshot_age_seconds" in text
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=10)
        assert process.returncode == 0
        assert b"Traceback" not in errors
        assert world.keys.acme.encode() not in errors


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"MAX_BODY": "0"}, "max_body"),
        ({"PORT": "70000"}, "port"),
        ({"KEY_TTL": "31"}, "key_ttl"),
        ({"DATA_KEY_FILE": "/nonexistent"}, "/nonexistent"),
        ({"DATABASE_URL": " "}, "database_url"),
        ({"DATABASE_URL": "mysql://x/y"}, "postgresql://"),
        ({"REDIS_URL": "http://x"}, "redis_url"),
    ],
)
def test_a_bad_setting_stops_the_start_and_is_named(
    place: Place, world: World, changes: dict[str, str], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in _environment(place, world, **changes).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValidationError) as refused:
        DataSettings.model_validate({})
    assert named in str(refused.value)


def test_one_key_for_both_roles_stops_the_start(place: Place, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in _environment(place, world, STATE_KEY_FILE=str(place.folder / "data")).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValidationError, match="each role has its own"):
        DataSettings.model_validate({})


def test_a_missing_setting_ends_the_process_with_status_2_and_its_name(place: Place, world: World) -> None:
    environment = _environment(place, world)
    del environment["LORAPLANE_DATA_KEY_FILE"]
    with _process(environment) as process:
        _, errors = process.communicate(timeout=30)
        assert process.returncode == 2
        assert b"LORAPLANE_DATA_KEY_FILE" in errors and b"Traceback" not in errors


async def test_it_is_not_ready_before_it_knows_where_engines_are(
    place: Place, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or a new gateway would answer 503 to its first requests."""
    told, watch = asyncio.Event(), EndpointFolder.watch

    async def late(self: EndpointFolder) -> None:
        await told.wait()
        await watch(self)

    monkeypatch.setattr(EndpointFolder, "watch", late)
    async with (
        running(place.settings(world.url)) as app,
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway") as client,
    ):

        async def answers(status: int, text: str) -> None:
            async with asyncio.timeout(10):
                while True:
                    answer = await client.get("/health/ready")
                    if answer.status_code == status and text in answer.text:
                        return
                    await asyncio.sleep(0.02)

        await answers(503, "where engines are")
        told.set()
        await answers(200, "ok")


def test_told_to_stop_it_takes_requests_for_a_while_and_each_answer_ends_its_connection(
    place: Place, world: World
) -> None:
    """Or a client would meet the close of a connection that it keeps with its next request."""
    with _process(_environment(place, world, LINGER="60")) as process:
        url = f"http://127.0.0.1:{_wait(place.folder / 'ports.json')['data']}"
        with httpx.Client(trust_env=False) as kept:
            first = kept.get(f"{url}/health/live")
            assert "connection" not in first.headers
            process.send_signal(signal.SIGTERM)
            deadline = time.monotonic() + 10
            while httpx.get(f"{url}/health/ready", trust_env=False).json().get("error", {}).get("message") != STOPS:
                assert time.monotonic() < deadline
            answer = kept.get(f"{url}/v1/models")
            assert (answer.status_code, answer.headers["connection"]) == (401, "close")
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=10)
        assert process.returncode == 0


STOPS = "shutting down"
