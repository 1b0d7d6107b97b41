# ruff: noqa: S608 - the statements are put together from constants of this module; values are always bound
from typing import Any

from psycopg.errors import UniqueViolation
from sqlalchemy import text

from loraplane_core.errors import Conflict
from loraplane_core.wire.registry import Claim, ClaimRequest
from loraplane_gateway.registry.rows import Repository

_FIELDS = "claim_uid, claim_ref, tenant_id, name, pool"
_FIND = text(f"SELECT {_FIELDS} FROM adapters WHERE claim_uid = :uid")
_LIST = text(f"SELECT {_FIELDS} FROM adapters WHERE claim_uid IS NOT NULL ORDER BY tenant_id, name")
_SET = text("""
    UPDATE adapters SET claim_uid = :uid, claim_ref = :ref, pool = :pool, warm_replicas = :warm_replicas,
        pinned = :pinned, activation_owner = :owner,
        source_hash = CASE WHEN claim_uid = :uid THEN source_hash ELSE '' END
    WHERE tenant_id = :tenant AND name = :adapter""")
_RELEASE = text("""
    UPDATE adapters SET claim_uid = NULL, claim_ref = '', activation_owner = 'registry', pinned = FALSE,
        source_hash = ''
    WHERE tenant_id = :tenant AND name = :adapter""")
_DELETE_VERSIONS = text("DELETE FROM tenant_adapters WHERE tenant_id = :tenant AND adapter = :adapter")
_FORGET = text("""
    UPDATE adapters SET previous_version = NULL, last_sole = NULL WHERE tenant_id = :tenant AND name = :adapter""")
_NOTE_SOURCE = text("UPDATE adapters SET source_hash = :source_hash WHERE tenant_id = :tenant AND name = :adapter")


class ClaimRepository(Repository):
    """Look-ups by uid cross tenants and need the platform's scope; writes name one tenant."""

    async def find(self, uid: str) -> Claim | None:
        row = (await self.session.execute(_FIND, {"uid": uid})).one_or_none()
        return None if row is None else _claim(row)

    async def all(self) -> list[Claim]:
        return [_claim(row) for row in await self.session.execute(_LIST)]

    async def set(self, uid: str, wanted: ClaimRequest) -> None:
        """Raises Conflict where the uid has got another adapter in this moment."""
        values = {
            "uid": uid,
            "ref": wanted.ref,
            "pool": wanted.pool,
            "warm_replicas": wanted.warm_replicas,
            "pinned": wanted.pinned,
            "owner": "object" if wanted.owns_activation else "registry",
            "tenant": wanted.tenant,
            "adapter": wanted.adapter,
        }
        try:
            await self.session.execute(_SET, values)
        except UniqueViolation as error:
            raise Conflict("this object claims another adapter already", code="immutable_field") from error

    async def note_source(self, tenant: str, adapter: str, source_hash: str) -> None:
        """The claim's object names this source now."""
        await self.session.execute(_NOTE_SOURCE, {"tenant": tenant, "adapter": adapter, "source_hash": source_hash})

    async def release(self, tenant: str, adapter: str) -> None:
        await self.session.execute(_RELEASE, {"tenant": tenant, "adapter": adapter})

    async def delete_versions(self, tenant: str, adapter: str) -> None:
        key = {"tenant": tenant, "adapter": adapter}
        await self.session.execute(_DELETE_VERSIONS, key)
        await self.session.execute(_FORGET, key)


def _claim(row: Any) -> Claim:
    return Claim(uid=row.claim_uid, ref=row.claim_ref, tenant=row.tenant_id, adapter=row.name, pool=row.pool)
