"""One request, one transaction, one scope.

`transaction(sessions, scope)` is the only way to a session: it tells Postgres whose rows are meant
(row-level security) and commits once at the end. Services and repositories never commit.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from sqlalchemy import text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker

TRANSACTION_SECONDS = 12.0
Sessions = async_sessionmaker[AsyncSession]


@dataclass(frozen=True, slots=True)
class Scope:
    """Whose rows a transaction may touch: one tenant's, or with None the whole platform's."""

    tenant: str | None

    @property
    def is_platform(self) -> bool:
        return self.tenant is None


PLATFORM = Scope(None)

_SET_SCOPE = text("SELECT set_config('loraplane.tenant', :tenant, true), set_config('loraplane.scope', :scope, true)")


def session_maker(engine: AsyncEngine) -> Sessions:
    return async_sessionmaker(engine, expire_on_commit=False)


@asynccontextmanager
async def transaction(sessions: Sessions, scope: Scope) -> AsyncIterator[AsyncSession]:
    """Raises TimeoutError when the whole transaction takes longer than TRANSACTION_SECONDS."""
    async with asyncio.timeout(TRANSACTION_SECONDS), sessions() as session:
        try:
            await _begin(session, scope)
        except DBAPIError as error:
            if not error.connection_invalidated:
                raise
            # A connection that was lost while it was idle; with it, the engine dropped all that are as old.
            await session.rollback()
            await _begin(session, scope)
        yield session
        await session.commit()


async def _begin(session: AsyncSession, scope: Scope) -> None:
    values = {"tenant": scope.tenant or "", "scope": "platform" if scope.is_platform else "tenant"}
    await session.execute(_SET_SCOPE, values)
