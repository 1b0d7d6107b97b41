from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from loraplane_core.wire.registry import Keys, KeySpec
from loraplane_gateway.db.sessions import Scope, transaction
from loraplane_gateway.registry.http import answer, caller_of, path, read, state_of, tenant_of
from loraplane_gateway.registry.keys.repository import KeyRepository
from loraplane_gateway.registry.keys.service import KeyService
from loraplane_gateway.registry.tenants.service import require_tenant

router = APIRouter()


@router.post("/admin/tenants/{tenant}/keys")
async def create(request: Request) -> Response:
    caller = await caller_of(request)
    caller.require_platform()
    spec = await read(request, KeySpec)
    state, scope = state_of(request), Scope(tenant_of(request))
    async with transaction(state.sessions, scope) as session:
        new = await KeyService(session, scope, caller.actor).create(tenant_of(request), spec, state.secrets.pepper)
    return answer(new, 201)


@router.get("/admin/tenants/{tenant}/keys")
async def list_all(request: Request) -> Response:
    (await caller_of(request)).require_platform()
    scope = Scope(tenant_of(request))
    async with transaction(state_of(request).sessions, scope) as session:
        await require_tenant(session, tenant_of(request))
        return answer(Keys(keys=await KeyRepository(session, scope).all()))


@router.delete("/admin/tenants/{tenant}/keys/{key_id}")
async def revoke(request: Request) -> Response:
    caller = await caller_of(request)
    caller.require_platform()
    state, tenant, key_id = state_of(request), tenant_of(request), path(request, "key_id")
    scope = Scope(tenant)
    async with transaction(state.sessions, scope) as session:
        key = await KeyService(session, scope, caller.actor).revoke(tenant, key_id)
    # After the commit: a notice that arrived before it would be answered by the old row.
    await state.revocations.publish([key_id])
    return answer(key)
