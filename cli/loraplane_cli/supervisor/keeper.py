"""Keeps one process running: start, readiness, restart with back-off, orderly stop."""

import asyncio
import contextlib
import enum
import os
import signal
import subprocess
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from loraplane_cli.errors import StartFailed
from loraplane_cli.supervisor.backoff import Backoff
from loraplane_cli.supervisor.ports import listens
from loraplane_cli.supervisor.record import RunRecord
from loraplane_cli.supervisor.spec import ProcessSpec, open_log, spawn, tail

#: How soon an end is noticed; far below the half second in which routing must learn of it.
POLL_SECONDS = 0.1
PROBE_TIMEOUT_SECONDS = 2.0
#: On a machine this busy a probe may be late: so many in a row make a ready process unready.
PROBE_FAILURES = 3
KILL_SECONDS = 5.0


#: In which order parts stop: who gives orders, who takes requests from outside, (engines), whom those need.
Stops = Literal["first", "edge", "last"]


class Phase(enum.StrEnum):
    WAITING = "waiting"
    STARTING = "starting"
    READY = "ready"
    UNREADY = "unready"
    BACKOFF = "backoff"
    STOPPING = "stopping"
    STOPPED = "stopped"
    DONE = "done"  # one that runs once


def _nothing() -> None:
    return None


@dataclass(frozen=True)
class Component:
    """One process of the system. `make` is asked before every start, so it can choose a port anew.

    `probe` tells readiness; None means that the process runs once, to its end, and must succeed.
    With a `port` the listener there must be the process's own: another's server would answer the probe as well.
    `prepare` runs before the first start, `settle` when it is first ready; both may block for a moment.
    """

    name: str
    make: Callable[[], ProcessSpec]
    probe: Callable[[], Awaitable[bool]] | None
    prepare: Callable[[], None] = _nothing
    settle: Callable[[], None] = _nothing
    start_seconds: float = 60.0
    port: Callable[[], int] | None = None
    probe_seconds: float = 2.0  # between probes while it is ready; its end is seen without one
    stops: Stops = "last"


class Keeper:
    """Owns the process of one component. `changed` is called, in the event loop, after every change of phase."""

    def __init__(
        self, component: Component, *, log: Path, run: RunRecord, changed: Callable[[], None] = _nothing
    ) -> None:
        self.component = component
        self.phase = Phase.WAITING
        self.restarts = 0
        self.message = ""
        self._log_path = log
        self._run = run
        self._changed = changed
        self._process: subprocess.Popen[bytes] | None = None
        self._spec: ProcessSpec | None = None
        self._task: asyncio.Task[None] | None = None
        self._settled = False

    @property
    def name(self) -> str:
        return self.component.name

    @property
    def pid(self) -> int:
        """0 while it does not run."""
        return self._process.pid if self._process else 0

    @property
    def ready(self) -> bool:
        return self.phase in (Phase.READY, Phase.DONE)

    async def start(self) -> None:
        """First start of a part that all others need: returns when ready. Raises StartFailed."""
        self.component.prepare()
        if self.component.probe is None:
            await self._run_once()
            return
        self.begin()
        deadline = time.monotonic() + self.component.start_seconds
        while not self.ready:
            if self.restarts or self.phase is Phase.BACKOFF:
                raise StartFailed(f"{self.name} ended at its start: {self.message}{self._log_end()}")
            if time.monotonic() > deadline:
                waited = self.component.start_seconds
                raise StartFailed(f"{self.name} was not ready after {waited:.0f} s{self._log_end()}")
            await asyncio.sleep(POLL_SECONDS)

    def begin(self) -> None:
        """Start it and keep it running, without waiting."""
        if self._task is None:
            self._task = asyncio.create_task(self._keep(), name=f"keep {self.name}")

    async def stop(self, *, hurry: asyncio.Event | None = None) -> None:
        """Stop the process and no longer restart it: its stop signal, its deadline (cut short by `hurry`), SIGKILL."""
        self._set(Phase.STOPPING)
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            self._task = None
        process, spec = self._process, self._spec
        if process is not None and spec is not None:
            if not _ended(process):
                process.send_signal(spec.stop_signal)
            await _until_ended(process, spec.stop_seconds, hurry)
            if not _ended(process):
                process.kill()
                await _until_ended(process, KILL_SECONDS, None)
            self._reap(process)
        self._set(Phase.STOPPED)

    async def _keep(self) -> None:
        backoff = Backoff()
        while True:
            started = time.monotonic()
            try:
                self._spawn()
                self.message = await self._attend()
            except (StartFailed, OSError) as error:  # OSError: a full disk under a log or a record
                self.message = str(error)
                if self._process is not None:
                    self._process.kill()
                    self._reap(self._process)
            self._set(Phase.BACKOFF)
            await asyncio.sleep(backoff.after(time.monotonic() - started))
            self.restarts += 1

    async def _run_once(self) -> None:
        self._spawn()
        process = self._process
        deadline = time.monotonic() + self.component.start_seconds
        while process is not None and not _ended(process):
            if time.monotonic() > deadline:
                await self.stop()
                raise StartFailed(f"{self.name} did not end within {self.component.start_seconds:.0f} s")
            await asyncio.sleep(POLL_SECONDS)
        code = self._reap(process) if process else 0
        if code != 0:
            raise StartFailed(f"{self.name} failed: {_describe(code)}{self._log_end()}")
        self._set(Phase.DONE)

    def _spawn(self) -> None:
        self._spec = self.component.make()
        with open_log(self._log_path) as log:
            self._process = spawn(self._spec, log)
        self._run.add(self.name, self._process.pid)
        self._set(Phase.STARTING)

    async def _attend(self) -> str:
        """Watch the running process to its end; why it ended."""
        process = self._process
        if process is None:
            return "not started"
        probe_at, failures, started, late = 0.0, 0, time.monotonic(), ""
        while not _ended(process):
            now = time.monotonic()
            if self.phase is Phase.STARTING and now - started > self.component.start_seconds:
                late = f"not ready after {self.component.start_seconds:.0f} s, "
                process.kill()
            elif now >= probe_at:
                failures = 0 if await self._probe() else failures + 1
                self._judge(failures)
                calm = self.phase is Phase.READY and not failures
                probe_at = time.monotonic() + (self.component.probe_seconds if calm else POLL_SECONDS)
            await asyncio.sleep(POLL_SECONDS)
        return late + _describe(self._reap(process))

    async def _probe(self) -> bool:
        if self.component.probe is None:
            return True
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_SECONDS):
                ready = await self.component.probe()
        except TimeoutError:
            return False
        port = self.component.port
        return ready and (self.phase is Phase.READY or port is None or listens(self.pid, port()))

    def _judge(self, failures: int) -> None:
        if failures == 0:
            if not self._settled:
                self.component.settle()
                self._settled = True
            self.message = ""
            self._set(Phase.READY)
        elif self.phase is Phase.READY and failures >= PROBE_FAILURES:
            self.message = "runs, but is not ready"
            self._set(Phase.UNREADY)

    def _reap(self, process: subprocess.Popen[bytes]) -> int:
        """Collect the exit code and end what is left of the process group, which nobody else can have joined."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        code = process.wait(KILL_SECONDS)
        self._run.remove(process.pid)
        self._process = None
        return code

    def _set(self, phase: Phase) -> None:
        if phase is not self.phase:
            self.phase = phase
            self._changed()

    def _log_end(self) -> str:
        text = tail(self._log_path)
        return f"\n{self._log_path} ends with:\n{text}" if text else ""


def _ended(process: subprocess.Popen[bytes]) -> bool:
    """Whether it has exited; it is not reaped yet, so its id still stands for its process group."""
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


async def _until_ended(process: subprocess.Popen[bytes], seconds: float, hurry: asyncio.Event | None) -> None:
    """Wait for the exit, at most so long, or until hurried."""
    deadline = time.monotonic() + seconds
    while not _ended(process) and time.monotonic() < deadline and not (hurry and hurry.is_set()):  # noqa: ASYNC110
        await asyncio.sleep(POLL_SECONDS)


def _describe(code: int) -> str:
    return f"ended by {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
