"""Who may ask what. Each port has one function that raises for a request that may not pass."""

from collections.abc import Callable

from starlette.types import Scope

from loraplane_core.credentials import accepted, bearer
from loraplane_core.errors import Forbidden, Unauthenticated
from loraplane_core.wire.supervisor import EngineCredentials
from loraplane_engine.server.asgi import header
from loraplane_engine.server.health_app import HEALTH_PREFIX

Authorize = Callable[[Scope], None]

#: Paths of the admin port that the `state` credential may read.
_STATE_PATHS = frozenset({"/state", "/adapters", "/model"})


def everyone(scope: Scope) -> None:
    """The metrics port, and the data port of a standalone engine, which is bound to loopback."""
    del scope


def data(credentials: EngineCredentials) -> Authorize:
    def authorize(scope: Scope) -> None:
        if not scope["path"].startswith(HEALTH_PREFIX):
            _require(scope, credentials.data)

    return authorize


def admin(credentials: EngineCredentials) -> Authorize:
    def authorize(scope: Scope) -> None:
        readable = scope["path"] in _STATE_PATHS and scope["method"] == "GET"
        token = _require(scope, [*credentials.admin, *credentials.state])
        if not readable and not accepted(token, credentials.admin):
            raise Forbidden("this needs the admin credential")

    return authorize


def _require(scope: Scope, valid: list[str]) -> str:
    token = bearer(header(scope, "authorization"))
    if token is None or not accepted(token, valid):
        raise Unauthenticated("a valid engine credential is required")
    return token
