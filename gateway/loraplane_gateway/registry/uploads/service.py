import re
import secrets

from loraplane_core.artifact.digest import ARTIFACT_FILES
from loraplane_core.errors import InvalidParameter, NotFound, TooManyRequests
from loraplane_core.wire.registry import Upload
from loraplane_gateway.db.sessions import Scope, Session
from loraplane_gateway.registry.tenants.service import require_tenant
from loraplane_gateway.registry.uploads.files import UploadFiles
from loraplane_gateway.registry.uploads.repository import UploadRepository

_ID = re.compile(r"[0-9a-f]{32}")


class UploadService:
    def __init__(self, session: Session, scope: Scope, files: UploadFiles) -> None:
        self._session = session
        self._uploads = UploadRepository(session, scope)
        self._files = files

    async def create(self, tenant: str, *, ttl: float, limit: int) -> Upload:
        await require_tenant(self._session, tenant, hold=True)
        if await self._uploads.count() >= limit:
            raise TooManyRequests(f"the tenant has {limit} open uploads", code="too_many_uploads", retry_after=60)
        upload_id = secrets.token_hex(16)
        self._files.create(tenant, upload_id)
        await self._uploads.add(upload_id, ttl)
        return Upload(id=upload_id)

    async def get(self, tenant: str, upload_id: str) -> Upload:
        """Raises NotFound, for another tenant's upload too."""
        if not _ID.fullmatch(upload_id) or not await self._uploads.is_live(upload_id):
            raise NotFound("there is no such upload")
        return Upload(id=upload_id, files=self._files.received(tenant, upload_id))

    async def require_complete(self, tenant: str, upload_id: str) -> None:
        have = {file.name for file in (await self.get(tenant, upload_id)).files}
        missing = [name for name in ARTIFACT_FILES if name not in have]
        if missing:
            raise InvalidParameter(
                f"the upload has no {' and no '.join(missing)} yet", param="source", code="missing_file"
            )
