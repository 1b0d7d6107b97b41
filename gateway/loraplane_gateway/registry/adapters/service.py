"""What the platform and tenants ask of adapters and versions over REST."""

from loraplane_core.errors import ArtifactRejected, Conflict, Forbidden, ManagedByObject, NotFound
from loraplane_core.identity import PoolRef
from loraplane_core.wire.registry import Adapter, RegisterVersion, Version
from loraplane_gateway.db.sessions import Scope, Session
from loraplane_gateway.registry.activation.repository import ActivationRepository
from loraplane_gateway.registry.adapters.repository import AdapterRepository, AdapterRow
from loraplane_gateway.registry.audit import AuditRepository
from loraplane_gateway.registry.auth import Caller
from loraplane_gateway.registry.ingestion.service import IngestionService, Registration
from loraplane_gateway.registry.ingestion.sources import UPLOAD_SCHEME
from loraplane_gateway.registry.pools.service import PoolService
from loraplane_gateway.registry.tenants.service import require_tenant
from loraplane_gateway.registry.uploads.files import UploadFiles
from loraplane_gateway.registry.uploads.service import UploadService


class AdapterService:
    def __init__(self, session: Session, scope: Scope, caller: Caller) -> None:
        self._session = session
        self._scope = scope
        self._caller = caller
        self._adapters = AdapterRepository(session, scope)
        self._pools = PoolService(session)
        self._ingestion = IngestionService(session, scope, caller.actor)

    async def all(self, tenant: str) -> list[Adapter]:
        await require_tenant(self._session, tenant)
        return await self._adapters.all()

    async def get(self, adapter: str) -> Adapter:
        found = await self._adapters.get(adapter)
        if found is None:
            raise NotFound("there is no such adapter")
        return found

    async def register(
        self,
        tenant: str,
        adapter: str,
        wanted: RegisterVersion,
        *,
        uid: str,
        source_hash: str,
        files: UploadFiles,
        refusal: ArtifactRejected | None,
    ) -> Version:
        """A new version from a source, queued. Raises the refusals of pools, sources and IngestionService."""
        await require_tenant(self._session, tenant, hold=True)
        await self._pools.check_not_reserved(adapter)
        if wanted.source.uri.startswith(UPLOAD_SCHEME):
            uploads = UploadService(self._session, self._scope, files)
            await uploads.require_complete(tenant, wanted.source.uri.removeprefix(UPLOAD_SCHEME))
        elif self._caller.kind == "tenant":
            # Below the adapter root lie other tenants' files too.
            raise Forbidden("a tenant registers its own uploads", param="source", code="source_not_allowed")
        locked = await self._adapters.lock(adapter, create=True)
        if locked is None:
            raise NotFound("there is no such adapter")
        await self._choose_pool(locked, wanted.pool)
        locked = await self._adapters.lock(adapter) or locked
        registration = Registration(
            uid=uid,
            source_hash=source_hash,
            source=wanted.source,
            base_model=wanted.base_model or "",
            activate=wanted.activate,
            refusal=refusal,
        )
        return await self._ingestion.register(locked, registration)

    async def verify(self, adapter: str, version: int) -> Version:
        locked = await self._adapters.lock(adapter)
        if locked is None:
            raise NotFound("there is no such adapter")
        return await self._ingestion.verify(locked, version)

    async def delete_version(self, adapter: str, version: int) -> Version:
        """Withdraw a version: its bytes are no longer fetched and its number never comes again."""
        locked = await self._adapters.lock(adapter)
        found = await self._adapters.version(adapter, version)
        if locked is None or found is None:
            raise NotFound(f"{adapter} has no version {version}", param="version")
        activation = ActivationRepository(self._session, self._scope)
        if version in await activation.weights(adapter):
            raise Conflict(f"version {version} is active; activate another one first", code="version_active")
        if locked.intent is not None and locked.intent.version == version:
            await activation.drop_intent(adapter)
        await self._adapters.delete_version(adapter, version)
        await AuditRepository(self._session, self._scope).add(
            self._caller.actor, "version.delete", tenant=locked.tenant, subject=adapter, version=version
        )
        return found

    async def _choose_pool(self, locked: AdapterRow, named: str | None) -> None:
        """An adapter with versions stays in its pool; an object that claims it is truth for it."""
        if named is None:
            if not locked.pool:
                pool = await self._pools.only_one_for(locked.tenant)
                await self._adapters.set_pool(locked.name, pool.ref)
            return
        ref = PoolRef.parse(named)
        if str(ref) == locked.pool:
            return
        if locked.claim_uid:
            raise ManagedByObject(f"the object {locked.claim_ref} decides the pool of {locked.name}", param="pool")
        if locked.pool and await self._adapters.get(locked.name) is not None:
            raise Conflict(
                f"{locked.name} is in the pool {locked.pool} and stays there", param="pool", code="immutable_field"
            )
        await self._adapters.set_pool(locked.name, (await self._pools.require(ref, locked.tenant)).ref)
