from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TypeVar

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from loraplane_core.wire.registry import Activate, Adapter, Rollback, SetTraffic, Warmed
from loraplane_gateway.db.sessions import Scope, transaction
from loraplane_gateway.registry.activation.service import ActivationService, Pending
from loraplane_gateway.registry.activation.warming import until_warm
from loraplane_gateway.registry.http import adapter_of, answer, caller_of, read, state_of, tenant_of

ADAPTER = "/admin/tenants/{tenant}/adapters/{adapter}"
T = TypeVar("T")
router = APIRouter()


@asynccontextmanager
async def _ordered(request: Request, kind: type[T]) -> AsyncIterator[tuple[ActivationService, T]]:
    """The caller's order about an adapter of a tenant that it administers, and one transaction to carry it out."""
    caller = await caller_of(request)
    scope = caller.scope_for(tenant_of(request))
    order = await read(request, kind)
    async with transaction(state_of(request).sessions, scope) as session:
        yield ActivationService(session, scope, caller.actor), order


@router.post(f"{ADAPTER}/activate")
async def activate(request: Request) -> Response:
    async with _ordered(request, Activate) as (service, order):
        found = await service.activate(adapter_of(request), order)
    return await settled(request, found)


@router.post(f"{ADAPTER}/rollback")
async def rollback(request: Request) -> Response:
    async with _ordered(request, Rollback) as (service, order):
        found = await service.rollback(adapter_of(request), order)
    return await settled(request, found)


@router.post(f"{ADAPTER}/traffic")
async def traffic(request: Request) -> Response:
    async with _ordered(request, SetTraffic) as (service, order):
        found = await service.set_traffic(adapter_of(request), order)
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
