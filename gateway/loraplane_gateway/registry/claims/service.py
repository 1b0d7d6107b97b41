"""Claims: one object speaks for one (tenant, adapter), the first one by uid."""

from loraplane_core.errors import (
    ArtifactRejected,
    ClaimedByOther,
    Conflict,
    Forbidden,
    InvalidName,
    InvalidParameter,
    NotFound,
    TenantNotBound,
)
from loraplane_core.identity import PoolRef, check_name
from loraplane_core.wire.registry import Activate, Adapter, Claim, ClaimRequest, RegisterSource, SetTraffic, Version
from loraplane_gateway.db.sessions import PLATFORM, Scope, Session
from loraplane_gateway.registry.activation.repository import ActivationRepository
from loraplane_gateway.registry.activation.service import ActivationService, Pending
from loraplane_gateway.registry.adapters.repository import AdapterRepository, AdapterRow
from loraplane_gateway.registry.audit import AuditRepository
from loraplane_gateway.registry.claims.repository import ClaimRepository
from loraplane_gateway.registry.ingestion.service import IngestionService, Registration
from loraplane_gateway.registry.pools.service import PoolService
from loraplane_gateway.registry.tenants.service import require_tenant

MAX_ID = 128
MAX_WARM = 10_000


class ClaimService:
    """Works in the platform's scope: the operator speaks for all tenants, each call for one of them."""

    def __init__(self, session: Session, actor: str) -> None:
        self._session = session
        self._adapters = AdapterRepository(session, PLATFORM)
        self._claims = ClaimRepository(session, PLATFORM)
        self._audit = AuditRepository(session, PLATFORM)
        self._pools = PoolService(session)
        self._actor = actor

    async def claim(self, uid: str, wanted: ClaimRequest) -> Claim:
        """Idempotent; again with other fields updates them.

        Raises TenantUnknown, TenantNotBound, ClaimedByOther, Forbidden (pool_not_allowed), Conflict, InvalidName.
        """
        namespace = _checked(uid, wanted)
        tenant = await require_tenant(self._session, wanted.tenant, hold=True)
        if namespace not in tenant.namespaces:
            raise TenantNotBound(
                f"the tenant {wanted.tenant!r} does not list the namespace {namespace!r}; the platform adds it with "
                "`loraplane tenant create`, which names all of a tenant's namespaces"
            )
        pool = await self._pools.find_for(wanted.pool, wanted.adapter)
        if pool is not None and not pool.allows(wanted.tenant, namespace):
            raise Forbidden(
                f"the pool {wanted.pool} does not admit {wanted.tenant!r} from {namespace!r}", code="pool_not_allowed"
            )
        locked = await AdapterRepository(self._session, Scope(wanted.tenant)).lock(wanted.adapter, create=True)
        if locked is not None and locked.claim_uid not in ("", uid):
            raise ClaimedByOther(f"{wanted.tenant}/{wanted.adapter} is claimed by {locked.claim_ref}")
        held = locked is not None and locked.claim_uid == uid
        other = None if held else await self._claims.find(uid)
        if other is not None:
            raise Conflict(f"this object claims {other.tenant}/{other.adapter} already", code="immutable_field")
        if locked is not None and (locked.activation_owner == "object") != wanted.owns_activation:
            # Who decides has changed, so what the other one ordered does not come true any more.
            await ActivationRepository(self._session, Scope(wanted.tenant)).drop_intent(wanted.adapter)
        await self._claims.set(uid, wanted)
        if not held:
            await self._audit.add(self._actor, "claim.create", tenant=wanted.tenant, subject=wanted.adapter)
        return Claim(uid=uid, ref=wanted.ref, tenant=wanted.tenant, adapter=wanted.adapter, pool=wanted.pool)

    async def release(self, uid: str, *, delete_versions: bool) -> None:
        """Let go of the adapter, which is then served no more. An unknown uid holds nothing: no error."""
        locked = await self._adapters.lock_claimed(uid)
        if locked is None:
            return
        scope = Scope(locked.tenant)
        await ActivationService(self._session, scope, self._actor).stop(locked)  # what waited to serve goes, too
        if delete_versions:
            await self._claims.delete_versions(locked.tenant, locked.name)
        await self._claims.release(locked.tenant, locked.name)
        await self._audit.add(self._actor, "claim.release", tenant=locked.tenant, subject=locked.name)

    async def register(self, uid: str, wanted: RegisterSource, refusal: ArtifactRejected | None) -> Version:
        if not 0 < len(wanted.source_hash) <= MAX_ID:
            raise InvalidParameter("source_hash is empty or too long", param="source_hash")
        locked, scope = await self._held(uid)
        registration = Registration(
            uid=uid,
            source_hash=wanted.source_hash,
            source=wanted.source,
            refusal=refusal,
            known_only=wanted.known_only,
            # Set back while no operator was there to see it: the registry knows what it named last (ADR 0011).
            returned=wanted.returned or locked.source_hash not in ("", wanted.source_hash),
        )
        version = await IngestionService(self._session, scope, self._actor).register(locked, registration)
        if locked.source_hash != wanted.source_hash:
            await self._claims.note_source(locked.tenant, locked.name, wanted.source_hash)
        return version

    async def activate(self, uid: str, order: Activate) -> Adapter | Pending:
        """The object's own choice of version; also 0, before its deletion."""
        locked, scope = await self._held(uid)
        return await ActivationService(self._session, scope, self._actor).activate(locked.name, order, by_object=True)

    async def set_traffic(self, uid: str, order: SetTraffic) -> Adapter:
        locked, scope = await self._held(uid)
        return await ActivationService(self._session, scope, self._actor).set_traffic(
            locked.name, order, by_object=True
        )

    async def _held(self, uid: str) -> tuple[AdapterRow, Scope]:
        locked = await self._adapters.lock_claimed(uid)
        if locked is None:
            raise NotFound("this object claims nothing")
        return locked, Scope(locked.tenant)


def _checked(uid: str, wanted: ClaimRequest) -> str:
    """The object's namespace. Raises InvalidName, InvalidParameter."""
    if not 0 < len(uid) <= MAX_ID or not uid.isascii() or not uid.isprintable():
        raise InvalidParameter("the uid is empty, too long or not printable", param="uid")
    namespace, slash, name = wanted.ref.partition("/")
    # An object's name is a DNS subdomain, so only its length is looked at.
    if not slash or not 0 < len(name) <= 253 or not name.isascii() or not name.isprintable():
        raise InvalidName("ref reads namespace/name", param="ref")
    check_name(namespace, "ref")
    check_name(wanted.tenant, "tenant")
    check_name(wanted.adapter, "adapter")
    PoolRef.parse(wanted.pool)
    if not 0 <= wanted.warm_replicas <= MAX_WARM:
        raise InvalidParameter(f"warm_replicas lies between 0 and {MAX_WARM}", param="warm_replicas")
    return namespace
