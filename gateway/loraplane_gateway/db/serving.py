"""What the data gateway reads and writes with its own role: the serving snapshot, keys by digest, usage.

The snapshot is everything that resolving a request needs, as immutable values; it is replaced whole.
"""

import asyncio
import datetime
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import psycopg
from sqlalchemy import text

from loraplane_core.identity import AdapterId, AdapterRef, PoolRef
from loraplane_gateway.db.engine import CONNECT_SECONDS
from loraplane_gateway.db.sessions import PLATFORM, Sessions, transaction

CHANNEL = "loraplane_changes"


@dataclass(frozen=True, slots=True)
class Pool:
    ref: PoolRef
    base_model: str
    aliases: tuple[str, ...]
    base_digest: str  # empty until an engine told it
    allowed_tenants: frozenset[str]  # empty = all

    def allows(self, tenant: str) -> bool:
        return not self.allowed_tenants or tenant in self.allowed_tenants

    def is_called(self, base: str) -> bool:
        return base == self.base_model or base in self.aliases


@dataclass(frozen=True, slots=True)
class ActiveVersion:
    """A validated version with a weight."""

    id: AdapterId
    base_digest: str
    bytes: int
    rank: int
    weight: int


@dataclass(frozen=True, slots=True)
class ServedAdapter:
    tenant: str
    name: str
    pool: str  # namespace/name; empty while nobody placed it
    warm_replicas: int
    created: int  # Unix seconds
    versions: tuple[ActiveVersion, ...]  # by version, at least one


@dataclass(frozen=True, slots=True)
class Snapshot:
    """`cursor` is the change feed's position that it includes."""

    cursor: int = 0
    tenants: frozenset[str] = frozenset()
    pools: Mapping[str, Pool] = field(default_factory=lambda: MappingProxyType({}))
    adapters: Mapping[tuple[str, str], ServedAdapter] = field(default_factory=lambda: MappingProxyType({}))


@dataclass(frozen=True, slots=True)
class Principal:
    """Who a key speaks for. Immutable, so a cached one can be dropped but never half-changed."""

    tenant: str
    key_id: str
    scopes: frozenset[str]
    expires_at: datetime.datetime | None


@dataclass(frozen=True, slots=True)
class KeyRow:
    principal: Principal
    revoked: bool


@dataclass(frozen=True, slots=True)
class UsageEvent:
    request_id: str
    at: datetime.datetime
    tenant: str
    key_id: str
    pool: str
    base_model: str
    adapter: str  # empty for the base
    version: int
    status: int
    prompt_tokens: int
    completion_tokens: int


_CURSOR = text("SELECT coalesce(max(cursor), 0) FROM changes")
_TENANTS = text("SELECT name FROM tenants")
_POOLS = text("SELECT namespace, name, base_model, aliases, base_digest, allowed_tenants FROM pools")
# Unverified, waiting and rejected versions are never active (a CHECK says so); the state is asked for all the same.
_ADAPTERS = text("""
    SELECT a.tenant_id, a.name, a.pool, a.warm_replicas, extract(epoch FROM a.created_at)::bigint AS created,
           v.version, v.digest, v.base_digest, v.bytes, v.rank, v.weight
    FROM adapters a JOIN tenant_adapters v ON v.tenant_id = a.tenant_id AND v.adapter = a.name
    WHERE v.is_active AND v.state = 'validated' ORDER BY a.tenant_id, a.name, v.version""")
_CHANGED_KEYS = text("SELECT DISTINCT name FROM changes WHERE kind = 'key' AND cursor > :cursor")
_FIND_KEY = text("SELECT key_id, tenant_id, scopes, expires_at, revoked_at FROM loraplane_find_key(:digest)")
_ADD_USAGE = text("""
    INSERT INTO usage_events (day, request_id, tenant_id, key_id, pool, base_model, adapter, version, status,
                              prompt_tokens, completion_tokens, created_at)
    VALUES (:day, :request_id, :tenant, :key_id, :pool, :base_model, :adapter, :version, :status,
            :prompt_tokens, :completion_tokens, :at)
    ON CONFLICT DO NOTHING""")


class ServingRepository:
    """Raises SQLAlchemyError or TimeoutError when Postgres does not answer; nothing else."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions

    async def cursor(self) -> int:
        async with transaction(self._sessions, PLATFORM) as session:
            return int((await session.execute(_CURSOR)).scalar_one())

    async def snapshot(self) -> Snapshot:
        async with transaction(self._sessions, PLATFORM) as session:
            # The cursor is read first: whatever is committed in between is at worst read twice.
            cursor = int((await session.execute(_CURSOR)).scalar_one())
            tenants = frozenset((await session.execute(_TENANTS)).scalars())
            pools = {}
            for row in await session.execute(_POOLS):
                ref = PoolRef(row.namespace, row.name)
                pools[str(ref)] = Pool(
                    ref, row.base_model, tuple(row.aliases), row.base_digest, frozenset(row.allowed_tenants)
                )
            adapters: dict[tuple[str, str], ServedAdapter] = {}
            for row in await session.execute(_ADAPTERS):
                key = (row.tenant_id, row.name)
                version = ActiveVersion(
                    AdapterId.of(AdapterRef(*key, row.version), row.digest),
                    row.base_digest,
                    row.bytes,
                    row.rank,
                    row.weight,
                )
                earlier = adapters[key].versions if key in adapters else ()
                adapters[key] = ServedAdapter(*key, row.pool, row.warm_replicas, row.created, (*earlier, version))
        return Snapshot(cursor, tenants, MappingProxyType(pools), MappingProxyType(adapters))

    async def changed_keys(self, cursor: int) -> frozenset[str]:
        """Ids of keys made, changed or revoked after that position of the feed."""
        async with transaction(self._sessions, PLATFORM) as session:
            return frozenset((await session.execute(_CHANGED_KEYS, {"cursor": cursor})).scalars())

    async def find_key(self, digest: bytes) -> KeyRow | None:
        async with transaction(self._sessions, PLATFORM) as session:
            row = (await session.execute(_FIND_KEY, {"digest": digest})).one_or_none()
        if row is None:
            return None
        principal = Principal(row.tenant_id, row.key_id, frozenset(row.scopes), row.expires_at)
        return KeyRow(principal, row.revoked_at is not None)

    async def add_usage(self, events: Sequence[UsageEvent]) -> None:
        """Idempotent by (day, request id)."""
        rows = [
            {
                **{name: getattr(event, name) for name in UsageEvent.__slots__},
                "day": event.at.astimezone(datetime.UTC).date(),
            }
            for event in events
        ]
        async with transaction(self._sessions, PLATFORM) as session:
            await session.execute(_ADD_USAGE, rows)


class ChangeListener:
    """A connection that hears of changes as they are committed."""

    def __init__(self, connection: psycopg.AsyncConnection[Any]) -> None:
        self._connection = connection

    async def wait(self, seconds: float) -> None:
        """Returns on the next notice, or after `seconds`. Raises psycopg.Error when the connection is lost."""
        async for _ in self._connection.notifies(timeout=seconds, stop_after=1):
            return


@asynccontextmanager
async def listening(database_url: str) -> AsyncIterator[ChangeListener]:
    """Raises psycopg.Error, TimeoutError."""
    async with asyncio.timeout(CONNECT_SECONDS + 1):
        connection = await psycopg.AsyncConnection.connect(
            database_url, autocommit=True, connect_timeout=CONNECT_SECONDS, application_name="loraplane-data-listen"
        )
    try:
        async with asyncio.timeout(CONNECT_SECONDS):
            await connection.execute(f"LISTEN {CHANNEL}")
        yield ChangeListener(connection)
    finally:
        await connection.close()
