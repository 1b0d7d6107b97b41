from sqlalchemy import text

from loraplane_gateway.registry.rows import Repository

_ACTIVE = text("""
    SELECT version FROM tenant_adapters WHERE tenant_id = :tenant AND adapter = :adapter AND is_active
    ORDER BY weight DESC, version DESC LIMIT 1""")
_WEIGHT = text("""
    SELECT weight FROM tenant_adapters WHERE tenant_id = :tenant AND adapter = :adapter AND version = :version""")
_OFF = text("""
    UPDATE tenant_adapters SET is_active = FALSE, weight = 0
    WHERE tenant_id = :tenant AND adapter = :adapter AND is_active AND version <> :version""")
_ON = text("""
    UPDATE tenant_adapters SET is_active = TRUE, weight = 100
    WHERE tenant_id = :tenant AND adapter = :adapter AND version = :version""")
_REMEMBER = text("""
    UPDATE adapters SET previous_version = :previous WHERE tenant_id = :tenant AND name = :adapter""")


class ActivationRepository(Repository):
    async def active(self, adapter: str) -> int:
        """The version that most requests get; 0 for none."""
        key = {"tenant": self.tenant, "adapter": adapter}
        return (await self.session.execute(_ACTIVE, key)).scalar_one_or_none() or 0

    async def weight(self, adapter: str, version: int) -> int:
        key = {"tenant": self.tenant, "adapter": adapter, "version": version}
        return (await self.session.execute(_WEIGHT, key)).scalar_one_or_none() or 0

    async def flip(self, adapter: str, version: int, *, previous: int) -> None:
        """All requests go to `version` (0 = to none) from this transaction's commit on."""
        key = {"tenant": self.tenant, "adapter": adapter, "version": version}
        await self.session.execute(_OFF, key)
        if version:
            await self.session.execute(_ON, key)
        if previous:
            await self.session.execute(_REMEMBER, {"tenant": self.tenant, "adapter": adapter, "previous": previous})
