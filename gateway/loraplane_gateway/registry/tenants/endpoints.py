import asyncio

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from loraplane_core.identity import check_name
from loraplane_core.wire.registry import Tenants, TenantSpec
from loraplane_gateway.db.sessions import PLATFORM, Scope, transaction
from loraplane_gateway.registry.http import answer, caller_of, read, state_of, tenant_of
from loraplane_gateway.registry.tenants.repository import TenantRepository
from loraplane_gateway.registry.tenants.service import TenantService, require_tenant

router = APIRouter()


@router.post("/admin/tenants")
async def create(request: Request) -> Response:
    caller = await caller_of(request)
    caller.require_platform()
    spec = await read(request, TenantSpec)
    scope = Scope(check_name(spec.name, "name"))
    async with transaction(state_of(request).sessions, scope) as session:
        tenant, created = await TenantService(session, scope, caller.actor).put(spec)
    return answer(tenant, 201 if created else 200)


@router.get("/admin/tenants")
async def list_all(request: Request) -> Response:
    (await caller_of(request)).require_platform()
    async with transaction(state_of(request).sessions, PLATFORM) as session:
        tenants = await TenantRepository(session, PLATFORM).all()
    return answer(Tenants(tenants=tenants))


@router.get("/admin/tenants/{tenant}")
async def get(request: Request) -> Response:
    name = tenant_of(request)
    scope = (await caller_of(request)).scope_for(name)
    async with transaction(state_of(request).sessions, scope) as session:
        return answer(await require_tenant(session, name))


@router.delete("/admin/tenants/{tenant}")
async def delete(request: Request) -> Response:
    caller = await caller_of(request)
    caller.require_platform()
    name = tenant_of(request)
    scope = Scope(name)
    state = state_of(request)
    async with transaction(state.sessions, scope) as session:
        tenant = await require_tenant(session, name)
        key_ids = await TenantService(session, scope, caller.actor).delete(name)
    await state.revocations.publish(key_ids)
    await asyncio.to_thread(state.uploads.remove_all, name)
    return answer(tenant)
