# ruff: noqa: S608 - the statements are put together from constants of this module; values are always bound
"""Adapters and versions as rows, and as the wire shows them."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import text

from loraplane_core.identity import PoolRef
from loraplane_core.wire.registry import Adapter, Version
from loraplane_gateway.registry.rows import Repository, rfc3339

_ROW = (
    "a.tenant_id, a.name, a.pool, a.warm_replicas, a.pinned, a.claim_uid, a.claim_ref, a.activation_owner,"
    " a.previous_version, a.last_sole, a.source_hash, a.intent_id,"
    " CASE WHEN a.intent_deadline > now() THEN a.intent_version END AS intent_version"
)
_ADAPTER = (
    f"{_ROW}, (SELECT r.version FROM registrations r WHERE r.uid = a.claim_uid AND r.source_hash = a.source_hash)"
    " AS source_version"
)
_LOCKED = f"{_ROW}, a.next_version, a.intent_action, a.intent_actor"
_VERSION = (
    "v.tenant_id, v.adapter, v.version, v.state, v.reason, v.message, v.digest, v.bytes, v.rank, v.target_modules,"
    " v.base_model, v.base_digest, v.base_evidence, v.weight, v.is_active, v.path, v.created_at, v.parameters"
)
_MINE = "(:tenant = '' OR a.tenant_id = :tenant)"
# An adapter without a claim and without versions is only a counter that keeps its numbers from coming twice.
_EXISTS = """(a.claim_uid IS NOT NULL OR EXISTS (SELECT 1 FROM tenant_adapters v
              WHERE v.tenant_id = a.tenant_id AND v.adapter = a.name))"""
_LIST_ADAPTERS = text(f"SELECT {_ADAPTER} FROM adapters a WHERE {_MINE} AND {_EXISTS} ORDER BY a.tenant_id, a.name")
_LIST_VERSIONS = text(f"""
    SELECT {_VERSION} FROM tenant_adapters v WHERE (:tenant = '' OR v.tenant_id = :tenant)
    ORDER BY v.tenant_id, v.adapter, v.version""")
_WANTED = "(SELECT * FROM unnest(CAST(:tenants AS text[]), CAST(:adapters AS text[])))"
_SOME_ADAPTERS = text(f"SELECT {_ADAPTER} FROM adapters a WHERE (a.tenant_id, a.name) IN {_WANTED} AND {_EXISTS}")
_SOME_VERSIONS = text(f"""
    SELECT {_VERSION} FROM tenant_adapters v WHERE (v.tenant_id, v.adapter) IN {_WANTED} ORDER BY v.version""")
_GET_ADAPTER = text(f"""
    SELECT {_ADAPTER} FROM adapters a WHERE a.tenant_id = :tenant AND a.name = :adapter AND {_EXISTS}""")
_GET_VERSIONS = text(f"""
    SELECT {_VERSION} FROM tenant_adapters v WHERE v.tenant_id = :tenant AND v.adapter = :adapter ORDER BY v.version""")
_GET_VERSION = text(f"""
    SELECT {_VERSION} FROM tenant_adapters v
    WHERE v.tenant_id = :tenant AND v.adapter = :adapter AND v.version = :version""")
_CREATE = text(f"""
    INSERT INTO adapters AS a (tenant_id, name) VALUES (:tenant, :adapter) ON CONFLICT (tenant_id, name) DO NOTHING
    RETURNING {_LOCKED}""")
_LOCK = text(f"SELECT {_LOCKED} FROM adapters a WHERE a.tenant_id = :tenant AND a.name = :adapter FOR UPDATE")
_LOCK_CLAIMED = text(f"SELECT {_LOCKED} FROM adapters a WHERE a.claim_uid = :uid FOR UPDATE")
_SET_POOL = text("UPDATE adapters SET pool = :pool WHERE tenant_id = :tenant AND name = :adapter")
_ADD_VERSION = text(f"""
    INSERT INTO tenant_adapters AS v (tenant_id, adapter, version, path, base_model, state)
    VALUES (:tenant, :adapter, :version, :path, :base_model, :state) RETURNING {_VERSION}""")
_SET_STATE = text("""
    UPDATE tenant_adapters SET state = :state, reason = :reason, message = :message
    WHERE tenant_id = :tenant AND adapter = :adapter AND version = :version""")
_DELETE_VERSION = text("""
    DELETE FROM tenant_adapters WHERE tenant_id = :tenant AND adapter = :adapter AND version = :version""")
_FORGET = text("""
    UPDATE adapters SET previous_version = nullif(previous_version, :version), last_sole = nullif(last_sole, :version)
    WHERE tenant_id = :tenant AND name = :adapter AND :version IN (previous_version, last_sole)""")


@dataclass(frozen=True, slots=True)
class Intent:
    """An activation that waits for warmth and whose time is not over. `action` is what the audit log will say."""

    id: str
    version: int
    action: str
    actor: str


@dataclass(frozen=True, slots=True)
class AdapterRow:
    """An adapter whose row this transaction has locked."""

    tenant: str
    name: str
    next_version: int
    pool: str
    warm_replicas: int
    claim_uid: str
    claim_ref: str
    activation_owner: str
    previous_version: int
    last_sole: int
    source_hash: str
    intent: Intent | None

    @property
    def pool_ref(self) -> PoolRef | None:
        return PoolRef.parse(self.pool) if self.pool else None


class AdapterRepository(Repository):
    """Reads work in both scopes; writes need one tenant's."""

    async def all(self) -> list[Adapter]:
        versions = _by_adapter(await self.session.execute(_LIST_VERSIONS, self.binds))
        rows = await self.session.execute(_LIST_ADAPTERS, self.binds)
        return [_adapter(row, versions.get((row.tenant_id, row.name), [])) for row in rows]

    async def some(self, wanted: Collection[tuple[str, str]]) -> dict[tuple[str, str], Adapter]:
        """Those of the (tenant, adapter)s that there are, as `get` gives them; in the platform's scope."""
        if not wanted:
            return {}
        tenants, adapters = zip(*wanted, strict=True)
        key = {"tenants": list(tenants), "adapters": list(adapters)}
        versions = _by_adapter(await self.session.execute(_SOME_VERSIONS, key))
        rows = await self.session.execute(_SOME_ADAPTERS, key)
        return {(row.tenant_id, row.name): _adapter(row, versions.get((row.tenant_id, row.name), [])) for row in rows}

    async def get(self, adapter: str) -> Adapter | None:
        """With all its versions; None for one that has neither versions nor a claim."""
        key = {"tenant": self.tenant, "adapter": adapter}
        row = (await self.session.execute(_GET_ADAPTER, key)).one_or_none()
        if row is None:
            return None
        return _adapter(row, [_version(found) for found in await self.session.execute(_GET_VERSIONS, key)])

    async def version(self, adapter: str, version: int) -> Version | None:
        row = (await self.session.execute(_GET_VERSION, self._key(adapter, version))).one_or_none()
        return None if row is None else _version(row)

    async def lock(self, adapter: str, *, create: bool = False) -> AdapterRow | None:
        """The row, locked until the transaction ends, so that writers of one adapter queue up."""
        key = {"tenant": self.tenant, "adapter": adapter}
        row = (await self.session.execute(_CREATE, key)).one_or_none() if create else None
        if row is None:
            row = (await self.session.execute(_LOCK, key)).one_or_none()
        return None if row is None else _locked(row)

    async def lock_claimed(self, uid: str) -> AdapterRow | None:
        """As `lock`, of the adapter that this object claims; in the platform's scope."""
        row = (await self.session.execute(_LOCK_CLAIMED, {"uid": uid})).one_or_none()
        return None if row is None else _locked(row)

    async def set_pool(self, adapter: str, pool: PoolRef) -> None:
        await self.session.execute(_SET_POOL, {"tenant": self.tenant, "adapter": adapter, "pool": str(pool)})

    async def add_version(self, locked: AdapterRow, *, path: str, base_model: str, state: str) -> Version:
        """A new version with the next number, which a trigger then moves on."""
        values = {**self._key(locked.name, locked.next_version), "path": path, "base_model": base_model, "state": state}
        return _version((await self.session.execute(_ADD_VERSION, values)).one())

    async def set_state(self, adapter: str, version: int, state: str, reason: str = "", message: str = "") -> None:
        values = {**self._key(adapter, version), "state": state, "reason": reason, "message": message}
        await self.session.execute(_SET_STATE, values)

    async def delete_version(self, adapter: str, version: int) -> None:
        await self.session.execute(_DELETE_VERSION, self._key(adapter, version))
        await self.session.execute(_FORGET, self._key(adapter, version))

    def _key(self, adapter: str, version: int) -> dict[str, Any]:
        return {"tenant": self.tenant, "adapter": adapter, "version": version}


def _locked(row: Any) -> AdapterRow:
    return AdapterRow(
        tenant=row.tenant_id,
        name=row.name,
        next_version=row.next_version,
        pool=row.pool,
        warm_replicas=row.warm_replicas,
        claim_uid=row.claim_uid or "",
        claim_ref=row.claim_ref,
        activation_owner=row.activation_owner,
        previous_version=row.previous_version or 0,
        last_sole=row.last_sole or 0,
        source_hash=row.source_hash,
        intent=Intent(row.intent_id, row.intent_version, row.intent_action, row.intent_actor)
        if row.intent_version
        else None,
    )


def _by_adapter(rows: Iterable[Any]) -> dict[tuple[str, str], list[Version]]:
    found: dict[tuple[str, str], list[Version]] = {}
    for row in rows:
        found.setdefault((row.tenant_id, row.adapter), []).append(_version(row))
    return found


def _adapter(row: Any, versions: list[Version]) -> Adapter:
    validated = {version.version for version in versions if version.state == "validated"}
    weights = {version.version: version.weight for version in versions if version.is_active}
    back = rollback_target(weights, row.previous_version or 0, row.last_sole or 0)
    return Adapter(
        tenant=row.tenant_id,
        adapter=row.name,
        pool=row.pool,
        warm_replicas=row.warm_replicas,
        pinned=row.pinned,
        claim_uid=row.claim_uid or "",
        claim_ref=row.claim_ref,
        activation_owner=row.activation_owner,
        active_version=heaviest(weights),
        intent_version=row.intent_version or 0,
        previous_version=back if back in validated else 0,
        source_hash=row.source_hash if row.claim_uid else "",
        source_version=row.source_version or 0,
        versions=versions,
    )


def _version(row: Any) -> Version:
    return Version(
        tenant=row.tenant_id,
        adapter=row.adapter,
        version=row.version,
        state=row.state,
        reason=row.reason,
        message=row.message,
        digest=row.digest or "",
        bytes=row.bytes,
        rank=row.rank,
        target_modules=list(row.target_modules),
        base_model=row.base_model,
        base_digest=row.base_digest or "",
        base_evidence=row.base_evidence,
        weight=row.weight,
        is_active=row.is_active,
        path=row.path,
        created_at=rfc3339(row.created_at),
        parameters=row.parameters,
    )


def heaviest(weights: Mapping[int, int]) -> int:
    """The version that most requests get, of equals the oldest; 0 for none. `weights` holds no zero."""
    return max(weights, key=lambda version: (weights[version], -version), default=0)


def sole(weights: Mapping[int, int]) -> int:
    """The version that all requests get; 0 when they are shared out, or there is none."""
    return next(iter(weights)) if len(weights) == 1 else 0


def rollback_target(weights: Mapping[int, int], previous: int, last_sole: int) -> int:
    """Where a rollback without a target goes; 0 for nowhere.

    From one version to the one that served alone before it; from a split, or from none, to the last one that did.
    """
    return previous if sole(weights) else last_sole
