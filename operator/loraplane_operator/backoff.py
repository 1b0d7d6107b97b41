"""Exponential back-off with full-range jitter and a cap, as a value: attempts in, seconds out."""

import random
from dataclasses import dataclass


@dataclass(frozen=True)
class Backoff:
    first: float
    cap: float
    factor: float = 2.0

    def delay(self, attempts: int, jitter: float | None = None) -> float:
        """Seconds to wait after `attempts` failures: between half and all of the exponential step.

        `jitter` in [0, 1) makes it deterministic for tests.
        """
        step = min(self.cap, self.first * self.factor ** min(attempts - 1, 32))
        share = random.random() if jitter is None else jitter  # noqa: S311 - spreading load, not a secret
        return step * (0.5 + share / 2)
