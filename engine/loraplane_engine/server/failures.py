"""Loads that failed: a request does not try again what failed a moment ago."""

from collections.abc import Callable
from dataclasses import dataclass

from loraplane_core.errors import LoraplaneError

#: Not before this, doubled per failure in a row.
BACKOFF_SECONDS = 1.0
BACKOFF_LIMIT_SECONDS = 30.0


@dataclass(frozen=True)
class _Failure:
    error: LoraplaneError
    until: float
    count: int


class Failures:
    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._failures: dict[str, _Failure] = {}

    def check(self, ref: str) -> None:
        """Raises the error of a load that failed too short a time ago."""
        failure = self._failures.get(ref)
        if failure is not None and self._clock() < failure.until:
            raise failure.error.with_traceback(None)  # else each raise would add to the one before

    def add(self, ref: str, error: LoraplaneError) -> None:
        count = self._failures[ref].count + 1 if ref in self._failures else 1
        wait = min(BACKOFF_LIMIT_SECONDS, BACKOFF_SECONDS * 2 ** (count - 1))
        self._failures[ref] = _Failure(error, self._clock() + wait, count)

    def forget(self, ref: str) -> None:
        self._failures.pop(ref, None)
