"""Who runs on this state folder: a lock held for life, and a record of every process started.

A process is known by its id and its start time, never by its name; a descendant by the run's token in
its environment. So nothing but our own is ever ended, whoever reused an id meanwhile.
"""

import contextlib
import fcntl
import logging
import os
import secrets
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil

from loraplane_cli.errors import AlreadyRunning
from loraplane_cli.supervisor.layout import StateFolder
from loraplane_core.files import write_atomic

log = logging.getLogger(__name__)
#: In the environment of every child: the token of the run it belongs to.
RUN_VARIABLE = "LORAPLANE_RUN"
#: Start times are derived from the boot time, which moves a little when the clock is set.
START_TIME_SLACK = 1.5


class ProcessRecord(msgspec.Struct, kw_only=True, frozen=True):
    name: str
    pid: int
    created: float

    @classmethod
    def of(cls, name: str, pid: int) -> "ProcessRecord":
        """Raises psutil.NoSuchProcess."""
        return cls(name=name, pid=pid, created=psutil.Process(pid).create_time())

    def find(self) -> psutil.Process | None:
        """The process itself while it lives; None when it ended, whoever has its id now."""
        try:
            process = psutil.Process(self.pid)
            if abs(process.create_time() - self.created) > START_TIME_SLACK:
                return None
            return process if process.status() != psutil.STATUS_ZOMBIE else None
        except psutil.NoSuchProcess:
            return None


class Run(msgspec.Struct, kw_only=True, frozen=True):
    """The content of run.json."""

    token: str
    supervisor: ProcessRecord
    folder: str  # the watched one
    children: list[ProcessRecord] = []


class RunRecord:
    """This run's record, rewritten whenever a child starts or ends."""

    def __init__(self, path: Path, folder: Path) -> None:
        self._path = path
        self.token = secrets.token_hex(8)
        self._supervisor = ProcessRecord.of("supervisor", os.getpid())
        self._folder = folder
        self._children: dict[int, ProcessRecord] = {}
        self._write()

    @property
    def pid(self) -> int:
        return self._supervisor.pid

    def add(self, name: str, pid: int) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended already
            self._children[pid] = ProcessRecord.of(name, pid)
            self._write()

    def remove(self, pid: int) -> None:
        if self._children.pop(pid, None) is not None:
            self._write()

    def holds(self) -> bool:
        """Whether the state folder is still this run's."""
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=Run).token == self.token
        except (OSError, msgspec.DecodeError):
            return False

    def _write(self) -> None:
        run = Run(
            token=self.token,
            supervisor=self._supervisor,
            folder=str(self._folder),
            children=list(self._children.values()),
        )
        try:
            write_atomic(self._path, msgspec.json.encode(run))
        except OSError as error:  # children then still die with us, and are known by the token
            log.warning("the record of this run cannot be written: %s", error)


def read_run(state: StateFolder) -> Run | None:
    """The record of the running supervisor or of one that was killed; None when there is none."""
    try:
        return msgspec.json.decode(state.run.read_bytes(), type=Run)
    except (FileNotFoundError, msgspec.DecodeError):
        return None


def running(state: StateFolder) -> Run | None:
    """The record of the supervisor that runs now."""
    run = read_run(state)
    return run if run is not None and run.supervisor.find() is not None else None


@contextlib.contextmanager
def exclusive(state: StateFolder, wait_seconds: float = 0.0) -> Iterator[None]:
    """Hold the state folder's lock. Raises AlreadyRunning, saying who holds it.

    The file is removed at the end; a lock on a file that was removed meanwhile counts for nothing.
    """
    deadline = time.monotonic() + wait_seconds
    while True:
        descriptor = os.open(state.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            if time.monotonic() >= deadline:
                raise AlreadyRunning(_holder(state)) from None
            time.sleep(0.05)
            continue
        with contextlib.suppress(FileNotFoundError):
            if os.fstat(descriptor).st_ino == state.lock.stat().st_ino:
                break
        os.close(descriptor)
    try:
        yield
    finally:
        state.lock.unlink(missing_ok=True)
        os.close(descriptor)


def end_left_overs(state: StateFolder) -> list[str]:
    """End what a killed supervisor left, and wait until it is gone; returns the names. Call it under the lock.

    Children die with their parent by themselves, so there is first a moment for that; then they are told to.
    """
    run = read_run(state)
    if run is None:
        return []
    left = [name for name, _ in _living(run)]
    for signum, postgres_signum, seconds in (
        (None, None, 1.0),
        (signal.SIGKILL, signal.SIGINT, 5.0),
        (signal.SIGKILL, signal.SIGQUIT, 6.0),
        (signal.SIGKILL, signal.SIGKILL, 5.0),
    ):
        deadline = time.monotonic() + seconds
        for name, process in _living(run):
            with contextlib.suppress(psutil.NoSuchProcess):
                if signum is not None and postgres_signum is not None:
                    process.send_signal(postgres_signum if name == "postgres" else signum)
        while (living := _living(run)) and time.monotonic() < deadline:
            time.sleep(0.05)
        if not living:
            break
    state.run.unlink(missing_ok=True)
    return sorted(left)


def _living(run: Run) -> list[tuple[str, psutil.Process]]:
    found = [(record.name, process) for record in run.children if (process := record.find()) is not None]
    known = {process.pid for _, process in found} | {run.supervisor.pid}
    marker = run.token
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.pid not in known and process.environ().get(RUN_VARIABLE) == marker:
                found.append((f"descendant {process.pid}", process))
    return found


def _holder(state: StateFolder) -> str:
    run = read_run(state)
    if run is None or run.supervisor.find() is None:
        return f"another `loraplane` command is at work on {state.root}; try again in a moment"
    return (
        f"`loraplane up` already runs on {state.root} (process {run.supervisor.pid}, folder {run.folder}); "
        "stop it with `loraplane down`, or give this one another --state-dir"
    )
