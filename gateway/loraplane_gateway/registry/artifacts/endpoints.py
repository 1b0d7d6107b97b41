"""The artifact listener: engines fetch by full digest what an adapter of their pool is made of, and nothing else."""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import FileResponse, Response

from loraplane_core import headers
from loraplane_core.credentials import accepted, bearer, engine_credential, role_key
from loraplane_core.errors import ArtifactUnavailable, InvalidName, NotFound, Unauthenticated
from loraplane_core.identity import PoolRef, is_digest
from loraplane_gateway.db.engine import AWAY, named
from loraplane_gateway.db.sessions import PLATFORM, transaction
from loraplane_gateway.registry.artifacts.repository import ArtifactRepository
from loraplane_gateway.registry.http import log, path, state_of

router = APIRouter()


@router.get("/artifacts/{digest}/{name}")
@router.head("/artifacts/{digest}/{name}")
async def fetch(request: Request) -> Response:
    state, digest = state_of(request), path(request, "digest")
    try:
        async with transaction(state.sessions, PLATFORM) as session:
            artifacts = ArtifactRepository(session, PLATFORM)
            pool = await _pool(request, artifacts)
            allowed = is_digest(digest) and await artifacts.may_fetch(pool, digest)
    except AWAY as error:
        log.warning("a fetch could not be checked: Postgres did not answer (%s)", named(error))
        raise ArtifactUnavailable("the registry's database does not answer", retry_after=2) from error
    # One answer for unknown, withdrawn and other pools' artifacts.
    missing = NotFound("this pool has no such artifact")
    if not allowed:
        raise missing
    file = state.store.file(digest, path(request, "name"))
    if file is None:
        raise missing
    return FileResponse(file, media_type="application/octet-stream")


async def _pool(request: Request, artifacts: ArtifactRepository) -> PoolRef:
    """Whose engine is asking. Raises Unauthenticated."""
    refusal = Unauthenticated("a pool's fetch credential is required")
    token = bearer(request.headers.get("authorization"))
    try:
        pool = PoolRef.parse(request.headers.get(headers.POOL, ""))
    except InvalidName as error:
        raise refusal from error
    newest = await artifacts.epoch(pool)
    if token is None or newest is None:
        raise refusal
    key = role_key(state_of(request).secrets.master, "fetch")
    valid = {str(epoch): engine_credential(key, pool, epoch) for epoch in (newest, newest - 1) if epoch >= 1}
    claimed = valid.get(request.headers.get(headers.EPOCH, ""))
    if claimed is None or not accepted(token, [claimed]):
        raise refusal
    return pool
