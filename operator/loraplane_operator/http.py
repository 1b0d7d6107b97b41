"""What the clients of engines and of the registry share: errors in, errors out, and no answer without a bound."""

import asyncio
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import httpx

from loraplane_core.errors import DeadlineExceeded, LoraplaneError, Unavailable, from_wire

#: More than any answer of theirs has. Whoever listens on their port says how long one is.
ANSWER_MAX = 16 << 20


@contextmanager
def transport_errors(who: str, code: str) -> Iterator[None]:
    """Turns what httpx raises into a LoraplaneError that names the other side."""
    try:
        yield
    except (httpx.TimeoutException, TimeoutError) as error:
        raise DeadlineExceeded(f"{who} did not answer in time") from error
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise Unavailable(f"{who}: {error or type(error).__name__}", code=code) from error


async def exchange(
    http: httpx.AsyncClient,
    method: str,
    url: str,
    *,
    headers: Mapping[str, str],
    content: bytes | None,
    timeout: httpx.Timeout,
    seconds: float,
) -> bytes:
    """The body of an answer, all of it within `seconds`. Raises what was refused with, Unavailable when it is longer
    than ANSWER_MAX, and what httpx raises."""
    async with asyncio.timeout(seconds):
        async with http.stream(method, url, headers=headers, content=content, timeout=timeout) as response:
            body = await read(response)
    if response.status_code >= 400:
        raise refusal(response.status_code, body)
    return body


async def read(response: httpx.Response) -> bytes:
    body = bytearray()
    async for chunk in response.aiter_bytes():
        body += chunk
        if len(body) > ANSWER_MAX:
            raise Unavailable(f"{response.url} answers with more than {ANSWER_MAX} bytes")
    return bytes(body)


def refusal(status: int, body: bytes) -> LoraplaneError:
    """The error that an answer with a status of 400 or more stands for."""
    try:
        told = json.loads(body)
    except (ValueError, RecursionError):
        told = None
    return from_wire(status, told)
