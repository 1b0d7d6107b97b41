"""How Loraplane's processes live and die together (Linux; elsewhere the parent-death signal is absent)."""

import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Callable

PR_SET_PDEATHSIG = 1


def die_with_parent(signum: int = signal.SIGTERM) -> Callable[[], None]:
    """A Popen `preexec_fn`: the child gets `signum` when the thread that started it ends.

    Start children from the main thread: the kernel watches the thread, not the process.
    """
    parent = os.getpid()

    def arm() -> None:
        if sys.platform == "linux":
            ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signum)
            if os.getppid() != parent:  # it died before prctl took effect
                os.kill(os.getpid(), signum)

    return arm


def alive(pid: int) -> bool:
    """True while a process of that id exists (also one of another user)."""
    with contextlib.suppress(ProcessLookupError):
        try:
            os.kill(pid, 0)
        except PermissionError:
            return True
        return True
    return False
