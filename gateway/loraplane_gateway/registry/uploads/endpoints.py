from fastapi import APIRouter
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from loraplane_core.artifact.digest import ARTIFACT_FILES
from loraplane_core.errors import InvalidParameter
from loraplane_gateway.db.sessions import transaction
from loraplane_gateway.registry.http import answer, caller_of, number, path, state_of, tenant_of
from loraplane_gateway.registry.uploads.service import UploadService

OFFSET = "upload-offset"
router = APIRouter()


@router.post("/admin/tenants/{tenant}/uploads")
async def create(request: Request) -> Response:
    tenant = tenant_of(request)
    scope = (await caller_of(request)).scope_for(tenant)
    state = state_of(request)
    async with transaction(state.sessions, scope) as session:
        upload = await UploadService(session, scope, state.uploads).create(
            tenant, ttl=state.settings.upload_ttl, limit=state.settings.max_uploads
        )
    return answer(upload, 201)


@router.get("/admin/tenants/{tenant}/uploads/{upload_id}")
async def get(request: Request) -> Response:
    tenant = tenant_of(request)
    scope = (await caller_of(request)).scope_for(tenant)
    state = state_of(request)
    async with transaction(state.sessions, scope) as session:
        return answer(await UploadService(session, scope, state.uploads).get(tenant, path(request, "upload_id")))


@router.put("/admin/tenants/{tenant}/uploads/{upload_id}/files/{name}")
async def put(request: Request) -> Response:
    """Append the body at `Upload-Offset`. The database is asked before and after, never during a long body."""
    tenant, upload_id, name = tenant_of(request), path(request, "upload_id"), path(request, "name")
    scope = (await caller_of(request)).scope_for(tenant)
    state = state_of(request)
    if name not in ARTIFACT_FILES:
        raise InvalidParameter(f"an artifact has exactly the files {' and '.join(ARTIFACT_FILES)}", param="name")
    offset = number(request.headers.get(OFFSET), "Upload-Offset", default=0)
    async with transaction(state.sessions, scope) as session:
        await UploadService(session, scope, state.uploads).get(tenant, upload_id)
    try:
        await state.uploads.append(tenant, upload_id, name, offset, aiter(request.stream()))
    except ClientDisconnect:
        # What arrived is kept; the client asks how much and goes on. Nobody reads this answer.
        return answer({}, 400)
    async with transaction(state.sessions, scope) as session:
        return answer(await UploadService(session, scope, state.uploads).get(tenant, upload_id))
