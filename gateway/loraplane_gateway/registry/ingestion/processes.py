"""A small pool of worker processes in which one bad job costs one job.

concurrent.futures fails every job of a pool when one worker dies, and cannot end a worker that hangs; here
each worker has its own pipe, a deadline ends it, and the next job gets a fresh one.
"""

import asyncio
import contextlib
import ctypes
import multiprocessing
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from loraplane_core.process import PR_SET_PDEATHSIG

J = TypeVar("J")
R = TypeVar("R")
#: A worker is replaced after this many jobs, so that nothing it leaks grows for ever. Starting one costs as much
#: processor time as some twenty jobs.
JOBS_PER_WORKER = 512
START_SECONDS = 30.0
END_SECONDS = 5.0


class WorkerLost(Exception):
    """The worker died or was ended at its deadline (`timed_out`); its job has no result."""

    def __init__(self, message: str, *, timed_out: bool) -> None:
        super().__init__(message)
        self.timed_out = timed_out


class JobRaised(Exception):
    """The job's function raised: a defect, as ours return their refusals."""


class Workers:
    """Owns its processes; `close` ends them. All methods belong to one event loop's thread."""

    def __init__(self, count: int) -> None:
        self._idle: asyncio.LifoQueue[_Worker | None] = asyncio.LifoQueue()
        self._all: set[_Worker] = set()
        self.size = count
        # Threads of their own: jobs that wait for minutes must not use up the loop's shared ones.
        self._threads = ThreadPoolExecutor(count, thread_name_prefix="ingestion")
        for _ in range(count):
            self._idle.put_nowait(None)

    @contextlib.asynccontextmanager
    async def slot(self) -> AsyncIterator["Slot"]:
        """Waits for a free worker and gives it back."""
        slot = Slot(self, await self._idle.get())
        try:
            yield slot
        finally:
            self._idle.put_nowait(slot.worker)

    def pids(self) -> list[int]:
        return [worker.pid for worker in self._all]

    def start_worker(self) -> "_Worker":
        worker = _Worker()
        self._all.add(worker)
        return worker

    def end_worker(self, worker: "_Worker") -> None:
        worker.end()
        self._all.discard(worker)

    def close(self) -> None:
        for worker in list(self._all):
            self.end_worker(worker)
        self._threads.shutdown(wait=False)

    async def call(self, worker: "_Worker", function: Callable[[J], R], job: J, seconds: float) -> tuple[bool, Any]:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, worker.call, function, job, seconds)


class Slot:
    def __init__(self, workers: Workers, worker: "_Worker | None") -> None:
        self._workers = workers
        self.worker = worker

    async def run(self, function: Callable[[J], R], job: J, seconds: float) -> R:
        """`function(job)` in a worker process. Raises WorkerLost, JobRaised.

        Starts the process in this thread: its parent-death signal watches the thread that started it.
        """
        if self.worker is None or not self.worker.usable:
            self._discard()
            self.worker = self._workers.start_worker()
        worker = self.worker
        try:
            ok, value = await self._workers.call(worker, function, job, seconds)
        except BaseException:
            self._discard()
            raise
        if not ok:
            raise JobRaised(value)
        result: R = value
        return result

    def _discard(self) -> None:
        if self.worker is not None:
            self._workers.end_worker(self.worker)
            self.worker = None


class _Worker:
    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, os.getpid()), daemon=True)
        self._process.start()
        theirs.close()
        self._jobs = 0

    @property
    def pid(self) -> int:
        return self._process.pid or 0

    @property
    def usable(self) -> bool:
        return self._jobs < JOBS_PER_WORKER and self._process.is_alive()

    def call(self, function: Callable[[J], R], job: J, seconds: float) -> tuple[bool, Any]:
        """Blocks for at most `seconds`, and START_SECONDS more for a worker that has just been started."""
        allowed = seconds if self._jobs else seconds + START_SECONDS
        self._jobs += 1
        try:
            self._pipe.send((function, job))
            if not self._pipe.poll(allowed):
                raise WorkerLost(f"the worker did not finish within {allowed:.0f} s and was ended", timed_out=True)
            answer: tuple[bool, Any] = self._pipe.recv()
        except (EOFError, OSError) as error:
            raise WorkerLost("the worker died", timed_out=False) from error
        return answer

    def end(self) -> None:
        if self._process.is_alive():
            self._process.kill()
        self._process.join(END_SECONDS)
        self._pipe.close()


def _serve(pipe: Connection, parent: int) -> None:
    # Ctrl-C reaches the whole process group; the registry decides when its workers end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["OMP_NUM_THREADS"] = "1"
    _arm_parent_death(parent)
    os.nice(5)
    while True:
        try:
            function, job = pipe.recv()
        except EOFError:
            return
        try:
            answer: tuple[bool, Any] = (True, function(job))
        except Exception as error:
            answer = (False, f"{type(error).__name__}: {error}")
        try:
            pipe.send(answer)
        except OSError:
            return


def _arm_parent_death(parent: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before prctl took effect
        os._exit(1)
