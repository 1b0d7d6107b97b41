"""News without contents: whoever waits asks Postgres, which has the truth in order."""

import asyncio
import contextlib


class Signal:
    def __init__(self) -> None:
        self._changed = asyncio.Event()
        self.position = 0

    async def wait(self, seen: int, seconds: float) -> None:
        """Returns when `position` differs from `seen`, or the time is over."""
        if self.position != seen:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._changed.wait()

    def wake(self) -> None:
        self.position += 1
        self._changed.set()
        # Those who wait have been scheduled by set(); who comes later compares positions.
        self._changed = asyncio.Event()
