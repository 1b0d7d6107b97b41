"""Who is asking the admin listener: the platform, the operator, or a tenant's administrator."""

import datetime
import hmac
from dataclasses import dataclass
from typing import Literal

from loraplane_core.credentials import accepted, operator_credential
from loraplane_core.errors import Forbidden, Unauthenticated
from loraplane_gateway import keys
from loraplane_gateway.db.sessions import PLATFORM, Scope, Sessions, transaction
from loraplane_gateway.registry.keys.repository import KeyRepository
from loraplane_gateway.settings import RegistrySecrets


@dataclass(frozen=True, slots=True)
class Caller:
    """`actor` is what the audit log records: an id, never a secret."""

    kind: Literal["platform", "operator", "tenant"]
    actor: str
    tenant: str | None = None

    def require_platform(self) -> None:
        if self.kind != "platform":
            raise Forbidden("this needs the platform's admin key")

    def require_operator(self) -> None:
        if self.kind != "operator":
            raise Forbidden("this needs the operator's credential")

    def scope_for(self, tenant: str) -> Scope:
        """The rows that a request about `tenant` may touch. Raises Forbidden for another tenant's key."""
        if self.kind == "platform" or (self.kind == "tenant" and self.tenant == tenant):
            return Scope(tenant)
        raise Forbidden("this credential does not administer that tenant")


class Authenticator:
    def __init__(self, sessions: Sessions, secrets: RegistrySecrets) -> None:
        self._sessions = sessions
        self._pepper = secrets.pepper
        self._admin_digest = keys.digest(secrets.pepper, secrets.admin_key)
        self._operator = operator_credential(secrets.master)

    async def caller(self, token: str | None) -> Caller:
        """Raises Unauthenticated for a missing or dead credential, Forbidden for a key that only clients use."""
        if token is None:
            raise Unauthenticated("an Authorization header with a Bearer token is required")
        digest = keys.digest(self._pepper, token)
        if hmac.compare_digest(digest, self._admin_digest):
            return Caller("platform", "platform")
        if accepted(token, [self._operator]):
            return Caller("operator", "operator")
        if keys.key_id(token) is None:
            raise Unauthenticated("the credential is not valid")
        async with transaction(self._sessions, PLATFORM) as session:
            found = await KeyRepository(session, PLATFORM).find_live(digest, datetime.datetime.now(datetime.UTC))
        if found is None:
            raise Unauthenticated("the credential is not valid")
        if "admin" not in found.scopes:
            raise Forbidden("this key has no admin scope")
        return Caller("tenant", f"key/{found.id}", found.tenant)
