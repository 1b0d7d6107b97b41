"""GET /operator/feed as server-sent events. The reader's pace is the pace: nothing is buffered for it."""

import asyncio
import time
from collections.abc import AsyncIterator

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from loraplane_core.errors import TooManyRequests
from loraplane_core.wire import encode
from loraplane_gateway.db.engine import AWAY, named
from loraplane_gateway.db.sessions import PLATFORM, transaction
from loraplane_gateway.registry.feed.service import FeedService
from loraplane_gateway.registry.http import caller_of, log, number, state_of
from loraplane_gateway.registry.state import RegistryState

HEARTBEAT_SECONDS = 1.0
#: After changes were told the next ones gather for this many times as long as reading them took, within these
#: bounds: many at once cost a reader few looks at Postgres, and a lone one is told at once.
GATHER_FACTOR = 5.0
GATHER_SECONDS = (0.03, 0.2)
MAX_READERS = 16
router = APIRouter()


@router.get("/operator/feed")
async def feed(request: Request) -> Response:
    (await caller_of(request)).require_operator()
    state = state_of(request)
    text = request.query_params.get("cursor", request.headers.get("last-event-id"))
    cursor = None if text is None else number(text, "cursor")
    if state.feed_readers >= MAX_READERS:
        raise TooManyRequests(f"{MAX_READERS} feeds are open", code="too_many_readers")
    first, cursor = await _beginning(state, cursor)
    return StreamingResponse(
        _events(state, first, cursor), media_type="text/event-stream", headers={"cache-control": "no-store"}
    )


async def _beginning(state: RegistryState, cursor: int | None) -> tuple[bytes, int]:
    """A snapshot unless the reader can go on from its cursor; errors are still plain answers here."""
    async with transaction(state.sessions, PLATFORM) as session:
        service = FeedService(session)
        if cursor is not None and await service.continues(cursor):
            return b"", cursor
        snapshot = await service.snapshot()
    return _event("snapshot", snapshot.cursor, snapshot), snapshot.cursor


async def _events(state: RegistryState, first: bytes, cursor: int) -> AsyncIterator[bytes]:
    state.feed_readers += 1
    state.metrics.feed_readers.set(state.feed_readers)
    try:
        yield first or b": continued\n\n"
        while not state.hub.closed:
            seen, started = state.hub.position, time.monotonic()
            async with transaction(state.sessions, PLATFORM) as session:
                changes, following, more = await FeedService(session).changes(cursor)
            for change in changes:
                yield _event("change", change.cursor, change)
            if following != cursor:
                cursor = following
                least, most = GATHER_SECONDS
                await asyncio.sleep(min(most, max(least, GATHER_FACTOR * (time.monotonic() - started))))
            if not more:
                await state.hub.wait(seen, HEARTBEAT_SECONDS)
                yield b": heartbeat\n\n"
    except AWAY as error:
        # A feed that went on without reading would look alive and be stale; the reader comes back with its cursor.
        log.warning("a change feed ended: Postgres did not answer (%s)", named(error))
    finally:
        state.feed_readers -= 1
        state.metrics.feed_readers.set(state.feed_readers)


def _event(kind: str, cursor: int, value: object) -> bytes:
    return b"event: %s\nid: %d\ndata: %s\n\n" % (kind.encode(), cursor, encode(value))
