"""Which weights a request is for. Nothing here ever falls back to the base (case E17)."""

from dataclasses import dataclass

from starlette.types import Scope

from loraplane_core import headers as names
from loraplane_core.errors import (
    BaseModelMismatch,
    InvalidRequest,
    MissingReference,
    ModelNotFound,
)
from loraplane_core.identity import BASE_REFERENCE, SHORT_DIGEST, AdapterId, AdapterRef, check_name, is_digest
from loraplane_core.wire import check_protocol
from loraplane_engine.server.asgi import header


@dataclass(frozen=True)
class Target:
    """`adapter` None is the base model. `bytes` bounds a fetch; `rank` is what the registry recorded."""

    adapter: AdapterId | None
    tenant: str
    bytes: int = 0
    rank: int = 0

    def id_header(self, base_digest: str) -> str:
        return str(self.adapter) if self.adapter else f"{BASE_REFERENCE}#{base_digest[:SHORT_DIGEST]}"


class ManagedReferences:
    """The gateway's trusted headers decide; the body's `model` is only echoed."""

    def __init__(self, base_digest: str) -> None:
        self._base_digest = base_digest

    def resolve(self, scope: Scope, model: str) -> Target:
        del model
        protocol = header(scope, names.PROTOCOL)
        if protocol is not None:
            check_protocol(_number(names.PROTOCOL, protocol), "the gateway")
        base = header(scope, names.BASE_DIGEST)
        reference = header(scope, names.ADAPTER)
        if reference is None or base is None:
            missing = names.ADAPTER if reference is None else names.BASE_DIGEST
            raise MissingReference(f"the header {missing} is required by a managed engine")
        if base != self._base_digest:
            raise BaseModelMismatch(
                f"the request is for a base with digest {base[:SHORT_DIGEST]}; "
                f"this engine serves {self._base_digest[:SHORT_DIGEST]}"
            )
        if reference == BASE_REFERENCE:
            return Target(None, _tenant(header(scope, names.TENANT)))
        digest = header(scope, names.DIGEST)
        if digest is None or not is_digest(digest):
            raise MissingReference(f"the header {names.DIGEST} must hold 64 hexadecimal digits")
        ref = AdapterRef.parse(reference)
        return Target(
            AdapterId.of(ref, digest),
            ref.tenant,
            _number(names.BYTES, header(scope, names.BYTES)),
            _number(names.RANK, header(scope, names.RANK)),
        )


class StandaloneReferences:
    """`model` is the base's name or the NAME of an `--adapter`; anything else is 404."""

    def __init__(self, base_name: str, adapters: dict[str, AdapterId]) -> None:
        self._base_name = base_name
        self._adapters = adapters

    def resolve(self, scope: Scope, model: str) -> Target:
        del scope
        if model == self._base_name:
            return Target(None, "")
        adapter = self._adapters.get(model)
        if adapter is None:
            raise ModelNotFound(model)
        return Target(adapter, adapter.tenant)


References = ManagedReferences | StandaloneReferences


def _tenant(text: str | None) -> str:
    """A gateway of the protocol before does not say who asks for the base; all such requests share one turn."""
    return check_name(text, names.TENANT) if text else ""


def _number(name: str, text: str | None) -> int:
    if text is None or not (text.isascii() and text.isdigit() and len(text) <= 15):
        raise InvalidRequest(f"the header {name} must hold a number")
    return int(text)


def admin_id(tenant: str, adapter: str, version: str, digest: str | None) -> AdapterId:
    """The id in an admin URL plus the digest from the body or header."""
    ref = AdapterRef.parse(f"{tenant}/{adapter}@{version}")
    if digest is None:
        raise InvalidRequest(f"the header {names.DIGEST} is required")
    return AdapterId.of(ref, digest)
