# ruff: noqa: S608 - the statements are put together from constants of this module; values are always bound
import json
from dataclasses import dataclass
from typing import Any

from sqlalchemy import text

from loraplane_core.identity import PoolRef
from loraplane_core.wire.registry import PoolReport
from loraplane_gateway.db.sessions import Session

_FIELDS = (
    "base_model, aliases, base_digest, config, max_rank, max_model_len, replicas, allowed_tenants,"
    " allowed_namespaces, credential_epoch"
)
_UPDATE = ", ".join(f"{name.strip()} = excluded.{name.strip()}" for name in _FIELDS.split(","))
_PUT = text(f"""
    INSERT INTO pools (namespace, name, {_FIELDS})
    VALUES (:namespace, :name, :base_model, :aliases, :base_digest, CAST(:config AS jsonb), :max_rank, :max_model_len,
            :replicas, :allowed_tenants, :allowed_namespaces, :credential_epoch)
    ON CONFLICT (namespace, name) DO UPDATE SET {_UPDATE}""")
_GET = text(f"SELECT namespace, name, {_FIELDS} FROM pools WHERE namespace = :namespace AND name = :name")
_LIST = text(f"SELECT namespace, name, {_FIELDS} FROM pools ORDER BY namespace, name")
_GET_OR_CALLED = text(f"""
    SELECT namespace, name, {_FIELDS} FROM pools
    WHERE (namespace = :namespace AND name = :name) OR base_model = :called OR :called = ANY (aliases)""")
_DELETE = text("DELETE FROM pools WHERE namespace = :namespace AND name = :name")


@dataclass(frozen=True, slots=True)
class Pool:
    ref: PoolRef
    report: PoolReport

    @property
    def is_known(self) -> bool:
        """An engine told the base's config and digest, so artifacts can be checked against it."""
        return bool(self.report.base_digest and self.report.config)

    def is_called(self, base: str) -> bool:
        return base == self.report.base_model or base in self.report.aliases

    def allows(self, tenant: str, namespace: str | None = None) -> bool:
        allowed = self.report
        return (not allowed.allowed_tenants or tenant in allowed.allowed_tenants) and (
            namespace is None or not allowed.allowed_namespaces or namespace in allowed.allowed_namespaces
        )


class PoolRepository:
    """Pools belong to the platform, not to a tenant, so there is no scope."""

    def __init__(self, session: Session) -> None:
        self._session = session

    async def put(self, ref: PoolRef, report: PoolReport) -> None:
        await self._session.execute(
            _PUT,
            {
                "namespace": ref.namespace,
                "name": ref.name,
                "base_model": report.base_model,
                "aliases": list(report.aliases),
                "base_digest": report.base_digest,
                "config": json.dumps(report.config),
                "max_rank": report.max_rank,
                "max_model_len": report.max_model_len,
                "replicas": report.replicas,
                "allowed_tenants": list(report.allowed_tenants),
                "allowed_namespaces": list(report.allowed_namespaces),
                "credential_epoch": report.credential_epoch,
            },
        )

    async def get(self, ref: PoolRef) -> Pool | None:
        row = (await self._session.execute(_GET, {"namespace": ref.namespace, "name": ref.name})).one_or_none()
        return None if row is None else _pool(row)

    async def get_or_called(self, ref: PoolRef, base: str) -> list[Pool]:
        """That pool, and whichever serve a base of that name."""
        values = {"namespace": ref.namespace, "name": ref.name, "called": base}
        return [_pool(row) for row in await self._session.execute(_GET_OR_CALLED, values)]

    async def all(self) -> list[Pool]:
        return [_pool(row) for row in await self._session.execute(_LIST)]

    async def delete(self, ref: PoolRef) -> None:
        await self._session.execute(_DELETE, {"namespace": ref.namespace, "name": ref.name})


def _pool(row: Any) -> Pool:
    return Pool(
        PoolRef(row.namespace, row.name),
        PoolReport(
            base_model=row.base_model,
            aliases=list(row.aliases),
            base_digest=row.base_digest,
            config=row.config,
            max_rank=row.max_rank,
            max_model_len=row.max_model_len,
            replicas=row.replicas,
            allowed_tenants=list(row.allowed_tenants),
            allowed_namespaces=list(row.allowed_namespaces),
            credential_epoch=row.credential_epoch,
        ),
    )
