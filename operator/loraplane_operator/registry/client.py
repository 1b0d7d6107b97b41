"""The registry's operator routes (wire/registry.py). Every call has a deadline; refusals keep their code."""

from collections.abc import AsyncGenerator
from typing import Literal
from urllib.parse import quote

import httpx

from loraplane_core.errors import NotFound
from loraplane_core.identity import PoolRef
from loraplane_core.wire import decode, encode
from loraplane_core.wire.registry import (
    Activate,
    Adapter,
    Claim,
    ClaimRequest,
    PoolReport,
    RegisterSource,
    SetTraffic,
    Version,
    Warmed,
)
from loraplane_operator.http import exchange, read, refusal, transport_errors
from loraplane_operator.registry.sse import Event, events

CONNECT_SECONDS = 2.0
CALL_SECONDS = 10.0
#: The feed sends a comment every second; this many seconds of silence end the stream.
FEED_SILENCE_SECONDS = 4.0


class RegistryClient:
    """The httpx client belongs to the caller."""

    def __init__(self, http: httpx.AsyncClient, url: str, token: str) -> None:
        self._http = http
        self._url = url.rstrip("/")
        self._headers = {"authorization": f"Bearer {token}"}

    async def report_pool(self, pool: PoolRef, report: PoolReport) -> None:
        await self._call("PUT", f"/operator/pools/{pool}", report)

    async def remove_pool(self, pool: PoolRef) -> None:
        await self._gone("DELETE", f"/operator/pools/{pool}")

    async def claim(self, uid: str, request: ClaimRequest) -> Claim:
        return decode(await self._call("PUT", _claim(uid), request), Claim)

    async def release(self, uid: str, versions: Literal["retain", "delete"]) -> None:
        await self._gone("DELETE", f"{_claim(uid)}?versions={versions}")

    async def register(self, uid: str, request: RegisterSource) -> Version:
        return decode(await self._call("POST", f"{_claim(uid)}/register", request), Version)

    async def activate(self, uid: str, request: Activate) -> Adapter:
        return decode(await self._call("POST", f"{_claim(uid)}/activate", request), Adapter)

    async def set_traffic(self, uid: str, request: SetTraffic) -> Adapter:
        return decode(await self._call("POST", f"{_claim(uid)}/traffic", request), Adapter)

    async def confirm_warm(self, tenant: str, adapter: str, request: Warmed) -> None:
        """An adapter that is not there any more waits for nothing."""
        await self._gone("POST", f"/operator/warm/{tenant}/{adapter}", request)

    async def feed(self, cursor: int | None) -> AsyncGenerator[Event, None]:
        """Events from `cursor` on (None: a snapshot first) until the stream ends or falls silent (raises)."""
        timeout = httpx.Timeout(CONNECT_SECONDS, read=FEED_SILENCE_SECONDS)
        query = {} if cursor is None else {"cursor": str(cursor)}
        with transport_errors("the registry", "registry_unavailable"):
            async with self._http.stream(
                "GET", f"{self._url}/operator/feed", params=query, headers=self._headers, timeout=timeout
            ) as response:
                if response.status_code != 200:
                    raise refusal(response.status_code, await read(response))
                async for event in events(response.aiter_lines()):
                    yield event

    async def _gone(self, method: str, path: str, body: object = None) -> None:
        """What is not there any more needs nothing done to it."""
        try:
            await self._call(method, path, body)
        except NotFound:
            return

    async def _call(self, method: str, path: str, body: object = None) -> bytes:
        content = None if body is None else encode(body)
        timeout = httpx.Timeout(CONNECT_SECONDS, read=CALL_SECONDS, write=CALL_SECONDS, pool=CALL_SECONDS)
        headers = {**self._headers, "content-type": "application/json"}
        bound = CONNECT_SECONDS + 2 * CALL_SECONDS
        with transport_errors("the registry", "registry_unavailable"):
            return await exchange(
                self._http,
                method,
                self._url + path,
                headers=headers,
                content=content,
                timeout=timeout,
                seconds=bound,
            )


def _claim(uid: str) -> str:
    return f"/operator/claims/{quote(uid, safe='')}"
