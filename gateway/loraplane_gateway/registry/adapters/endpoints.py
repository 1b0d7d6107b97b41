import asyncio
import hashlib
import secrets
import time

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from loraplane_core.errors import ArtifactRejected, InvalidParameter
from loraplane_core.wire import encode
from loraplane_core.wire.registry import AdapterList, RegisterVersion, Version
from loraplane_gateway.db.sessions import Scope, transaction
from loraplane_gateway.registry.adapters.repository import AdapterRepository
from loraplane_gateway.registry.adapters.service import AdapterService
from loraplane_gateway.registry.http import (
    adapter_of,
    answer,
    caller_of,
    number,
    path,
    read,
    state_of,
    tenant_of,
    wait_seconds,
)
from loraplane_gateway.registry.ingestion.repository import IngestionRepository
from loraplane_gateway.registry.ingestion.sources import UPLOAD_SCHEME, file_source, resolve
from loraplane_gateway.registry.state import RegistryState

IDEMPOTENCY_KEY = "idempotency-key"
WAITING = ("pending_base", "ingesting")
POLL_SECONDS = 0.5
router = APIRouter()


@router.get("/admin/tenants/{tenant}/adapters")
async def list_all(request: Request) -> Response:
    tenant, caller = tenant_of(request), await caller_of(request)
    scope = caller.scope_for(tenant)
    async with transaction(state_of(request).sessions, scope) as session:
        return answer(AdapterList(adapters=await AdapterService(session, scope, caller).all(tenant)))


@router.get("/admin/tenants/{tenant}/adapters/{adapter}")
async def get(request: Request) -> Response:
    caller = await caller_of(request)
    scope = caller.scope_for(tenant_of(request))
    async with transaction(state_of(request).sessions, scope) as session:
        return answer(await AdapterService(session, scope, caller).get(adapter_of(request)))


@router.post("/admin/tenants/{tenant}/adapters/{adapter}/versions")
async def register(request: Request) -> Response:
    tenant, adapter, caller = tenant_of(request), adapter_of(request), await caller_of(request)
    scope = caller.scope_for(tenant)
    wanted, seconds, state = await read(request, RegisterVersion), wait_seconds(request), state_of(request)
    uid = f"rest/{tenant}/{adapter}/{_idempotency_key(request)}"
    source_hash = hashlib.sha256(encode(wanted)).hexdigest()
    refusal = await source_refusal(state, wanted.source.uri) if caller.kind == "platform" else None
    async with transaction(state.sessions, scope) as session:
        version = await AdapterService(session, scope, caller).register(
            tenant, adapter, wanted, uid=uid, source_hash=source_hash, files=state.uploads, refusal=refusal
        )
    state.queued.wake()
    version = await _settled(state, scope, version, seconds, registration=(uid, source_hash))
    return answer(version, 202 if version.state in WAITING else 201)


@router.post("/admin/tenants/{tenant}/adapters/{adapter}/versions/{version}/verify")
async def verify(request: Request) -> Response:
    caller = await caller_of(request)
    caller.require_platform()  # a hand-written path may lie anywhere below the adapter root
    scope = Scope(tenant_of(request))
    seconds, state = wait_seconds(request), state_of(request)
    async with transaction(state.sessions, scope) as session:
        version = await AdapterService(session, scope, caller).verify(
            adapter_of(request), number(path(request, "version"), "version")
        )
    state.queued.wake()
    version = await _settled(state, scope, version, seconds)
    return answer(version, 202 if version.state in WAITING else 200)


@router.delete("/admin/tenants/{tenant}/adapters/{adapter}/versions/{version}")
async def delete(request: Request) -> Response:
    caller = await caller_of(request)
    scope = caller.scope_for(tenant_of(request))
    async with transaction(state_of(request).sessions, scope) as session:
        version = await AdapterService(session, scope, caller).delete_version(
            adapter_of(request), number(path(request, "version"), "version")
        )
    return answer(version)


async def source_refusal(state: RegistryState, uri: str) -> ArtifactRejected | None:
    """What an ingestion would refuse later: a path outside the root, or nothing there.

    Raised by the service only for a new registration; one that is known keeps its answer when its source is gone.
    """
    if uri.startswith(UPLOAD_SCHEME):
        return None
    try:
        await asyncio.to_thread(resolve, state.settings.adapter_root, file_source(uri))
    except ArtifactRejected as error:
        return error
    return None


def _idempotency_key(request: Request) -> str:
    key = request.headers.get(IDEMPOTENCY_KEY)
    if key is None:
        return secrets.token_hex(16)
    if not 0 < len(key) <= 128 or not key.isascii() or not key.isprintable():
        raise InvalidParameter("Idempotency-Key is at most 128 printable ASCII characters", param="Idempotency-Key")
    return key


async def _settled(
    state: RegistryState, scope: Scope, version: Version, seconds: float, registration: tuple[str, str] | None = None
) -> Version:
    """The version once its ingestion has ended, or as it is after `seconds`. A twin may have taken its place."""
    deadline = time.monotonic() + seconds
    seen = state.hub.position
    while version.state in WAITING and not state.hub.closed and (left := deadline - time.monotonic()) > 0:
        await state.hub.wait(seen, min(left, POLL_SECONDS))
        seen = state.hub.position
        async with transaction(state.sessions, scope) as session:
            number = version.version
            if registration is not None:
                found = await IngestionRepository(session, scope).registration(*registration)
                number = found[1] if found is not None else number
            version = await AdapterRepository(session, scope).version(version.adapter, number) or version
    return version
