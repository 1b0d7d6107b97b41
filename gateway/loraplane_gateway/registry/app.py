"""The two listeners' applications over one state."""

import asyncio

from fastapi import APIRouter, FastAPI
from sqlalchemy import text
from starlette.requests import Request
from starlette.responses import Response

from loraplane_core.errors import Unavailable
from loraplane_gateway.db.engine import AWAY
from loraplane_gateway.db.sessions import PLATFORM, transaction
from loraplane_gateway.registry.activation.endpoints import router as activation
from loraplane_gateway.registry.adapters.endpoints import router as adapters
from loraplane_gateway.registry.artifacts.endpoints import router as artifacts
from loraplane_gateway.registry.claims.endpoints import router as claims
from loraplane_gateway.registry.feed.endpoints import router as feed
from loraplane_gateway.registry.http import answer, new_app, state_of
from loraplane_gateway.registry.ingestion.repository import QueueRepository
from loraplane_gateway.registry.keys.endpoints import router as keys
from loraplane_gateway.registry.pools.endpoints import router as pools
from loraplane_gateway.registry.state import RegistryState
from loraplane_gateway.registry.tenants.endpoints import router as tenants
from loraplane_gateway.registry.uploads.endpoints import router as uploads

READY_SECONDS = 2.0
health = APIRouter()
metrics = APIRouter()


@health.get("/health/live")
async def live() -> Response:
    return answer({"status": "ok"})


@health.get("/health/ready")
async def ready(request: Request) -> Response:
    """Ready = Postgres answers. Raises Unavailable."""
    try:
        async with asyncio.timeout(READY_SECONDS), transaction(state_of(request).sessions, PLATFORM) as session:
            await session.execute(text("SELECT 1"))
    except AWAY as error:
        raise Unavailable("the registry's database does not answer", code="database_unavailable") from error
    return answer({"status": "ok"})


@metrics.get("/metrics")
async def show_metrics(request: Request) -> Response:
    state = state_of(request)
    async with transaction(state.sessions, PLATFORM) as session:
        counts = await QueueRepository(session, PLATFORM).counts()
    return Response(state.metrics.render(counts), media_type="text/plain; version=0.0.4")


def create_admin_app(state: RegistryState) -> FastAPI:
    app = new_app(state)
    for router in (health, metrics, tenants, keys, adapters, activation, uploads, pools, claims, feed):
        app.include_router(router)
    return app


def create_artifact_app(state: RegistryState) -> FastAPI:
    app = new_app(state)
    for router in (health, artifacts):
        app.include_router(router)
    return app
