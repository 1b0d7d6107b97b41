# ruff: noqa: S608 - the statements are put together from constants of this module; values are always bound
import datetime
from typing import Any

from sqlalchemy import text

from loraplane_core.wire.registry import Key
from loraplane_gateway.registry.rows import Repository, rfc3339

_FIELDS = "id, tenant_id, name, scopes, created_at, expires_at, revoked_at"
_ADD = text(f"""
    INSERT INTO api_keys (id, tenant_id, name, digest, scopes, expires_at)
    VALUES (:id, :tenant, :name, :digest, :scopes, :expires_at) RETURNING {_FIELDS}""")
_LIST = text(f"SELECT {_FIELDS} FROM api_keys WHERE tenant_id = :tenant ORDER BY created_at, id")
_REVOKE = text(f"""
    UPDATE api_keys SET revoked_at = coalesce(revoked_at, now())
    WHERE tenant_id = :tenant AND id = :id RETURNING {_FIELDS}""")
_FIND = text(f"""
    SELECT {_FIELDS} FROM api_keys
    WHERE (digest = :digest OR (previous_digest = :digest AND previous_expires_at > :now))
      AND revoked_at IS NULL AND (expires_at IS NULL OR expires_at > :now)""")


class KeyRepository(Repository):
    async def add(
        self, key_id: str, name: str, digest: bytes, scopes: list[str], expires_at: datetime.datetime | None
    ) -> Key:
        values = {
            "id": key_id,
            "tenant": self.tenant,
            "name": name,
            "digest": digest,
            "scopes": scopes,
            "expires_at": expires_at,
        }
        return _key((await self.session.execute(_ADD, values)).one())

    async def all(self) -> list[Key]:
        return [_key(row) for row in await self.session.execute(_LIST, {"tenant": self.tenant})]

    async def revoke(self, key_id: str) -> Key | None:
        row = (await self.session.execute(_REVOKE, {"tenant": self.tenant, "id": key_id})).one_or_none()
        return None if row is None else _key(row)

    async def find_live(self, digest: bytes, now: datetime.datetime) -> Key | None:
        """The key of that secret unless it is revoked or expired; whose it is, is what is asked."""
        row = (await self.session.execute(_FIND, {"digest": digest, "now": now})).one_or_none()
        return None if row is None else _key(row)


def _key(row: Any) -> Key:
    return Key(
        id=row.id,
        tenant=row.tenant_id,
        name=row.name,
        scopes=list(row.scopes),
        created_at=rfc3339(row.created_at),
        expires_at=None if row.expires_at is None else rfc3339(row.expires_at),
        revoked_at=None if row.revoked_at is None else rfc3339(row.revoked_at),
    )
