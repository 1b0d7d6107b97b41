"""One request, one transaction, one scope.

`transaction(sessions, scope)` is the only way to a session: it tells Postgres whose rows are meant
(row-level security) and commits once at the end. Services and repositories never commit.

SQLAlchemy owns the connections and reads the statements' named values. They go to the driver directly: what
SQLAlchemy does for each statement besides costs four times as much as the statement itself.
"""

import asyncio
import functools
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg.rows import namedtuple_row
from sqlalchemy import TextClause, text
from sqlalchemy.dialects.postgresql.psycopg import PGDialectAsync_psycopg
from sqlalchemy.ext.asyncio import AsyncEngine

from loraplane_gateway.db.engine import AWAY

TRANSACTION_SECONDS = 12.0
_DIALECT = PGDialectAsync_psycopg()  # type: ignore[no-untyped-call]


@dataclass(frozen=True, slots=True)
class Scope:
    """Whose rows a transaction may touch: one tenant's, or with None the whole platform's."""

    tenant: str | None

    @property
    def is_platform(self) -> bool:
        return self.tenant is None


PLATFORM = Scope(None)

_SET_SCOPE = text("""
    SELECT set_config('loraplane.tenant', :tenant, true) AS tenant,
           set_config('loraplane.scope', :scope, true) AS scope""")


class Rows(list[Any]):
    """What a statement gave, all of it; a row has its columns as attributes and in their order."""

    def one(self) -> Any:
        """Raises ValueError unless there is exactly one."""
        (row,) = self
        return row

    def one_or_none(self) -> Any:
        return self.one() if self else None

    def scalars(self) -> list[Any]:
        """Of each row the first column."""
        return [row[0] for row in self]

    def scalar_one(self) -> Any:
        return self.one()[0]

    def scalar_one_or_none(self) -> Any:
        return self.one()[0] if self else None


class Session:
    """One transaction on one connection; statements run one after the other. Raises psycopg.Error."""

    def __init__(self, connection: "psycopg.AsyncConnection[Any]") -> None:
        self._connection = connection
        self._cursor = connection.cursor(row_factory=namedtuple_row)

    @property
    def is_lost(self) -> bool:
        return self._connection.closed

    async def begin(self, scope: Scope) -> None:
        """The transaction and whose rows it means, in one round trip."""
        values = {"tenant": scope.tenant or "", "scope": "platform" if scope.is_platform else "tenant"}
        async with self._connection.pipeline():
            await self._cursor.execute(_native(_SET_SCOPE), values)

    async def execute(self, statement: TextClause, values: Mapping[str, Any] | None = None) -> Rows:
        await self._cursor.execute(_native(statement), values or {})
        return Rows(await self._cursor.fetchall() if self._cursor.description else ())

    async def execute_many(self, statement: TextClause, values: Sequence[Mapping[str, Any]]) -> None:
        await self._cursor.executemany(_native(statement), values)

    async def commit(self) -> None:
        await self._connection.commit()


@functools.cache  # statements are constants of their modules
def _native(statement: TextClause) -> bytes:
    return str(statement.compile(dialect=_DIALECT)).encode()


class Sessions:
    """Of one engine, whose connections they borrow."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine

    @asynccontextmanager
    async def borrowed(self) -> AsyncIterator[Session]:
        """What was not committed is rolled back. A lost connection, or one that was left in the middle, is closed."""
        async with self._engine.connect() as pooled:
            session = Session((await pooled.get_raw_connection()).driver_connection)  # type: ignore[arg-type]
            try:
                yield session
            except asyncio.CancelledError:
                await pooled.invalidate()
                raise
            finally:
                if session.is_lost:
                    await pooled.invalidate()

    async def forget(self) -> None:
        """Connections that nobody has borrowed are opened anew."""
        await self._engine.dispose()


def session_maker(engine: AsyncEngine) -> Sessions:
    return Sessions(engine)


@asynccontextmanager
async def transaction(sessions: Sessions, scope: Scope) -> AsyncIterator[Session]:
    """Raises TimeoutError when the whole transaction takes longer than TRANSACTION_SECONDS."""
    async with asyncio.timeout(TRANSACTION_SECONDS), AsyncExitStack() as stack:
        session = await stack.enter_async_context(sessions.borrowed())
        try:
            await session.begin(scope)
        except AWAY:
            if not session.is_lost:
                raise
            # Lost while it was idle, and so, as it seems, are all that are idle. Nothing has been done yet.
            await sessions.forget()
            session = await stack.enter_async_context(sessions.borrowed())
            await session.begin(scope)
        yield session
        await session.commit()
