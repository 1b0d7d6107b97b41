"""Reports in, and which pool an adapter may use."""

from collections.abc import Iterable

from loraplane_core.errors import Forbidden, InvalidName, InvalidParameter, NotFound
from loraplane_core.identity import PoolRef, is_digest
from loraplane_core.wire import check_protocol
from loraplane_core.wire.registry import PoolReport
from loraplane_gateway.db.sessions import Session
from loraplane_gateway.registry.pools.repository import Pool, PoolRepository

MAX_BASE_NAME = 256


class PoolService:
    def __init__(self, session: Session) -> None:
        self._pools = PoolRepository(session)

    async def report(self, ref: PoolRef, report: PoolReport) -> None:
        check_protocol(report.protocol, "the operator")
        if report.base_digest and not is_digest(report.base_digest):
            raise InvalidParameter("base_digest is 64 hexadecimal digits or empty", param="base_digest")
        for name in (report.base_model, *report.aliases):
            if not 0 < len(name) <= MAX_BASE_NAME or not name.isprintable() or name != name.strip():
                raise InvalidParameter("a base name is printable and not empty", param="base_model")
        if report.credential_epoch < 1:
            raise InvalidParameter("credential_epoch counts from 1", param="credential_epoch")
        known = await self._pools.get(ref)
        if known is not None and not report.base_digest and known.report.base_model == report.base_model:
            # An operator that has just restarted has not asked an engine yet; it must not undo what is known.
            report = _with_base_of(report, known.report)
        await self._pools.put(ref, report)

    async def delete(self, ref: PoolRef) -> None:
        await self._pools.delete(ref)

    async def require(self, ref: PoolRef, tenant: str) -> Pool:
        """Raises NotFound (pool_not_found), Forbidden (pool_not_allowed)."""
        pool = await self._pools.get(ref)
        if pool is None:
            raise NotFound(f"there is no pool {ref}", param="pool", code="pool_not_found")
        if not pool.allows(tenant):
            raise Forbidden(
                f"the pool {ref} does not admit the tenant {tenant!r}", param="pool", code="pool_not_allowed"
            )
        return pool

    async def find(self, ref: str) -> Pool | None:
        """The pool that an adapter names; None when it names none or nobody reported it."""
        return await self._pools.get(PoolRef.parse(ref)) if ref else None

    async def only_one_for(self, tenant: str) -> Pool:
        """The pool of a registration that names none. Raises InvalidParameter unless there is exactly one."""
        usable = [pool for pool in await self._pools.all() if pool.allows(tenant)]
        if len(usable) != 1:
            names = ", ".join(str(pool.ref) for pool in usable) or "none"
            raise InvalidParameter(f"name a pool; those this tenant may use: {names}", param="pool")
        return usable[0]

    async def called(self, base: str, tenant: str) -> Pool | None:
        """The one pool that serves that base to the tenant, if exactly one does."""
        found = [pool for pool in await self._pools.all() if pool.is_called(base) and pool.allows(tenant)]
        return found[0] if len(found) == 1 else None

    async def check_not_reserved(self, adapter: str) -> None:
        """Raises InvalidName when a client's `model` of that name would mean a base."""
        _refuse_reserved(adapter, await self._pools.all())

    async def find_for(self, ref: str, adapter: str) -> Pool | None:
        """As `find` and `check_not_reserved` together."""
        parsed = PoolRef.parse(ref)
        found = await self._pools.get_or_called(parsed, adapter)
        _refuse_reserved(adapter, found)
        return next((pool for pool in found if pool.ref == parsed), None)


def _refuse_reserved(adapter: str, pools: Iterable[Pool]) -> None:
    if any(pool.is_called(adapter) for pool in pools):
        raise InvalidName(f"{adapter!r} is the name of a base model", param="adapter", code="reserved_name")


def _with_base_of(report: PoolReport, known: PoolReport) -> PoolReport:
    return PoolReport(
        base_model=report.base_model,
        aliases=report.aliases,
        base_digest=known.base_digest,
        config=known.config,
        max_rank=report.max_rank,
        max_model_len=report.max_model_len or known.max_model_len,
        replicas=report.replicas,
        allowed_tenants=report.allowed_tenants,
        allowed_namespaces=report.allowed_namespaces,
        credential_epoch=report.credential_epoch,
    )
