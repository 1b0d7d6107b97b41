"""The process: settings, ports file, signals, metrics listener."""

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
        assert b"data_key_file" in errors and b"Traceback" not in errors
