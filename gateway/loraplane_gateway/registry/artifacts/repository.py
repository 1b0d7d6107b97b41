from sqlalchemy import text

from loraplane_core.identity import PoolRef
from loraplane_gateway.registry.rows import Repository

_EPOCH = text("SELECT credential_epoch FROM pools WHERE namespace = :namespace AND name = :name")
_SERVED = text("""
    SELECT EXISTS (
        SELECT 1 FROM tenant_adapters v JOIN adapters a ON a.tenant_id = v.tenant_id AND a.name = v.adapter
        WHERE v.digest = :digest AND v.state = 'validated' AND a.pool = :pool)""")


class ArtifactRepository(Repository):
    """The platform's scope: engines serve all tenants of their pool."""

    async def epoch(self, pool: PoolRef) -> int | None:
        values = {"namespace": pool.namespace, "name": pool.name}
        epoch: int | None = (await self.session.execute(_EPOCH, values)).scalar_one_or_none()
        return epoch

    async def may_fetch(self, pool: PoolRef, digest: str) -> bool:
        """True when some validated version of an adapter in that pool has these bytes."""
        return bool((await self.session.execute(_SERVED, {"digest": digest, "pool": str(pool)})).scalar_one())
