"""What the clients of engines and of the registry share: errors in, errors out."""

from collections.abc import Iterator
from contextlib import contextmanager

import httpx

from loraplane_core.errors import DeadlineExceeded, LoraplaneError, Unavailable, from_wire


@contextmanager
def transport_errors(who: str, code: str) -> Iterator[None]:
    """Turns what httpx raises into a LoraplaneError that names the other side."""
    try:
        yield
    except httpx.TimeoutException as error:
        raise DeadlineExceeded(f"{who} did not answer in time") from error
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise Unavailable(f"{who}: {error or type(error).__name__}", code=code) from error


def refusal(response: httpx.Response) -> LoraplaneError:
    """The error that a read answer with a status of 400 or more stands for."""
    try:
        body = response.json()
    except ValueError:
        body = None
    return from_wire(response.status_code, body)
