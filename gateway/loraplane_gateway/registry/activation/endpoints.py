from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from loraplane_core.wire.registry import Activate, Adapter, Rollback, SetTraffic, Warmed
from loraplane_gateway.db.sessions import Scope, transaction
from loraplane_gateway.registry.activation.service import ActivationService, Pending
from loraplane_gateway.registry.activation.warming import until_warm
from loraplane_gateway.registry.http import adapter_of, answer, caller_of, read, state_of, tenant_of

router = APIRouter()


@router.post("/admin/tenants/{tenant}/adapters/{adapter}/activate")
async def activate(request: Request) -> Response:
    caller = await caller_of(request)
    scope = caller.scope_for(tenant_of(request))
    order = await read(request, Activate)
    async with transaction(state_of(request).sessions, scope) as session:
        found = await ActivationService(session, scope, caller.actor).activate(adapter_of(request), order)
    return await settled(request, found)


@router.post("/admin/tenants/{tenant}/adapters/{adapter}/rollback")
async def rollback(request: Request) -> Response:
    caller = await caller_of(request)
    scope = caller.scope_for(tenant_of(request))
    order = await read(request, Rollback)
    async with transaction(state_of(request).sessions, scope) as session:
        found = await ActivationService(session, scope, caller.actor).rollback(adapter_of(request), order)
    return await settled(request, found)


@router.post("/admin/tenants/{tenant}/adapters/{adapter}/traffic")
async def traffic(request: Request) -> Response:
    caller = await caller_of(request)
    scope = caller.scope_for(tenant_of(request))
    order = await read(request, SetTraffic)
    async with transaction(state_of(request).sessions, scope) as session:
        found = await ActivationService(session, scope, caller.actor).set_traffic(adapter_of(request), order)
    return answer(found)


@router.post("/operator/warm/{tenant}/{adapter}")
async def warmed(request: Request) -> Response:
    caller = await caller_of(request)
    caller.require_operator()
    scope = Scope(tenant_of(request))
    word = await read(request, Warmed)
    async with transaction(state_of(request).sessions, scope) as session:
        return answer(await ActivationService(session, scope, caller.actor).warmed(adapter_of(request), word))


async def settled(request: Request, outcome: Adapter | Pending) -> Response:
    """The answer to an activation, waited for outside its transaction."""
    if isinstance(outcome, Pending):
        outcome = await until_warm(state_of(request), outcome)
    return answer(outcome)
