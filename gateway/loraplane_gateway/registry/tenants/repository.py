# ruff: noqa: S608 - the statements are put together from constants of this module; values are always bound
from typing import Any

from sqlalchemy import text

from loraplane_core.wire.registry import Tenant
from loraplane_gateway.registry.rows import Repository, rfc3339

_FIELDS = "name, namespaces, created_at"
_PUT = text(f"""
    INSERT INTO tenants (name, namespaces) VALUES (:tenant, :namespaces)
    ON CONFLICT (name) DO UPDATE SET namespaces = excluded.namespaces
    RETURNING {_FIELDS}, xmax = 0 AS created""")
_GET = text(f"SELECT {_FIELDS} FROM tenants WHERE name = :tenant")
_HOLD = text(f"SELECT {_FIELDS} FROM tenants WHERE name = :tenant FOR KEY SHARE")
_LIST = text(f"SELECT {_FIELDS} FROM tenants WHERE :tenant = '' OR name = :tenant ORDER BY name")
_IN_USE = text("""
    SELECT EXISTS (SELECT 1 FROM adapters WHERE tenant_id = :tenant AND claim_uid IS NOT NULL)
        OR EXISTS (SELECT 1 FROM tenant_adapters WHERE tenant_id = :tenant AND is_active)""")
_LOCK = text("SELECT 1 FROM tenants WHERE name = :tenant FOR UPDATE")
_KEY_IDS = text("SELECT id FROM api_keys WHERE tenant_id = :tenant")
_DROP_VERSIONS = text("DELETE FROM tenant_adapters WHERE tenant_id = :tenant")
# What is left of its adapters are counters; a tenant of the same name later chooses its pools anew.
_RESET_ADAPTERS = text("UPDATE adapters SET pool = '', previous_version = NULL WHERE tenant_id = :tenant")
_DELETE = text("DELETE FROM tenants WHERE name = :tenant")


class TenantRepository(Repository):
    async def put(self, namespaces: list[str]) -> tuple[Tenant, bool]:
        """The tenant and whether it is new."""
        row = (await self.session.execute(_PUT, {"tenant": self.tenant, "namespaces": namespaces})).one()
        return _tenant(row), bool(row.created)

    async def get(self, *, hold: bool = False) -> Tenant | None:
        row = (await self.session.execute(_HOLD if hold else _GET, {"tenant": self.tenant})).one_or_none()
        return None if row is None else _tenant(row)

    async def all(self) -> list[Tenant]:
        return [_tenant(row) for row in await self.session.execute(_LIST, self.binds)]

    async def lock(self) -> None:
        """Nobody else can claim or register for the tenant until this transaction ends."""
        await self.session.execute(_LOCK, {"tenant": self.tenant})

    async def in_use(self) -> bool:
        return bool((await self.session.execute(_IN_USE, {"tenant": self.tenant})).scalar_one())

    async def delete(self) -> list[str]:
        """Returns the ids of its keys. Rows of `adapters` stay, so that no version number comes twice."""
        key_ids = [str(key_id) for key_id in (await self.session.execute(_KEY_IDS, {"tenant": self.tenant})).scalars()]
        await self.session.execute(_DROP_VERSIONS, {"tenant": self.tenant})
        await self.session.execute(_RESET_ADAPTERS, {"tenant": self.tenant})
        await self.session.execute(_DELETE, {"tenant": self.tenant})
        return key_ids


def _tenant(row: Any) -> Tenant:
    return Tenant(name=row.name, namespaces=list(row.namespaces), created_at=rfc3339(row.created_at))
