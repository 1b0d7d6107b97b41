from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from loraplane_core.identity import PoolRef, check_name
from loraplane_core.wire.registry import PoolReport
from loraplane_gateway.db.sessions import PLATFORM, transaction
from loraplane_gateway.registry.http import answer, caller_of, path, read, state_of
from loraplane_gateway.registry.pools.service import PoolService

router = APIRouter()


def _ref(request: Request) -> PoolRef:
    return PoolRef(check_name(path(request, "namespace"), "namespace"), check_name(path(request, "name"), "name"))


@router.put("/operator/pools/{namespace}/{name}")
async def put(request: Request) -> Response:
    (await caller_of(request)).require_operator()
    ref, report = _ref(request), await read(request, PoolReport)
    async with transaction(state_of(request).sessions, PLATFORM) as session:
        await PoolService(session).report(ref, report)
    state_of(request).queued.wake()  # what waited for its base
    return answer({})


@router.delete("/operator/pools/{namespace}/{name}")
async def delete(request: Request) -> Response:
    (await caller_of(request)).require_operator()
    async with transaction(state_of(request).sessions, PLATFORM) as session:
        await PoolService(session).delete(_ref(request))
    return answer({})
