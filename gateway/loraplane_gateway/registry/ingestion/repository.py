"""The work queue and what an ingestion writes into its version's row."""

from dataclasses import dataclass
from typing import Any

import msgspec
from sqlalchemy import text

from loraplane_core.identity import PoolRef
from loraplane_core.wire.registry import PoolReport
from loraplane_gateway.registry.ingestion.worker import Accepted
from loraplane_gateway.registry.rows import Repository

_ENQUEUE = text("""
    INSERT INTO ingestions (tenant_id, adapter, version, source, expected_digest, verify, activate)
    VALUES (:tenant, :adapter, :version, :source, :expected_digest, :verify, :activate)
    ON CONFLICT (tenant_id, adapter, version) DO NOTHING""")
# One at a time, oldest first, only when its pool knows its base. A taken row is invisible to the next taker by
# its lease; a lease that ran out belongs to a registry that is gone.
_TAKE = text("""
    WITH n AS MATERIALIZED (  -- once: a plan may run a subquery again for each row that it joins, and take several
        SELECT i.tenant_id, i.adapter, i.version, i.source, i.expected_digest, i.verify, i.attempts,
               v.rank, v.base_model, v.state, p.namespace, p.name, to_jsonb(p) AS report
        FROM ingestions i
        JOIN tenant_adapters v USING (tenant_id, adapter, version)
        JOIN adapters a ON a.tenant_id = i.tenant_id AND a.name = i.adapter
        JOIN pools p ON a.pool = p.namespace || '/' || p.name
        WHERE p.base_digest <> '' AND p.config <> '{}'::jsonb AND (i.lease_until IS NULL OR i.lease_until < now())
        ORDER BY i.queued_at, i.tenant_id, i.adapter, i.version
        LIMIT 1 FOR UPDATE OF i SKIP LOCKED
    )
    UPDATE ingestions SET attempts = n.attempts + 1, lease_until = now() + make_interval(secs => :seconds)
    FROM n
    WHERE ingestions.tenant_id = n.tenant_id AND ingestions.adapter = n.adapter AND ingestions.version = n.version
    RETURNING n.*, EXISTS (
        SELECT 1 FROM ingestions o
        WHERE o.lease_until IS NULL AND (o.tenant_id, o.adapter, o.version) <> (n.tenant_id, n.adapter, n.version)
    ) AS more""")
_DELAY = text("""
    UPDATE ingestions SET lease_until = now() + make_interval(secs => :seconds)
    WHERE tenant_id = :tenant AND adapter = :adapter AND version = :version""")
# A state that somebody set by hand: nothing is queued that could end it.
_UNQUEUED = text("""
    UPDATE tenant_adapters v SET state = 'unverified', reason = '', message = ''
    WHERE state IN ('pending_base', 'ingesting') AND NOT EXISTS (
        SELECT 1 FROM ingestions i
        WHERE i.tenant_id = v.tenant_id AND i.adapter = v.adapter AND i.version = v.version)""")
_RELEASE_ALL = text("UPDATE ingestions SET lease_until = NULL WHERE lease_until IS NOT NULL")
# What was taken, and nobody works on: the answer to its taker was lost. What waits for another try is not meant.
_RELEASE_LOST = text("""
    UPDATE ingestions SET lease_until = NULL
    WHERE lease_until > now() + make_interval(secs => :seconds)
      AND tenant_id || '/' || adapter || '@' || version <> ALL (:held)""")
_ACTIVATE_ONLY = text("""
    UPDATE ingestions SET activate = (version = :version) WHERE tenant_id = :tenant AND adapter = :adapter""")
_DONE = text("""
    DELETE FROM ingestions WHERE tenant_id = :tenant AND adapter = :adapter AND version = :version
    RETURNING activate""")
_KIN = text("""
    SELECT version, weight, is_active, is_twin FROM (
        SELECT version, weight, is_active, version <> :version AND state = 'validated' AND digest = :digest
               AND base_digest = :base_digest AS is_twin
        FROM tenant_adapters WHERE tenant_id = :tenant AND adapter = :adapter) v
    WHERE is_active OR is_twin ORDER BY version""")
_VALIDATED = text("""
    UPDATE tenant_adapters SET state = 'validated', reason = '', message = '', digest = :digest, bytes = :bytes,
        rank = :rank, target_modules = :target_modules, base_model = :base_model, base_digest = :base_digest,
        base_evidence = :base_evidence, parameters = :parameters
    WHERE tenant_id = :tenant AND adapter = :adapter AND version = :version""")
_REPOINT = text("""
    UPDATE registrations SET version = :twin
    WHERE tenant_id = :tenant AND adapter = :adapter AND version = :version""")
_FIND_REGISTRATION = text("""
    SELECT adapter, version FROM registrations
    WHERE uid = :uid AND source_hash = :source_hash AND tenant_id = :tenant""")
_ADD_REGISTRATION = text("""
    INSERT INTO registrations (uid, source_hash, tenant_id, adapter, version)
    VALUES (:uid, :source_hash, :tenant, :adapter, :version)""")
_COUNT = text("SELECT state, count(*) AS number FROM tenant_adapters GROUP BY state")


@dataclass(frozen=True, slots=True)
class Taken:
    """A queued ingestion that this registry has leased."""

    tenant: str
    adapter: str
    version: int
    source: str
    expected_digest: str | None
    verify: bool
    attempts: int  # this one included
    rank: int
    base_model: str
    state: str
    pool: PoolRef
    report: PoolReport  # the pool's, as it was then
    more: bool  # others were queued

    def __str__(self) -> str:
        return f"{self.tenant}/{self.adapter}@{self.version}"


class QueueRepository(Repository):
    """The dispatcher's side, across all tenants."""

    async def take(self, lease_seconds: float) -> Taken | None:
        row = (await self.session.execute(_TAKE, {"seconds": lease_seconds})).one_or_none()
        if row is None:
            return None
        return Taken(
            tenant=row.tenant_id,
            adapter=row.adapter,
            version=row.version,
            source=row.source,
            expected_digest=row.expected_digest,
            verify=row.verify,
            attempts=row.attempts + 1,
            rank=row.rank,
            base_model=row.base_model,
            state=row.state,
            pool=PoolRef(row.namespace, row.name),
            report=msgspec.convert(row.report, PoolReport),
            more=row.more,
        )

    async def release_all(self) -> None:
        """With a directory store there is one registry: at its start nobody else can hold a lease.

        A row that waits for nothing goes back to `unverified`.
        """
        await self.session.execute(_UNQUEUED)
        await self.session.execute(_RELEASE_ALL)

    async def release_lost(self, held: list[str], seconds: float) -> None:
        """Leases of more than `seconds`, but for those of what is `held`, by name. There is one registry, as above."""
        await self.session.execute(_RELEASE_LOST, {"held": held, "seconds": seconds})

    async def counts(self) -> dict[str, int]:
        return {row.state: row.number for row in await self.session.execute(_COUNT)}


class IngestionRepository(Repository):
    async def enqueue(
        self, adapter: str, version: int, *, source: str, expected_digest: str | None, verify: bool, activate: bool
    ) -> None:
        values = {"source": source, "expected_digest": expected_digest, "verify": verify, "activate": activate}
        await self.session.execute(_ENQUEUE, {**self._key(adapter, version), **values})

    async def activate_only(self, adapter: str, version: int) -> None:
        """Of what is queued for this adapter, only this version is activated."""
        await self.session.execute(_ACTIVATE_ONLY, self._key(adapter, version))

    async def delay(self, adapter: str, version: int, seconds: float) -> None:
        await self.session.execute(_DELAY, {**self._key(adapter, version), "seconds": seconds})

    async def done(self, adapter: str, version: int) -> bool | None:
        """Takes it off the queue. Whether it activates; None when it was gone already."""
        activates: bool | None = (await self.session.execute(_DONE, self._key(adapter, version))).scalar_one_or_none()
        return activates

    async def kin(self, adapter: str, version: int, digest: str, base_digest: str) -> tuple[dict[int, int], int | None]:
        """The shares of this adapter's versions, as `ActivationRepository.weights` gives them, and the oldest
        other validated version with the same bytes for the same base."""
        values = {**self._key(adapter, version), "digest": digest, "base_digest": base_digest}
        rows = await self.session.execute(_KIN, values)
        weights = {row.version: row.weight for row in rows if row.is_active}
        return weights, next((row.version for row in rows if row.is_twin), None)

    async def validated(
        self, adapter: str, version: int, found: Accepted, *, base_model: str, base_digest: str
    ) -> None:
        values = {
            "digest": found.digest,
            "bytes": found.bytes,
            "rank": found.rank,
            "target_modules": list(found.target_modules),
            "base_model": base_model,
            "base_digest": base_digest,
            "base_evidence": found.base_evidence,
            "parameters": found.parameters,
        }
        await self.session.execute(_VALIDATED, {**self._key(adapter, version), **values})

    async def repoint(self, adapter: str, version: int, twin: int) -> None:
        await self.session.execute(_REPOINT, {**self._key(adapter, version), "twin": twin})

    async def registration(self, uid: str, source_hash: str) -> tuple[str, int] | None:
        """(adapter, version) that was registered under this key."""
        values = {"uid": uid, "source_hash": source_hash, "tenant": self.tenant}
        row = (await self.session.execute(_FIND_REGISTRATION, values)).one_or_none()
        return None if row is None else (row.adapter, row.version)

    async def add_registration(self, uid: str, source_hash: str, adapter: str, version: int) -> None:
        values = {**self._key(adapter, version), "uid": uid, "source_hash": source_hash}
        await self.session.execute(_ADD_REGISTRATION, values)

    def _key(self, adapter: str, version: int) -> dict[str, Any]:
        return {"tenant": self.tenant, "adapter": adapter, "version": version}
