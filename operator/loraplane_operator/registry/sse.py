"""Server-sent events, as far as the change feed uses them (WHATWG HTML, "Server-sent events")."""

from collections.abc import AsyncIterator
from typing import NamedTuple


class Event(NamedTuple):
    """`kind` "" is a comment: the stream is alive."""

    kind: str
    data: str


async def events(lines: AsyncIterator[str]) -> AsyncIterator[Event]:
    kind, data = "message", list[str]()
    async for line in lines:
        if line.startswith(":"):
            yield Event("", "")
        elif not line:
            if data:
                yield Event(kind, "\n".join(data))
            kind, data = "message", []
        else:
            field, _, value = line.partition(":")
            value = value.removeprefix(" ")
            if field == "event":
                kind = value
            elif field == "data":
                data.append(value)
