from collections.abc import Mapping
from typing import Literal

from loraplane_core.wire.registry import Adapter, FeedChange, FeedSnapshot
from loraplane_gateway.db.sessions import PLATFORM, Session
from loraplane_gateway.registry.adapters.repository import AdapterRepository
from loraplane_gateway.registry.feed.repository import ChangeRow, FeedRepository
from loraplane_gateway.registry.tenants.repository import TenantRepository

BATCH = 200
SHOWN = ("adapter", "tenant", "pool")  # keys are none of the operator's business


class FeedService:
    def __init__(self, session: Session) -> None:
        self._session = session
        self._feed = FeedRepository(session, PLATFORM)

    async def continues(self, cursor: int) -> bool:
        """False when changes after `cursor` were trimmed, or when this database never reached it."""
        oldest, newest = await self._feed.span()
        return oldest - 1 <= cursor <= newest

    async def snapshot(self) -> FeedSnapshot:
        """Everything as it is. The cursor is read first: what happens in between comes again as a change."""
        _, newest = await self._feed.span()
        adapters = await AdapterRepository(self._session, PLATFORM).all()
        tenants = await TenantRepository(self._session, PLATFORM).all()
        return FeedSnapshot(cursor=newest, adapters=adapters, tenants=[tenant.name for tenant in tenants])

    async def changes(self, cursor: int) -> tuple[list[FeedChange], int, bool]:
        """The next changes in order, each subject once with its state of now, the cursor they lead to, and whether
        there may be more."""
        rows = await self._feed.after(cursor, BATCH)
        last = {(row.kind, row.tenant, row.name): row for row in rows}
        kept = sorted((row for row in last.values() if row.kind in SHOWN), key=lambda row: row.cursor)
        wanted = [(row.tenant, row.name) for row in kept if row.kind == "adapter"]
        adapters = await AdapterRepository(self._session, PLATFORM).some(wanted)
        return [_change(row, adapters) for row in kept], rows[-1].cursor if rows else cursor, len(rows) == BATCH


def _change(row: ChangeRow, adapters: Mapping[tuple[str, str], Adapter]) -> FeedChange:
    if row.kind != "adapter":
        kind: Literal["tenant", "pool"] = "tenant" if row.kind == "tenant" else "pool"
        return FeedChange(cursor=row.cursor, kind=kind, tenant=row.tenant, name=row.name)
    adapter = adapters.get((row.tenant, row.name))
    return FeedChange(cursor=row.cursor, kind="adapter", tenant=row.tenant, name=row.name, adapter=adapter)
