"""Registering a source as a version, and settling what its ingestion found."""

from dataclasses import dataclass

from loraplane_core.errors import ArtifactRejected, BaseModelMismatch, Conflict, InvalidParameter, NotFound, Withdrawn
from loraplane_core.identity import is_digest
from loraplane_core.wire.registry import PASSING_REJECTIONS, Activate, Source, Version
from loraplane_gateway.db.sessions import Scope, Session
from loraplane_gateway.registry.activation.service import ActivationService
from loraplane_gateway.registry.adapters.repository import AdapterRepository, AdapterRow
from loraplane_gateway.registry.audit import AuditRepository
from loraplane_gateway.registry.ingestion.repository import IngestionRepository, Taken
from loraplane_gateway.registry.ingestion.worker import Accepted, Failed, Outcome
from loraplane_gateway.registry.pools.repository import Pool
from loraplane_gateway.registry.pools.service import PoolService

ACTOR = "ingestion"
#: The longest wait of an ingestion for another try.
DELAY_MAX_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Registration:
    """`uid` and `source_hash` make it idempotent; `base_model` is the declared base, empty for the pool's.

    `refusal` is why its source cannot be read now. With `known_only` no new version is made.
    `returned`: serve it again, although it was activated before.
    """

    uid: str
    source_hash: str
    source: Source
    base_model: str = ""
    activate: bool = True
    refusal: ArtifactRejected | None = None
    known_only: bool = False
    returned: bool = False


class IngestionService:
    def __init__(self, session: Session, scope: Scope, actor: str) -> None:
        self._session = session
        self._scope = scope
        self._adapters = AdapterRepository(session, scope)
        self._ingestions = IngestionRepository(session, scope)
        self._audit = AuditRepository(session, scope)
        self._pools = PoolService(session)
        self._actor = actor

    async def register(self, locked: AdapterRow, wanted: Registration) -> Version:
        """The version of this registration: a new one that is queued, or the one it has had before.

        Raises BaseModelMismatch when the declared base is not the pool's, ArtifactRejected, InvalidParameter,
        Withdrawn when only a known one was asked for.
        """
        known = await self._ingestions.registration(wanted.uid, wanted.source_hash)
        if known is not None:
            return await self._known(locked, known, wanted)
        if wanted.known_only:
            raise Withdrawn("the version that this source was registered as has been removed")
        if wanted.refusal is not None:
            raise wanted.refusal
        if wanted.source.digest is not None and not is_digest(wanted.source.digest):
            raise InvalidParameter("source.digest is 64 lower-case hexadecimal digits", param="source.digest")
        pool = await self._pools.find(locked.pool)
        base_model = _declared(wanted.base_model, pool)
        version = await self._adapters.add_version(
            locked, path=wanted.source.uri, base_model=base_model, state=_waiting(pool)
        )
        number = version.version
        await self._ingestions.enqueue(
            locked.name,
            number,
            source=wanted.source.uri,
            expected_digest=wanted.source.digest,
            verify=False,
            activate=wanted.activate,
        )
        await self._ingestions.add_registration(wanted.uid, wanted.source_hash, locked.name, number)
        await self._audit.add(
            self._actor, "version.register", tenant=locked.tenant, subject=locked.name, version=number
        )
        return version

    async def verify(self, locked: AdapterRow, number: int) -> Version:
        """Queue a row that was written by hand. Its path is only the source; what it claims must be true."""
        version = await self._version(locked.name, number)
        if version.state in ("ingesting", "pending_base"):
            return version
        if version.state == "validated":
            raise Conflict(f"version {number} is validated already", code="already_validated")
        pool = await self._pools.find(locked.pool)
        if pool is None and not locked.pool:
            pool = await self._pools.called(version.base_model, locked.tenant)
            if pool is None:
                raise InvalidParameter(
                    f"no one pool serves {version.base_model!r} to this tenant, so there is nothing to verify against",
                    param="base_model",
                    code="pool_not_found",
                )
            await self._adapters.set_pool(locked.name, pool.ref)
        await self._adapters.set_state(locked.name, number, _waiting(pool))
        await self._ingestions.enqueue(
            locked.name, number, source=version.path, expected_digest=None, verify=True, activate=False
        )
        await self._audit.add(self._actor, "version.verify", tenant=locked.tenant, subject=locked.name, version=number)
        return await self._version(locked.name, number)

    async def settle(self, taken: Taken, pool: Pool, outcome: Outcome, *, max_attempts: int) -> None:
        """Write what an ingestion found, and activate if the registration asked for it: one transaction."""
        locked = await self._adapters.lock(taken.adapter)
        if isinstance(outcome, Failed) and taken.attempts < max_attempts:
            delay = min(DELAY_MAX_SECONDS, 2.0 ** (taken.attempts - 1))
            await self._ingestions.delay(taken.adapter, taken.version, delay)
            return
        activate = await self._ingestions.done(taken.adapter, taken.version)
        if locked is None or activate is None:
            return  # the version was deleted meanwhile
        if isinstance(outcome, Accepted):
            await self._accept(locked, taken, pool, outcome, activate=activate)
        else:
            await self._adapters.set_state(taken.adapter, taken.version, "rejected", outcome.code, outcome.message)
            await self._audit.add(
                ACTOR, "version.reject", tenant=taken.tenant, subject=taken.adapter, version=taken.version
            )

    async def _accept(self, locked: AdapterRow, taken: Taken, pool: Pool, found: Accepted, *, activate: bool) -> None:
        base_digest = pool.report.base_digest
        weights, twin = await self._ingestions.kin(taken.adapter, taken.version, found.digest, base_digest)
        if taken.verify:
            twin = None  # what was written by hand stays a version of its own
        if twin is not None:
            # The same bytes are a version already; this number stays unused.
            await self._ingestions.repoint(taken.adapter, taken.version, twin)
            await self._adapters.delete_version(taken.adapter, taken.version)
        else:
            base_model = taken.base_model if taken.verify else pool.report.base_model
            await self._ingestions.validated(
                taken.adapter, taken.version, found, base_model=base_model, base_digest=base_digest
            )
            await self._audit.add(
                ACTOR, "version.validate", tenant=taken.tenant, subject=taken.adapter, version=taken.version
            )
        if activate:
            activation = ActivationService(self._session, self._scope, ACTOR)
            await activation.activate_ingested(locked, weights, twin or taken.version, numbered=taken.version)

    async def _known(self, locked: AdapterRow, known: tuple[str, int], wanted: Registration) -> Version:
        adapter, number = known
        if adapter != locked.name:
            raise Conflict(f"this registration belongs to the adapter {adapter!r}")
        version = await self._version(adapter, number)
        if version.state == "rejected" and version.reason in PASSING_REJECTIONS and wanted.refusal is None:
            pool = await self._pools.find(locked.pool)
            await self._adapters.set_state(adapter, number, _waiting(pool))
            await self._ingestions.enqueue(
                adapter,
                number,
                source=wanted.source.uri,
                expected_digest=wanted.source.digest,
                verify=False,
                activate=wanted.activate,
            )
            return await self._version(adapter, number)
        if wanted.returned and locked.activation_owner == "registry":
            # What was registered in between and is not ingested yet must not take its place again.
            await self._ingestions.activate_only(adapter, number)
            if version.state == "validated":
                activation = ActivationService(self._session, self._scope, self._actor)
                await activation.activate(adapter, Activate(version=number))
            return await self._version(adapter, number)
        return version

    async def _version(self, adapter: str, number: int) -> Version:
        version = await self._adapters.version(adapter, number)
        if version is None:
            raise NotFound(f"{adapter} has no version {number}", param="version")
        return version


def _waiting(pool: Pool | None) -> str:
    return "ingesting" if pool is not None and pool.is_known else "pending_base"


def _declared(base_model: str, pool: Pool | None) -> str:
    """The base that a new version is declared for; empty while the pool is unknown and nothing was declared."""
    if pool is None:
        return base_model
    if base_model and not pool.is_called(base_model):
        raise BaseModelMismatch(
            f"the pool {pool.ref} serves {pool.report.base_model!r}, not {base_model!r}", param="base_model"
        )
    return base_model or pool.report.base_model
