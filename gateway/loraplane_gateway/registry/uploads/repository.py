from sqlalchemy import text

from loraplane_gateway.registry.rows import Repository

_ADD = text("""
    INSERT INTO uploads (id, tenant_id, expires_at) VALUES (:id, :tenant, now() + make_interval(secs => :seconds))""")
_COUNT = text("SELECT count(*) FROM uploads WHERE tenant_id = :tenant AND expires_at > now()")
_LIVE = text("SELECT 1 FROM uploads WHERE tenant_id = :tenant AND id = :id AND expires_at > now()")
# An upload that an ingestion still waits for is kept.
_EXPIRE = text("""
    DELETE FROM uploads u WHERE expires_at <= now()
      AND NOT EXISTS (SELECT 1 FROM ingestions i WHERE i.tenant_id = u.tenant_id AND i.source = 'upload:' || u.id)
    RETURNING tenant_id, id""")


class UploadRepository(Repository):
    async def add(self, upload_id: str, seconds: float) -> None:
        await self.session.execute(_ADD, {"id": upload_id, "tenant": self.tenant, "seconds": seconds})

    async def count(self) -> int:
        return int((await self.session.execute(_COUNT, {"tenant": self.tenant})).scalar_one())

    async def is_live(self, upload_id: str) -> bool:
        values = {"tenant": self.tenant, "id": upload_id}
        return (await self.session.execute(_LIVE, values)).scalar_one_or_none() is not None

    async def expire(self) -> list[tuple[str, str]]:
        """Drop those past their time; returns (tenant, id) of each, for their files."""
        return [(row.tenant_id, row.id) for row in await self.session.execute(_EXPIRE)]
