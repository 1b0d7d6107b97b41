from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TypeVar

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from loraplane_core.errors import InvalidParameter
from loraplane_core.wire.registry import Activate, ClaimRequest, Claims, RegisterSource, SetTraffic
from loraplane_gateway.db.sessions import PLATFORM, transaction
from loraplane_gateway.registry.activation.endpoints import settled
from loraplane_gateway.registry.adapters.endpoints import WAITING, source_refusal
from loraplane_gateway.registry.claims.repository import ClaimRepository
from loraplane_gateway.registry.claims.service import ClaimService
from loraplane_gateway.registry.http import answer, caller_of, path, read, state_of

CLAIM = "/operator/claims/{uid}"
T = TypeVar("T")
router = APIRouter()


@asynccontextmanager
async def _asked(request: Request, kind: type[T]) -> AsyncIterator[tuple[ClaimService, T]]:
    """What the operator asks for, and one transaction to do it in."""
    caller = await caller_of(request)
    caller.require_operator()
    wanted = await read(request, kind)
    async with transaction(state_of(request).sessions, PLATFORM) as session:
        yield ClaimService(session, caller.actor), wanted


@router.put(CLAIM)
async def claim(request: Request) -> Response:
    async with _asked(request, ClaimRequest) as (service, wanted):
        return answer(await service.claim(path(request, "uid"), wanted))


@router.get("/operator/claims")
async def list_all(request: Request) -> Response:
    (await caller_of(request)).require_operator()
    async with transaction(state_of(request).sessions, PLATFORM) as session:
        return answer(Claims(claims=await ClaimRepository(session, PLATFORM).all()))


@router.delete(CLAIM)
async def release(request: Request) -> Response:
    caller = await caller_of(request)
    caller.require_operator()
    versions = request.query_params.get("versions", "retain")
    if versions not in ("retain", "delete"):
        raise InvalidParameter("versions is retain or delete", param="versions")
    async with transaction(state_of(request).sessions, PLATFORM) as session:
        service = ClaimService(session, caller.actor)
        await service.release(path(request, "uid"), delete_versions=versions == "delete")
    return answer({})


@router.post(f"{CLAIM}/register")
async def register(request: Request) -> Response:
    caller = await caller_of(request)
    caller.require_operator()
    wanted, state = await read(request, RegisterSource), state_of(request)
    if not wanted.source.uri.startswith("file:"):
        raise InvalidParameter("an object's source is file:PATH", param="source")
    refusal = await source_refusal(state, wanted.source.uri)
    async with transaction(state.sessions, PLATFORM) as session:
        version = await ClaimService(session, caller.actor).register(path(request, "uid"), wanted, refusal)
    state.queued.wake()
    return answer(version, 202 if version.state in WAITING else 200)


@router.post(f"{CLAIM}/activate")
async def activate(request: Request) -> Response:
    async with _asked(request, Activate) as (service, order):
        found = await service.activate(path(request, "uid"), order)
    return await settled(request, found)


@router.post(f"{CLAIM}/traffic")
async def traffic(request: Request) -> Response:
    async with _asked(request, SetTraffic) as (service, order):
        return answer(await service.set_traffic(path(request, "uid"), order))
