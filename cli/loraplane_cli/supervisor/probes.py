"""Readiness over HTTP."""

from collections.abc import Awaitable, Callable

import httpx

from loraplane_cli.supervisor.ports import LOOPBACK


def http_ready(client: httpx.AsyncClient, port: Callable[[], int], path: str) -> Callable[[], Awaitable[bool]]:
    """A probe that is True when GET `path` on the port of now answers 200."""

    async def probe() -> bool:
        try:
            answer = await client.get(f"http://{LOOPBACK}:{port()}{path}")
        except httpx.HTTPError:
            return False
        return answer.status_code == 200

    return probe


def blocking(check: Callable[[], bool]) -> Callable[[], Awaitable[bool]]:
    """A check that blocks for a moment at most, as a probe."""

    async def probe() -> bool:
        return check()

    return probe
