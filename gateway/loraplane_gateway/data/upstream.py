"""The engines' data port: requests rebuilt from the trusted reference, answers cut down to known headers.

Nothing of the client's goes through but the body that was parsed and three harmless headers.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import cast

import httpx
from starlette.types import Scope

from loraplane_core import headers as names
from loraplane_core.credentials import engine_credential
from loraplane_core.identity import BASE_REFERENCE
from loraplane_core.wire import PROTOCOL
from loraplane_gateway.data.http import RawHeaders, header
from loraplane_gateway.data.request import InferenceRequest
from loraplane_gateway.data.resolve import Target
from loraplane_gateway.data.routing.router import Lease

log = logging.getLogger(__name__)
CLOSE_SECONDS = 2.0
POOL_SECONDS = 5.0
WRITE_SECONDS = 30.0
#: Well below the 75 s after which an engine closes an idle connection, or requests would run into the close.
IDLE_SECONDS = 30.0
_PASSED_BACK = (
    "content-type",
    "retry-after",
    "x-should-retry",
    names.ADAPTER_ID,
    names.REPLICA,
    names.BOOT,
    names.RESIDENCY,
    names.QUEUE_MS,
    names.IGNORED_PARAMS,
)


class ReplicaFailed(Exception):
    """The replica gave no answer, or not all of it."""


class ReplicaSilent(Exception):
    """The replica said nothing for too long; it may well be working, so nobody tries again."""


@dataclass(frozen=True, slots=True)
class Call:
    """What one attempt sends."""

    request: InferenceRequest
    request_id: str
    accept: str


def call_of(scope: Scope, request: InferenceRequest, request_id: str) -> Call:
    accept = header(scope, "accept") or ""
    return Call(request, request_id, accept if accept.isascii() and accept.isprintable() and accept else "*/*")


def new_client(*, connect: float, silence: float, connections: int) -> httpx.AsyncClient:
    """Bounded by the number of requests admitted, so that nobody waits for a pooled connection."""
    return httpx.AsyncClient(
        timeout=httpx.Timeout(connect=connect, read=silence, write=WRITE_SECONDS, pool=POOL_SECONDS),
        limits=httpx.Limits(max_connections=connections, max_keepalive_connections=256, keepalive_expiry=IDLE_SECONDS),
        headers={"accept-encoding": "identity", "user-agent": "loraplane-gateway"},
        follow_redirects=False,
        trust_env=False,
    )


class Engines:
    def __init__(self, client: httpx.AsyncClient, data_key: bytes) -> None:
        self._client = client
        self._data_key = data_key
        self._closing: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def answer(self, call: Call, target: Target, lease: Lease) -> AsyncIterator[httpx.Response]:
        """The engine's answer, its body unread. Leaving early closes the connection, and so aborts the request.

        Raises ReplicaFailed, ReplicaSilent.
        """
        endpoint = lease.endpoint
        request = self._client.build_request(
            "POST",
            f"http://{endpoint.address}:{endpoint.data_port}{call.request.path}",
            content=call.request.body,
            headers=self._headers(call, target, lease),
        )
        try:
            answer = await self._client.send(request, stream=True)
        except httpx.ReadTimeout as error:
            raise ReplicaSilent(str(endpoint.replica)) from error
        except httpx.HTTPError as error:
            raise ReplicaFailed(f"{endpoint.replica}: {type(error).__name__}") from error
        try:
            yield answer
        finally:
            await self._close(answer)

    def _headers(self, call: Call, target: Target, lease: Lease) -> dict[str, str]:
        endpoint = lease.endpoint
        token = engine_credential(self._data_key, endpoint.replica.pool_ref, endpoint.epoch)
        found = {
            "authorization": f"Bearer {token}",
            "content-type": "application/json",
            "accept": call.accept,
            names.REQUEST_ID: call.request_id,
            names.PROTOCOL: str(PROTOCOL),
            names.BASE_DIGEST: target.base_digest,
            names.TENANT: target.tenant,
            names.ADAPTER: BASE_REFERENCE,
        }
        if target.version is not None:
            version = target.version
            found[names.ADAPTER] = str(version.id.ref)
            found[names.DIGEST] = version.id.digest
            found[names.BYTES] = str(version.bytes)
            found[names.RANK] = str(version.rank)
        return found

    async def _close(self, answer: httpx.Response) -> None:
        """In a task of its own: a cancelled request must not leave its connection half returned (G49)."""
        task = asyncio.create_task(_close(answer), name="close an engine's answer")
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
        await asyncio.shield(task)


async def _close(answer: httpx.Response) -> None:
    try:
        async with asyncio.timeout(CLOSE_SECONDS):
            await answer.aclose()
    except (httpx.HTTPError, OSError, TimeoutError) as error:
        log.warning("an engine's connection was not closed in order: %s", type(error).__name__)


@asynccontextmanager
async def pieces_of(answer: httpx.Response) -> AsyncIterator[AsyncIterator[bytes]]:
    """The body as it arrives. Raises ReplicaFailed, ReplicaSilent."""
    try:
        async with aclosing(cast(AsyncGenerator[bytes, None], answer.aiter_raw())) as pieces:
            yield pieces
    except httpx.ReadTimeout as error:
        raise ReplicaSilent("between two pieces of an answer") from error
    except httpx.HTTPError as error:
        raise ReplicaFailed(f"in the middle of an answer: {type(error).__name__}") from error


async def whole(answer: httpx.Response, limit: int) -> bytes:
    """The whole body. Raises ReplicaFailed (also when it is longer than `limit`), ReplicaSilent."""
    found = bytearray()
    async with pieces_of(answer) as pieces:
        async for piece in pieces:
            found += piece
            if len(found) > limit:
                raise ReplicaFailed(f"the answer is longer than {limit} bytes")
    return bytes(found)


def passed_back(answer: httpx.Response) -> RawHeaders:
    return [(name.encode(), answer.headers[name].encode("latin-1")) for name in _PASSED_BACK if name in answer.headers]
