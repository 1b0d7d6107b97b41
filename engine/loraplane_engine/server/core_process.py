"""The core process as a child: started, watched and ended here and nowhere else."""

import asyncio
import contextlib
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import msgspec

from loraplane_core.process import alive, die_with_parent
from loraplane_engine.options import CoreOptions

#: The core is given this long to end by itself after Shutdown.
STOP_SECONDS = 5.0
_PREFIX = "lpe-"
#: By default libgomp's threads spin for each other without end. Where cores are shared (two replicas, a busy
#: machine) a step then takes ten times as long; with a short spin they sleep instead. See docs/decisions/0007.
OPENMP_DEFAULTS = {"GOMP_SPINCOUNT": "1000"}


def core_command(options: CoreOptions, endpoint: str) -> list[str]:
    return [sys.executable, "-m", "loraplane_engine.core", endpoint, msgspec.json.encode(options).decode()]


def _prepared(arm: Callable[[], None]) -> Callable[[], None]:
    """A terminal's Ctrl-C reaches the core too; it leaves that to the server, which drains first."""

    def prepare() -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        arm()

    return prepare


def sweep(base: Path) -> None:
    """Remove what engines left behind that were killed."""
    for folder in base.glob(f"{_PREFIX}*-*"):
        owner = folder.name.removeprefix(_PREFIX).partition("-")[0]
        with contextlib.suppress(FileNotFoundError):  # another engine sweeps too
            if owner.isdecimal() and not alive(int(owner)) and folder.stat().st_uid == os.getuid():
                shutil.rmtree(folder, ignore_errors=True)


class CoreProcess:
    """Owns the child and a private folder for its ipc socket, which goes when the child is stopped."""

    def __init__(self) -> None:
        # A unix socket's path is limited to about 107 bytes, so not below a deep TMPDIR.
        base = Path(tempfile.gettempdir() if len(tempfile.gettempdir()) < 40 else "/tmp")  # noqa: S108 - 0700 below
        sweep(base)
        self.folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=base))
        self.endpoint = f"ipc://{self.folder}/core"
        self._child: asyncio.subprocess.Process | None = None

    async def start(self, command: list[str]) -> None:
        # Must run in the main thread: the kernel ties the death signal to the thread that forks.
        self._child = await asyncio.create_subprocess_exec(
            *command,
            env=OPENMP_DEFAULTS | os.environ,
            stdin=asyncio.subprocess.DEVNULL,
            preexec_fn=_prepared(die_with_parent(signal.SIGKILL)),
        )

    async def wait(self) -> int:
        """The child's exit status, once it has ended."""
        if self._child is None:
            raise RuntimeError("the core was never started")
        return await self._child.wait()

    async def stop(self, grace: float = 0.0) -> None:
        """Give the child `grace` seconds to end by itself, then make it; removes the socket's folder."""
        if self._child is not None and self._child.returncode is None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(grace):
                    await self._child.wait()
            if self._child.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    self._child.kill()
                await self._child.wait()
        shutil.rmtree(self.folder, ignore_errors=True)
