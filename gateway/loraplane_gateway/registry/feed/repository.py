from dataclasses import dataclass

from sqlalchemy import text

from loraplane_gateway.registry.rows import Repository

_SPAN = text("SELECT coalesce(min(cursor), 0) AS oldest, coalesce(max(cursor), 0) AS newest FROM changes")
_AFTER = text("""
    SELECT cursor, kind, tenant_id, name FROM changes WHERE cursor > :cursor ORDER BY cursor LIMIT :limit""")
_TRIM = text("""
    DELETE FROM changes WHERE cursor <= (
        SELECT cursor FROM changes ORDER BY cursor DESC OFFSET :keep LIMIT 1)""")


@dataclass(frozen=True, slots=True)
class ChangeRow:
    cursor: int
    kind: str
    tenant: str
    name: str


class FeedRepository(Repository):
    """The platform's scope: the feed is the operator's."""

    async def span(self) -> tuple[int, int]:
        """(oldest, newest) cursor; (0, 0) when nothing has ever happened."""
        row = (await self.session.execute(_SPAN)).one()
        return row.oldest, row.newest

    async def after(self, cursor: int, limit: int) -> list[ChangeRow]:
        rows = await self.session.execute(_AFTER, {"cursor": cursor, "limit": limit})
        return [ChangeRow(row.cursor, row.kind, row.tenant_id, row.name) for row in rows]

    async def trim(self, keep: int) -> None:
        await self.session.execute(_TRIM, {"keep": keep})
