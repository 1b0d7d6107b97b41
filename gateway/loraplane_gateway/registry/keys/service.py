import datetime

from loraplane_core.errors import InvalidParameter, NotFound
from loraplane_core.wire.registry import Key, KeySpec, NewKey
from loraplane_gateway import keys
from loraplane_gateway.db.sessions import Scope, Session
from loraplane_gateway.registry.audit import AuditRepository
from loraplane_gateway.registry.keys.repository import KeyRepository
from loraplane_gateway.registry.tenants.service import require_tenant

MAX_NAME = 100


class KeyService:
    def __init__(self, session: Session, scope: Scope, actor: str) -> None:
        self._session = session
        self._keys = KeyRepository(session, scope)
        self._audit = AuditRepository(session, scope)
        self._actor = actor

    async def create(self, tenant: str, spec: KeySpec, pepper: bytes) -> NewKey:
        """The one moment the secret exists outside its owner's hands."""
        if len(spec.name) > MAX_NAME or not spec.name.isprintable():
            raise InvalidParameter(f"name is at most {MAX_NAME} printable characters", param="name")
        if not spec.scopes:
            raise InvalidParameter("a key needs at least one scope", param="scopes")
        expires_at = _expiry(spec.expires_at)
        await require_tenant(self._session, tenant)
        key_id, secret = keys.mint()
        key = await self._keys.add(key_id, spec.name, keys.digest(pepper, secret), sorted(set(spec.scopes)), expires_at)
        await self._audit.add(self._actor, "key.create", tenant=tenant, subject=key_id)
        return NewKey(key=key, secret=secret)

    async def revoke(self, tenant: str, key_id: str) -> Key:
        key = await self._keys.revoke(key_id)
        if key is None:
            raise NotFound("there is no such key")
        await self._audit.add(self._actor, "key.revoke", tenant=tenant, subject=key_id)
        return key


def _expiry(text: str | None) -> datetime.datetime | None:
    if text is None:
        return None
    try:
        moment = datetime.datetime.fromisoformat(text)
    except ValueError:
        moment = None
    if moment is None or moment.tzinfo is None:
        raise InvalidParameter("expires_at must be an RFC 3339 time with a zone", param="expires_at")
    if moment <= datetime.datetime.now(datetime.UTC):
        raise InvalidParameter("expires_at lies in the past", param="expires_at")
    return moment
