"""Processes of one cluster, recorded with their start time so that a reused pid is never taken for them."""

import contextlib
import json
import os
import select
import shutil
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

KILL_SECONDS = 10.0
_BOUND = ("setpriv", "--pdeathsig", "KILL")


class Processes:
    """Records in `folder`/pids, output in `folder`/logs.

    `bound`: what is started dies with the process that started it, however that ends.
    """

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self._pids = folder / "pids"
        self._logs = folder / "logs"
        self._environment = dict(environment)

    def start(self, name: str, command: Sequence[str | Path], *, bound: bool) -> None:
        """In the network namespace where the calling thread is."""
        self._pids.mkdir(exist_ok=True)
        self._logs.mkdir(exist_ok=True)
        words = [*(_BOUND if bound else ()), *(str(part) for part in command)]
        program = shutil.which(words[0])
        if program is None:
            raise FileNotFoundError(words[0])
        with self.log(name).open("ab") as log, Path(os.devnull).open("rb") as nothing:
            files = [(os.POSIX_SPAWN_DUP2, nothing.fileno(), 0)]
            files += [(os.POSIX_SPAWN_DUP2, log.fileno(), target) for target in (1, 2)]
            # No Popen: nobody here waits for it, and it may outlive this process.
            pid = os.posix_spawn(program, words, self._environment, file_actions=files, setsid=True)
        record = {"pid": pid, "started": start_time(pid)}
        unfinished = self._pids / f".{name}"
        unfinished.write_text(json.dumps(record))
        unfinished.replace(self._pids / name)

    def log(self, name: str) -> Path:
        return self._logs / f"{name}.log"

    def tail(self, name: str, characters: int = 2000) -> str:
        log = self.log(name)
        return log.read_text(errors="replace")[-characters:] if log.exists() else ""

    def pid(self, name: str) -> int | None:
        """None when it does not run."""
        try:
            record = json.loads((self._pids / name).read_text())
        except FileNotFoundError:
            return None
        pid, started = int(record["pid"]), record["started"]
        return pid if started is not None and start_time(pid) == started else None

    def running(self) -> dict[str, int]:
        names = sorted(path.name for path in self._pids.iterdir()) if self._pids.exists() else []
        found = {name: self.pid(name) for name in names if not name.startswith(".")}
        return {name: pid for name, pid in found.items() if pid is not None}

    def kill(self, name: str) -> None:
        """SIGKILL, and it is gone on return; one that does not run is killed."""
        pid = self.pid(name)
        if pid is not None:
            kill_all({pid})
        (self._pids / name).unlink(missing_ok=True)


def start_time(pid: int) -> int | None:
    """Field 22 of /proc/PID/stat (clock ticks since boot); None for one that ended, a zombie too."""
    with contextlib.suppress(ProcessLookupError, FileNotFoundError):
        # The name in field 2 may hold spaces and brackets; what follows its last bracket does not.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return None if fields[0] in "ZX" else int(fields[19])
    return None


def kill_all(pids: set[int], seconds: float = KILL_SECONDS) -> set[int]:
    """SIGKILL to each; returns those that are still there at the deadline."""
    left = {pid: descriptor for pid in pids if (descriptor := _open(pid)) is not None}
    try:
        for descriptor in left.values():
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        deadline = time.monotonic() + seconds
        # Readable once the last thread has ended: only then are its ports and files free.
        ended = {pid for pid, descriptor in left.items() if _readable(descriptor, deadline - time.monotonic())}
    finally:
        for descriptor in left.values():
            os.close(descriptor)
    _reap(ended)
    return set(left) - ended


def _open(pid: int) -> int | None:
    with contextlib.suppress(ProcessLookupError):
        return os.pidfd_open(pid)
    return None


def _readable(descriptor: int, seconds: float) -> bool:
    watched = select.poll()
    watched.register(descriptor, select.POLLIN)
    return bool(watched.poll(max(0.0, seconds) * 1000))


def _reap(pids: set[int]) -> None:
    """Our own dead children would stay as zombies."""
    for pid in pids:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


def ancestors() -> set[int]:
    """This process and those above it: never to be ended by a clean-up."""
    found: set[int] = set()
    pid = os.getpid()
    while pid > 0:
        found.add(pid)
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except FileNotFoundError:
            break
    return found
