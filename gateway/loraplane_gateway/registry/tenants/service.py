from loraplane_core.errors import Conflict, InvalidParameter, TenantUnknown
from loraplane_core.identity import check_name
from loraplane_core.wire.registry import Tenant, TenantSpec
from loraplane_gateway.db.sessions import Scope, Session
from loraplane_gateway.registry.audit import AuditRepository
from loraplane_gateway.registry.tenants.repository import TenantRepository

MAX_NAMESPACES = 256


async def require_tenant(session: Session, name: str, *, hold: bool = False) -> Tenant:
    """Raises TenantUnknown. With `hold` the tenant cannot be deleted before this transaction has ended."""
    tenant = await TenantRepository(session, Scope(name)).get(hold=hold)
    if tenant is None:
        raise TenantUnknown(f"there is no tenant {name!r}", param="tenant")
    return tenant


class TenantService:
    def __init__(self, session: Session, scope: Scope, actor: str) -> None:
        self._tenants = TenantRepository(session, scope)
        self._audit = AuditRepository(session, scope)
        self._actor = actor

    async def put(self, spec: TenantSpec) -> tuple[Tenant, bool]:
        """Create the tenant, or give it these namespaces. Returns it and whether it is new."""
        check_name(spec.name, "name")
        if len(spec.namespaces) > MAX_NAMESPACES:
            raise InvalidParameter(f"a tenant has at most {MAX_NAMESPACES} namespaces", param="namespaces")
        namespaces = sorted({check_name(namespace, "namespaces") for namespace in spec.namespaces})
        before = await self._tenants.get()
        if before is not None and before.namespaces == namespaces:
            return before, False
        tenant, created = await self._tenants.put(namespaces)
        await self._audit.add(self._actor, "tenant.create" if created else "tenant.update", tenant=spec.name)
        return tenant, created

    async def delete(self, name: str) -> list[str]:
        """Returns the ids of the keys that went with it. Raises Conflict while something of it is served."""
        await self._tenants.lock()
        if await self._tenants.in_use():
            raise Conflict(
                f"the tenant {name!r} has claimed or active adapters; delete those objects first", code="tenant_in_use"
            )
        key_ids = await self._tenants.delete()
        await self._audit.add(self._actor, "tenant.delete", tenant=name)
        return key_ids
