"""Admission: a cap on the requests of this process. The tenants' own limits are an issue of their own."""

from collections.abc import Iterator
from contextlib import contextmanager

from loraplane_core.errors import TooManyRequests


class Admission:
    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.admitted = 0

    @contextmanager
    def admit(self) -> Iterator[None]:
        """Raises TooManyRequests."""
        if self.admitted >= self._limit:
            raise TooManyRequests("This gateway is full; try again soon.", code="engine_busy", retry_after=1)
        self.admitted += 1
        try:
            yield
        finally:
            self.admitted -= 1


class RetryBudget:
    """Retries as a share of recent successes, so that a sick pool is not finished off by its callers."""

    SHARE = 0.1
    MAX = 10.0

    def __init__(self) -> None:
        self._left = self.MAX

    def earn(self) -> None:
        self._left = min(self.MAX, self._left + self.SHARE)

    def spend(self) -> bool:
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True
