"""One engine's admin port (wire/engine.py). Every call has a deadline; refusals keep the engine's code."""

from collections.abc import AsyncGenerator, AsyncIterator

import httpx

from loraplane_core import headers
from loraplane_core.errors import Unavailable
from loraplane_core.identity import AdapterId
from loraplane_core.wire import decode, encode
from loraplane_core.wire.engine import STATE_TIMEOUT_SECONDS, ModelInfo, Pin, PutAdapter, Residence, StateMessage
from loraplane_operator.http import exchange, read, refusal, transport_errors

CONNECT_SECONDS = 1.0
CALL_SECONDS = 5.0
#: Added to a deadline that the engine itself keeps, so that its own answer arrives first.
MARGIN_SECONDS = 2.0
LOAD_SECONDS = 30.0
_LINE_MAX = 16 << 20


class EngineClient:
    """Speaks to one address with the `admin` credential. The httpx client belongs to the caller."""

    def __init__(self, http: httpx.AsyncClient, url: str, token: str) -> None:
        self._http = http
        self._url = url.rstrip("/")
        self._headers = {"authorization": f"Bearer {token}"}

    async def warm(self, id_: AdapterId, *, size: int, rank: int, pinned: bool) -> Residence:
        body = PutAdapter(digest=id_.digest, bytes=size, rank=rank, pinned=pinned, deadline_s=LOAD_SECONDS)
        answer = await self._call("PUT", _path(id_), seconds=LOAD_SECONDS + MARGIN_SECONDS, content=encode(body))
        return decode(answer, Residence)

    async def withdraw(self, id_: AdapterId, drain_s: float) -> Residence:
        path = f"{_path(id_)}?drain_s={drain_s:g}"
        answer = await self._call("DELETE", path, seconds=drain_s + CALL_SECONDS, digest=id_.digest)
        return decode(answer, Residence)

    async def mark(self, id_: AdapterId, *, pinned: bool, warm: bool) -> Residence:
        body = encode(Pin(pinned=pinned, warm=warm))
        answer = await self._call("POST", f"{_path(id_)}/pin", seconds=CALL_SECONDS, content=body, digest=id_.digest)
        return decode(answer, Residence)

    async def model(self) -> ModelInfo:
        return decode(await self._call("GET", "/model", seconds=CALL_SECONDS), ModelInfo)

    async def state(self) -> AsyncGenerator[StateMessage, None]:
        """The /state stream until it ends, falls silent for STATE_TIMEOUT_SECONDS or becomes unreadable (raises)."""
        timeout = httpx.Timeout(CONNECT_SECONDS, read=STATE_TIMEOUT_SECONDS)
        with transport_errors(self._url, "engine_unreachable"):
            async with self._http.stream(
                "GET", f"{self._url}/state", headers=self._headers, timeout=timeout
            ) as response:
                if response.status_code != 200:
                    raise refusal(response.status_code, await read(response))
                async for line in _lines(response):
                    yield decode(line, StateMessage)  # type: ignore[arg-type]  # a union is a type to msgspec

    async def _call(
        self, method: str, path: str, *, seconds: float, content: bytes | None = None, digest: str = ""
    ) -> bytes:
        sent = {**self._headers, **({headers.DIGEST: digest} if digest else {})}
        timeout = httpx.Timeout(CONNECT_SECONDS, read=seconds, write=CALL_SECONDS)
        bound = CONNECT_SECONDS + seconds + CALL_SECONDS
        with transport_errors(self._url, "engine_unreachable"):
            return await exchange(
                self._http,
                method,
                self._url + path,
                headers=sent,
                content=content,
                timeout=timeout,
                seconds=bound,
            )


async def _lines(response: httpx.Response) -> AsyncIterator[bytes]:
    buffer = b""
    async for chunk in response.aiter_raw():
        *lines, buffer = (buffer + chunk).split(b"\n")
        for line in lines:
            if line.strip():
                yield line
        if len(buffer) > _LINE_MAX:
            raise Unavailable("a /state message is larger than any engine sends")


def _path(id_: AdapterId) -> str:
    return f"/adapters/{id_.tenant}/{id_.adapter}/{id_.version}"
