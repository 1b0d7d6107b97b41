"""What tests let worker processes do; light to import, as every worker imports it."""

import os
import signal


def twice(number: int) -> int:
    return 2 * number


def divide(number: int) -> float:
    return 1 / number


def block(seconds: int) -> int:
    signal.sigtimedwait([signal.SIGUSR1], seconds)
    return seconds


def suicide(job: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)
