"""How one child process is to be run; the single place where processes are started."""

import os
import shutil
import signal
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from loraplane_cli.errors import StartFailed
from loraplane_core.process import die_with_parent

LOG_KEEP_BYTES = 4 * 1024 * 1024
LOG_LIMIT_BYTES = 16 * 1024 * 1024


@dataclass(frozen=True)
class ProcessSpec:
    """`env` is the whole environment; `stdin` is handed over once (it must fit a pipe: 64 KiB).

    A child whose parent is killed gets `death_signal`; SIGKILL by default, because a child that drains for
    nobody would hold its ports against the next start.
    """

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    user: "RunAs | None" = None
    stdin: bytes = b""
    cwd: Path = Path("/")
    death_signal: int = signal.SIGKILL
    stop_signal: int = signal.SIGTERM
    stop_seconds: float = 10.0


@dataclass(frozen=True)
class RunAs:
    """An account that the superuser drops to."""

    name: str
    uid: int
    gid: int


def spawn(spec: ProcessSpec, log: IO[bytes] | int) -> subprocess.Popen[bytes]:
    """Start `spec` in a process group of its own (a terminal's Ctrl-C reaches only the supervisor).

    Call it from the main thread (loraplane_core.process). Raises StartFailed.
    """
    user = spec.user
    try:
        process = subprocess.Popen(
            spec.argv,
            env=dict(spec.env),
            cwd=spec.cwd,
            stdin=subprocess.PIPE if spec.stdin else subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            process_group=0,
            # The death signal must be armed after the change of user, which clears it: Popen keeps that order.
            preexec_fn=die_with_parent(spec.death_signal),  # noqa: PLW1509 - the supervisor runs no threads
            user=user.uid if user else None,
            group=user.gid if user else None,
            extra_groups=[] if user else None,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise StartFailed(f"{spec.name}: cannot start {spec.argv[0]}: {error}") from error
    if process.stdin is not None:
        with process.stdin as stream:
            stream.write(spec.stdin)
    return process


def open_log(path: Path) -> IO[bytes]:
    """The child's log, appended to; a large one is moved aside first, so a name never holds more than two files."""
    if path.exists() and path.stat().st_size > LOG_KEEP_BYTES:
        path.replace(path.with_name(path.name + ".1"))
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    return os.fdopen(descriptor, "ab", buffering=0)


def bound_logs(folder: Path) -> None:
    """Empty logs past LOG_LIMIT_BYTES into their older half. They are open for appending, so writers go on at 0."""
    for path in folder.glob("*.log"):
        if path.stat().st_size > LOG_LIMIT_BYTES:
            shutil.copyfile(path, path.with_name(path.name + ".1"))
            os.truncate(path, 0)


def tail(path: Path, lines: int = 15) -> str:
    """The end of a log, for an error message; empty when there is none."""
    try:
        with path.open("rb") as stream:
            stream.seek(max(0, path.stat().st_size - 16_384))
            return "\n".join(stream.read().decode(errors="replace").splitlines()[-lines:])
    except FileNotFoundError:
        return ""
