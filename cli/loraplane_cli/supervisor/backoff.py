"""How long to wait before a process that ended is started again."""

from dataclasses import dataclass

FIRST_SECONDS = 0.2
LAST_SECONDS = 30.0
#: A process that ran this long was healthy: its end is a new trouble, not the same one again.
HEALTHY_SECONDS = 60.0


@dataclass
class Backoff:
    """Doubles from FIRST_SECONDS to LAST_SECONDS, and begins anew after a healthy run."""

    _next: float = FIRST_SECONDS

    def after(self, lived: float) -> float:
        """Seconds to wait after a run of `lived` seconds."""
        if lived >= HEALTHY_SECONDS:
            self._next = FIRST_SECONDS
        delay, self._next = self._next, min(self._next * 2, LAST_SECONDS)
        return delay
