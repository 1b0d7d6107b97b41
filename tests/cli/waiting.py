"""Waiting on a condition with a deadline, for tests of processes."""

import time
from collections.abc import Callable


def wait_until(condition: Callable[[], object], seconds: float = 10.0, what: str = "condition") -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"{what}: not within {seconds} s")
        time.sleep(0.02)
