from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from loraplane_core.wire.registry import Activate, Rollback
from loraplane_gateway.db.sessions import transaction
from loraplane_gateway.registry.activation.service import ActivationService
from loraplane_gateway.registry.http import adapter_of, answer, caller_of, read, state_of, tenant_of

router = APIRouter()


@router.post("/admin/tenants/{tenant}/adapters/{adapter}/activate")
async def activate(request: Request) -> Response:
    caller = await caller_of(request)
    scope = caller.scope_for(tenant_of(request))
    order = await read(request, Activate)
    async with transaction(state_of(request).sessions, scope) as session:
        found = await ActivationService(session, scope, caller.actor).activate(adapter_of(request), order)
    return answer(found)


@router.post("/admin/tenants/{tenant}/adapters/{adapter}/rollback")
async def rollback(request: Request) -> Response:
    caller = await caller_of(request)
    scope = caller.scope_for(tenant_of(request))
    order = await read(request, Rollback)
    async with transaction(state_of(request).sessions, scope) as session:
        found = await ActivationService(session, scope, caller.actor).rollback(adapter_of(request), order)
    return answer(found)
