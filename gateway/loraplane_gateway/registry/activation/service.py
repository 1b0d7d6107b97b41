"""The flip of an adapter's version: one transaction, with its audit row and its change of the feed."""

from sqlalchemy.ext.asyncio import AsyncSession

from loraplane_core.errors import ActivationOwned, Conflict, NotActivatable, NotFound
from loraplane_core.wire.registry import Activate, Adapter, Rollback
from loraplane_gateway.db.sessions import Scope
from loraplane_gateway.registry.activation.repository import ActivationRepository
from loraplane_gateway.registry.adapters.repository import AdapterRepository, AdapterRow
from loraplane_gateway.registry.audit import AuditRepository


class ActivationService:
    def __init__(self, session: AsyncSession, scope: Scope, actor: str) -> None:
        self._adapters = AdapterRepository(session, scope)
        self._activation = ActivationRepository(session, scope)
        self._audit = AuditRepository(session, scope)
        self._actor = actor

    async def activate(self, adapter: str, order: Activate, *, by_object: bool = False) -> Adapter:
        """Serve `order.version` from now on; 0 serves none.

        Raises NotFound, ActivationOwned, NotActivatable, Conflict (active_changed).
        """
        locked = await self._locked(adapter, by_object)
        active = await self._activation.active(adapter)
        if order.expect_active is not None and order.expect_active != active:
            raise Conflict(
                f"version {active} of {locked.tenant}/{adapter} is active, not {order.expect_active}",
                param="expect_active",
                code="active_changed",
            )
        await self._flip(locked, active, order.version, "adapter.activate")
        return await self._now(adapter)

    async def rollback(self, adapter: str, order: Rollback) -> Adapter:
        """Back to the version active before, or to the one named. Again: forth."""
        locked = await self._locked(adapter, by_object=False)
        target = order.version if order.version is not None else locked.previous_version
        if not target:
            raise NotActivatable(f"{locked.tenant}/{adapter} has no earlier version to go back to")
        await self._flip(locked, await self._activation.active(adapter), target, "adapter.rollback")
        return await self._now(adapter)

    async def activate_ingested(self, locked: AdapterRow, version: int, *, numbered: int) -> None:
        """The flip that comes with a registration. `numbered` is the version's place in the order of registrations.

        An ingestion that finished late does not undo a newer one; an object that owns activation decides itself.
        """
        active = await self._activation.active(locked.name)
        if locked.activation_owner == "object" or active > numbered:
            return
        await self._flip(locked, active, version, "adapter.activate")

    async def stop(self, locked: AdapterRow) -> None:
        """Serve no version: the object that wanted it served is gone."""
        active = await self._activation.active(locked.name)
        if active:
            await self._flip(locked, active, 0, "adapter.deactivate")

    async def _locked(self, adapter: str, by_object: bool) -> AdapterRow:
        locked = await self._adapters.lock(adapter)
        if locked is None:
            raise NotFound("there is no such adapter")
        if locked.activation_owner == "object" and not by_object:
            raise ActivationOwned(
                f"the object {locked.claim_ref} decides which version of {locked.tenant}/{adapter} serves"
            )
        return locked

    async def _flip(self, locked: AdapterRow, active: int, target: int, action: str) -> None:
        if target:
            version = await self._adapters.version(locked.name, target)
            if version is None:
                raise NotFound(f"{locked.tenant}/{locked.name} has no version {target}", param="version")
            if version.state != "validated":
                raise NotActivatable(f"version {target} is {version.state}, not validated", param="version")
        if target == active and (not target or await self._activation.weight(locked.name, target) == 100):
            return
        await self._activation.flip(locked.name, target, previous=active if active != target else 0)
        await self._audit.add(
            self._actor, action, tenant=locked.tenant, subject=locked.name, version=target, from_version=active
        )

    async def _now(self, adapter: str) -> Adapter:
        found = await self._adapters.get(adapter)
        if found is None:
            raise NotFound("there is no such adapter")
        return found
