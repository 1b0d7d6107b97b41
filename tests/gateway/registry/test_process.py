"""`loraplane-gateway migrate` and `registry` as the supervisor runs them."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psycopg
import pytest

from loraplane_core.credentials import operator_credential, read_key
from loraplane_core.process import alive, die_with_parent
from loraplane_gateway.__main__ import main
from loraplane_gateway.registry.main import run
from loraplane_gateway.settings import RegistrySettings
from tests.gateway.artifacts import BASE_CONFIG, write_adapter
from tests.gateway.postgres import Database, PostgresServer
from tests.gateway.registry.conftest import ADMIN_KEY, settings_for

START_SECONDS = 30.0
STOP_SECONDS = 20.0
COMMAND = [sys.executable, "-m", "loraplane_gateway"]


def _environment(settings: RegistrySettings, **more: str) -> dict[str, str]:
    values = {
        "DATABASE_URL": settings.database_url.get_secret_value(),
        "MASTER_KEY_FILE": str(settings.master_key_file),
        "KEY_PEPPER_FILE": str(settings.key_pepper_file),
        "ADMIN_KEY_FILE": str(settings.admin_key_file),
        "ADMIN_PORT": "0",
        "ARTIFACT_PORT": "0",
        "ADAPTER_ROOT": str(settings.adapter_root),
        "STORE_DIR": str(settings.store_dir),
        **more,
    }
    return {"PATH": os.defpath, **{f"LORAPLANE_{name}": value for name, value in values.items()}}


@contextmanager
def _running(settings: RegistrySettings, folder: Path) -> "Iterator[tuple[subprocess.Popen[bytes], httpx.Client]]":
    ports = folder / "ports.json"
    ports.unlink(missing_ok=True)
    with (folder / "log").open("ab") as log:
        child = subprocess.Popen(
            [*COMMAND, "registry"],
            env=_environment(settings, PORTS_FILE=str(ports)),
            stdout=log,
            stderr=log,
            preexec_fn=die_with_parent(signal.SIGKILL),  # noqa: PLW1509
        )
    try:
        deadline = time.monotonic() + START_SECONDS
        while not ports.exists():
            assert child.poll() is None and time.monotonic() < deadline, (folder / "log").read_text()
            time.sleep(0.02)
        url = f"http://127.0.0.1:{json.loads(ports.read_text())['admin']}"
        with httpx.Client(base_url=url, headers={"authorization": f"Bearer {ADMIN_KEY}"}, timeout=30) as client:
            yield child, client
    finally:
        child.kill()
        child.wait(timeout=STOP_SECONDS)


def test_the_registry_starts_answers_and_ends_cleanly(database: Database, tmp_path: Path) -> None:
    settings = settings_for(database, tmp_path / "r")
    with _running(settings, tmp_path) as (child, client):
        assert client.get("/health/live").status_code == 200
        assert client.get("/health/ready").status_code == 200
        assert client.post("/admin/tenants", json={"name": "acme"}).status_code == 201
        assert b'loraplane_registry_versions{state="validated"}' in client.get("/metrics").content
        child.send_signal(signal.SIGTERM)
        assert child.wait(timeout=STOP_SECONDS) == 0, (tmp_path / "log").read_text()


def test_sigterm_ends_an_open_feed_at_once(database: Database, tmp_path: Path) -> None:
    settings = settings_for(database, tmp_path / "r")
    token = operator_credential(read_key(settings.master_key_file))
    with (
        _running(settings, tmp_path) as (child, client),
        client.stream("GET", "/operator/feed", headers={"authorization": f"Bearer {token}"}) as feed,
    ):
        assert feed.status_code == 200
        lines = feed.iter_lines()
        assert next(lines) == "event: snapshot"
        started = time.monotonic()
        child.send_signal(signal.SIGTERM)
        list(lines)
        assert child.wait(timeout=STOP_SECONDS) == 0
        assert time.monotonic() - started < 5


def test_a_registry_killed_during_an_ingestion_leaves_no_worker_and_goes_on_when_it_returns(
    database: Database, tmp_path: Path
) -> None:
    settings = settings_for(database, tmp_path / "r")
    write_adapter(settings.adapter_root / "a")
    with psycopg.connect(database.owner_url) as owner:
        owner.execute("INSERT INTO tenants (name) VALUES ('acme')")
        owner.execute(
            "INSERT INTO pools (namespace, name, base_model, aliases, base_digest, config, max_rank)"
            " VALUES ('serving', 'tiny', 'tiny-llama', '{test-org/tiny-llama}', repeat('b', 64), %s, 8)",
            (json.dumps(BASE_CONFIG),),
        )
        # As it would lie there: taken by a registry that is gone, its lease long.
        owner.execute("INSERT INTO adapters (tenant_id, name, pool) VALUES ('acme', 'pirate', 'serving/tiny')")
        owner.execute(
            "INSERT INTO tenant_adapters (tenant_id, adapter, version, state)"
            " VALUES ('acme', 'pirate', 1, 'ingesting'), ('acme', 'by-hand', 1, 'ingesting')"
        )
        owner.execute(
            "INSERT INTO ingestions (tenant_id, adapter, version, source, activate, attempts, lease_until)"
            " VALUES ('acme', 'pirate', 1, 'file:a', TRUE, 1, now() + interval '1 hour')"
        )
    with _running(settings, tmp_path) as (child, client):
        deadline = time.monotonic() + START_SECONDS
        while True:
            versions = client.get("/admin/tenants/acme/adapters/pirate").json()["versions"]
            if versions[0]["state"] == "validated":
                break
            assert time.monotonic() < deadline, (versions, (tmp_path / "log").read_text())
            time.sleep(0.05)
        assert versions[0]["is_active"]
        by_hand = client.get("/admin/tenants/acme/adapters/by-hand").json()["versions"]
        assert by_hand[0]["state"] == "unverified"
        workers = _children(child.pid)
        assert workers
        child.kill()
        child.wait(timeout=STOP_SECONDS)
        deadline = time.monotonic() + 5
        while any(alive(pid) for pid in workers):
            assert time.monotonic() < deadline, "a worker outlived its registry"
            time.sleep(0.02)


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.parametrize(
    ("variable", "value", "says"),
    [
        ("DATABASE_URL", "", "LORAPLANE_DATABASE_URL: "),
        ("DATABASE_URL", "mysql://r:secret-of-the-database@h/x", "LORAPLANE_DATABASE_URL: "),
        ("REDIS_URL", "http://:secret-of-the-database@h", "LORAPLANE_REDIS_URL: "),
        ("MASTER_KEY_FILE", "/nonexistent", "holds no hexadecimal key"),
        ("ADMIN_PORT", "70000", "LORAPLANE_ADMIN_PORT: "),
        ("ADAPTER_ROOT", "/nonexistent", "LORAPLANE_ADAPTER_ROOT: "),
        ("WORKERS", "0", "LORAPLANE_WORKERS: "),
    ],
)
def test_a_bad_setting_stops_the_start(
    tmp_path: Path,
    variable: str,
    value: str,
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    database = Database("x", "postgresql://o@h/x", "postgresql://r:secret-of-the-database@h/x", "", Path("psql"))
    for name, text in _environment(settings_for(database, tmp_path / "r"), **{variable: value}).items():
        monkeypatch.setenv(name, text)
    assert main(["registry"]) == 2
    said = capsys.readouterr().err
    assert says in said
    assert "secret-of-the-database" not in said


def test_a_role_that_row_level_security_does_not_bind_stops_the_start(
    database: Database, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert run(settings_for(database, tmp_path / "r", database_url=database.owner_url)) == 1
    assert "row-level security" in caplog.text


def test_a_database_without_tables_stops_the_start(
    database: Database, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    url = database.registry_url.removesuffix(database.name) + "postgres"
    assert run(settings_for(database, tmp_path / "r", database_url=url)) == 1
    assert "loraplane-gateway migrate" in caplog.text


def test_a_taken_port_stops_the_start(database: Database, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert run(settings_for(database, tmp_path / "r", admin_port=0, artifact_port=port)) == 1
    assert f"cannot listen on 127.0.0.1:{port}" in caplog.text


def test_migrate_makes_roles_and_tables_from_the_command_line(
    postgres: PostgresServer, migrated_template: str, tmp_path: Path
) -> None:
    with psycopg.connect(postgres.url(), autocommit=True) as connection:
        connection.execute("CREATE DATABASE by_command OWNER loraplane_owner")
    owner_url = postgres.url("by_command", "loraplane_owner", "owner-test-password")
    for role in ("registry", "data"):
        (tmp_path / role).write_text(f"{role}-test-password\n")
    try:
        arguments = ["migrate", "--create-roles", "--registry-password-file", str(tmp_path / "registry")]
        arguments += ["--data-password-file", str(tmp_path / "data")]
        environment = {"PATH": os.defpath, "LORAPLANE_OWNER_URL": owner_url}
        for _ in range(2):
            subprocess.run([*COMMAND, *arguments], env=environment, check=True, timeout=60)
        with psycopg.connect(postgres.url("by_command", "loraplane_registry", "registry-test-password")) as registry:
            assert registry.execute("SELECT count(*) FROM pools").fetchone() == (0,)
    finally:
        with psycopg.connect(postgres.url(), autocommit=True) as connection:
            connection.execute("DROP DATABASE by_command WITH (FORCE)")
