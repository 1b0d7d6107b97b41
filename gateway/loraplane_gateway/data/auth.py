"""Authentication: key → principal, cached, dropped on notice, and honest when Postgres is away.

A cached principal is looked up again after `ttl` (≤ 30 s, the ceiling for a revocation that no notice
carried). While Postgres is away it serves up to `limit`; an unknown key is then 503, never 401.
"""

import asyncio
import datetime
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

import psycopg
from sqlalchemy.exc import SQLAlchemyError

from loraplane_core.credentials import bearer
from loraplane_core.errors import Forbidden, Unauthenticated, Unavailable
from loraplane_gateway import keys
from loraplane_gateway.db.engine import LOST
from loraplane_gateway.db.serving import KeyRow, Principal

log = logging.getLogger(__name__)
LOOKUP_SECONDS = 2.0
#: After a failed look-up, known keys are taken at their last good word for so long before the next try.
AWAY_SECONDS = 3.0
UNKNOWN_SECONDS = 5.0
CACHE_MAX = 20_000
RETRY_AFTER = 5.0
SCOPE = "inference"


class KeyStore(Protocol):
    async def find_key(self, digest: bytes) -> KeyRow | None: ...


@dataclass(frozen=True, slots=True)
class _Entry:
    row: KeyRow | None  # None: no such key
    checked_at: float
    trusted: bool = True  # False: look it up again before the next use, if Postgres answers


class Authenticator:
    def __init__(
        self,
        store: KeyStore,
        pepper: bytes,
        *,
        ttl: float,
        limit: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._pepper = pepper
        self._ttl = ttl
        self._limit = limit
        self._clock = clock
        self._cache: OrderedDict[bytes, _Entry] = OrderedDict()
        self._lookups: dict[bytes, asyncio.Task[KeyRow | None]] = {}
        self._away_until = float("-inf")
        self._notices = 0  # grows with every drop, so that a look-up begun before it is not believed

    async def authenticate(self, authorization: str | None) -> Principal:
        """Raises Unauthenticated, Forbidden (wrong scope), Unavailable (unknown key while Postgres is away)."""
        key = bearer(authorization)
        if key is None:
            raise Unauthenticated("You did not provide an API key; send `Authorization: Bearer KEY`.")
        if keys.key_id(key) is None:
            raise Unauthenticated("Incorrect API key provided: it is not a key of this service.")
        row = await self._row(keys.digest(self._pepper, key))
        if row is None or row.revoked or _expired(row.principal):
            raise Unauthenticated("Incorrect API key provided: it is unknown, expired or revoked.")
        if SCOPE not in row.principal.scopes:
            raise Forbidden(f"This API key lacks the scope `{SCOPE}`.")
        return row.principal

    def drop_keys(self, ids: Iterable[str]) -> None:
        """These keys were made, changed or revoked."""
        gone = frozenset(ids)
        self._drop(lambda row: row.principal.key_id in gone)

    def drop_tenants(self, tenants: Iterable[str]) -> None:
        gone = frozenset(tenants)
        if gone:
            self._drop(lambda row: row.principal.tenant in gone)

    def distrust(self) -> None:
        """Notices may have been missed: look every key up again on its next use, if Postgres answers."""
        self._notices += 1
        for digest, entry in self._cache.items():
            self._cache[digest] = _Entry(entry.row, entry.checked_at, trusted=False)

    def _drop(self, matches: Callable[[KeyRow], bool]) -> None:
        self._notices += 1
        # An entry for "no such key" goes as well: the notice may be about a key that exists since.
        gone = [digest for digest, entry in self._cache.items() if entry.row is None or matches(entry.row)]
        for digest in gone:
            del self._cache[digest]

    async def _row(self, digest: bytes) -> KeyRow | None:
        entry = self._cache.get(digest)
        if entry is not None and entry.trusted:
            lifetime = self._ttl if entry.row is not None else UNKNOWN_SECONDS
            if self._clock() - entry.checked_at < lifetime:
                self._cache.move_to_end(digest)
                return entry.row
        last_good = None
        if entry is not None and entry.row is not None and self._clock() - entry.checked_at < self._limit:
            last_good = entry.row
        if last_good is not None and self._clock() < self._away_until:
            return last_good
        try:
            async with asyncio.timeout(LOOKUP_SECONDS):
                return await self._look_up(digest)
        except (psycopg.Error, SQLAlchemyError, OSError, TimeoutError) as error:
            if not isinstance(error, LOST):  # a defect; those who were let in before need not suffer from it
                log.error("API keys cannot be looked up", exc_info=error)
            self._away_until = self._clock() + AWAY_SECONDS
            if last_good is not None:
                return last_good
            raise Unavailable("API keys cannot be checked at the moment.", retry_after=RETRY_AFTER) from error

    async def _look_up(self, digest: bytes) -> KeyRow | None:
        """One query per key at a time; a caller that leaves does not take it away from the others.

        The deadline is the callers': a query on a frozen Postgres cannot even be cancelled in time.
        """
        task = self._lookups.get(digest)
        if task is None:
            task = asyncio.create_task(self._query(digest), name="key look-up")
            self._lookups[digest] = task
            task.add_done_callback(lambda done: self._forget(digest, done))
        return await asyncio.shield(task)

    def _forget(self, digest: bytes, task: asyncio.Task[KeyRow | None]) -> None:
        self._lookups.pop(digest, None)
        if not task.cancelled():
            task.exception()  # every waiter may have left; then nobody else reads it

    async def _query(self, digest: bytes) -> KeyRow | None:
        while True:
            notices = self._notices
            row = await self._store.find_key(digest)
            if notices == self._notices:
                break
        self._cache[digest] = _Entry(row, self._clock())
        self._cache.move_to_end(digest)
        while len(self._cache) > CACHE_MAX:
            self._cache.popitem(last=False)
        return row


def _expired(principal: Principal) -> bool:
    return principal.expires_at is not None and principal.expires_at <= datetime.datetime.now(datetime.UTC)
