"""Types that cross a process border between components, and the protocol number they carry.

Every component speaks PROTOCOL and PROTOCOL - 1 and refuses others with a reason. Fields are only
added, with defaults; unknown fields are ignored (msgspec's default), so N-1 can read N.
"""

from typing import TypeVar

import msgspec

from loraplane_core.errors import InvalidRequest, ProtocolMismatch

PROTOCOL = 1

T = TypeVar("T")


def check_protocol(number: int, who: str) -> None:
    """Raises ProtocolMismatch unless `number` is spoken here."""
    if number not in (PROTOCOL, PROTOCOL - 1):
        raise ProtocolMismatch(f"{who} speaks protocol {number}; this side speaks {PROTOCOL} and {PROTOCOL - 1}")


def encode(value: object) -> bytes:
    return msgspec.json.encode(value)


def decode(body: bytes, kind: type[T]) -> T:
    """Read one JSON value as `kind`; raises InvalidRequest naming the path at fault."""
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, RecursionError) as error:  # ValidationError is one
        raise InvalidRequest(f"unreadable body: {error}") from error
