"""Ending processes that are not our children, so that nobody here can reap them."""

import contextlib
import time

import psutil

POLL_SECONDS = 0.02


def gone(process: psutil.Process) -> bool:
    """True when it runs no more. One that its parent has not reaped counts as gone: it holds nothing."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def ended(process: psutil.Process, signum: int, seconds: float) -> bool:
    """Signal it and wait; whether it is gone within `seconds`."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process.send_signal(signum)
    deadline = time.monotonic() + seconds
    while not gone(process):
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_SECONDS)
    return True
