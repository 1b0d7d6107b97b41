"""Wait for a condition that has to be asked for."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")


async def eventually(holds: Callable[[], Awaitable[T | None]], seconds: float = 10.0, what: str = "") -> T:
    """What made it true, asked for until the deadline."""
    async with asyncio.timeout(seconds * 2):
        deadline = asyncio.get_running_loop().time() + seconds
        while True:
            found = await holds()
            if found:
                return found
            assert asyncio.get_running_loop().time() < deadline, f"not within {seconds} s: {what or holds.__qualname__}"
            await asyncio.sleep(0.02)
