# ruff: noqa: S608 - the statements are put together from constants of this module; values are always bound
"""What the data gateway reads and writes with its own role: the serving snapshot, keys by digest, usage.

The snapshot is everything that resolving a request needs, as immutable values; it is replaced, never changed.
"""

import asyncio
import datetime
from collections.abc import AsyncIterator, Collection, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import psycopg
from sqlalchemy import text

from loraplane_core.identity import AdapterId, AdapterRef, PoolRef
from loraplane_gateway.db.engine import CONNECT_SECONDS
from loraplane_gateway.db.sessions import PLATFORM, Session, Sessions, transaction

CHANNEL = "loraplane_changes"
#: Changes that one update takes.
CHANGES_MAX = 1000
Key = tuple[str, str]  # tenant, adapter


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
class Update:
    """A later snapshot, and the ids of the keys made, changed or revoked since; None when that is not known."""

    snapshot: Snapshot
    keys: frozenset[str] | None
    caught_up: bool = True  # False: the feed told more than one update takes


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
_SERVED = """
    SELECT a.tenant_id, a.name, a.pool, a.warm_replicas, extract(epoch FROM a.created_at)::bigint AS created,
           v.version, v.digest, v.base_digest, v.bytes, v.rank, v.weight
    FROM adapters a JOIN tenant_adapters v ON v.tenant_id = a.tenant_id AND v.adapter = a.name
    WHERE v.is_active AND v.state = 'validated'"""
_ADAPTERS = text(f"{_SERVED} ORDER BY v.version")
_SOME_ADAPTERS = text(f"""{_SERVED}
    AND (a.tenant_id, a.name) IN (SELECT * FROM unnest(CAST(:tenants AS text[]), CAST(:adapters AS text[])))
    ORDER BY v.version""")
# With the change that was seen last: the oldest are removed first, so while it is there none after it is missing.
_CHANGES = text("""
    SELECT cursor, kind, tenant_id, name FROM changes WHERE cursor >= :cursor ORDER BY cursor LIMIT :limit""")
_FIND_KEY = text("SELECT key_id, tenant_id, scopes, expires_at, revoked_at FROM loraplane_find_key(:digest)")
_ADD_USAGE = text("""
    INSERT INTO usage_events (day, request_id, tenant_id, key_id, pool, base_model, adapter, version, status,
                              prompt_tokens, completion_tokens, created_at)
    VALUES (:day, :request_id, :tenant, :key_id, :pool, :base_model, :adapter, :version, :status,
            :prompt_tokens, :completion_tokens, :at)
    ON CONFLICT DO NOTHING""")


class ServingRepository:
    """Raises one of engine.AWAY when Postgres does not answer."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions

    async def snapshot(self) -> Snapshot:
        """Everything."""
        async with transaction(self._sessions, PLATFORM) as session:
            return await _everything(session)

    async def update(self, before: Snapshot) -> Update:
        """`before` with what the feed told since, at most CHANGES_MAX changes of it; `before` itself if nothing."""
        async with transaction(self._sessions, PLATFORM) as session:
            # Changes are read first: whatever is committed in between is at worst read twice.
            values = {"cursor": before.cursor, "limit": CHANGES_MAX + 1}
            rows = await session.execute(_CHANGES, values)
            if not rows and not before.cursor:
                return Update(before, frozenset())
            if not rows or rows[0].cursor != before.cursor:
                return Update(await _everything(session), None)
            if len(rows) == 1:
                return Update(before, frozenset())
            kinds = {row.kind for row in rows[1:]}
            changed = {(row.tenant_id, row.name) for row in rows[1:] if row.kind == "adapter"}
            after = Snapshot(
                cursor=rows[-1].cursor,
                tenants=await _tenants(session) if "tenant" in kinds else before.tenants,
                pools=await _pools(session) if "pool" in kinds else before.pools,
                adapters=await _with(session, before.adapters, changed) if changed else before.adapters,
            )
        keys = frozenset(row.name for row in rows[1:] if row.kind == "key")
        return Update(after, keys, caught_up=len(rows) <= CHANGES_MAX)

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
            await session.execute_many(_ADD_USAGE, rows)


async def _everything(session: Session) -> Snapshot:
    # The cursor is read first: whatever is committed in between is at worst read twice.
    cursor = int((await session.execute(_CURSOR)).scalar_one())
    tenants, pools = await _tenants(session), await _pools(session)
    return Snapshot(cursor, tenants, pools, MappingProxyType(_adapters(await session.execute(_ADAPTERS))))


async def _tenants(session: Session) -> frozenset[str]:
    return frozenset((await session.execute(_TENANTS)).scalars())


async def _pools(session: Session) -> Mapping[str, Pool]:
    found = {}
    for row in await session.execute(_POOLS):
        ref = PoolRef(row.namespace, row.name)
        aliases, tenants = tuple(row.aliases), frozenset(row.allowed_tenants)
        found[str(ref)] = Pool(ref, row.base_model, aliases, row.base_digest, tenants)
    return MappingProxyType(found)


async def _with(
    session: Session, before: Mapping[Key, ServedAdapter], changed: Collection[Key]
) -> Mapping[Key, ServedAdapter]:
    """`before`, but those that changed as they are now. `changed` is not empty."""
    tenants, adapters = zip(*changed, strict=True)
    values = {"tenants": list(tenants), "adapters": list(adapters)}
    now = _adapters(await session.execute(_SOME_ADAPTERS, values))
    kept = {key: adapter for key, adapter in before.items() if key not in changed}
    return MappingProxyType(kept | now)


def _adapters(rows: Iterable[Any]) -> dict[Key, ServedAdapter]:
    found: dict[Key, ServedAdapter] = {}
    for row in rows:
        key = (row.tenant_id, row.name)
        served = AdapterId.of(AdapterRef(*key, row.version), row.digest)
        version = ActiveVersion(served, row.base_digest, row.bytes, row.rank, row.weight)
        earlier = found[key].versions if key in found else ()
        found[key] = ServedAdapter(*key, row.pool, row.warm_replicas, row.created, (*earlier, version))
    return found


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
