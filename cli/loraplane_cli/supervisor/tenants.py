"""`kind: Tenant` documents of the watched folder, applied through admin REST (design §3).

A tenant that a document names exists with its namespaces within two seconds of an edit, and has one key
made here, kept in `secrets/tenants/`. A document that goes leaves its tenant: deleting one is a decision.
"""

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

import httpx
import msgspec

from loraplane_cli.documents import is_ours, load_raw, yaml_files
from loraplane_cli.errors import BadDocument
from loraplane_core import wire
from loraplane_core.errors import InvalidParameter, InvalidRequest, LoraplaneError, from_wire
from loraplane_core.files import write_atomic
from loraplane_core.labels import TENANT_KIND
from loraplane_core.resources.documents import parse_document
from loraplane_core.resources.tenant import Tenant
from loraplane_core.wire.registry import Keys, KeySpec, NewKey, TenantSpec

log = logging.getLogger(__name__)
POLL_SECONDS = 0.5
KEY_NAME = "made by loraplane up"


class StoredKey(msgspec.Struct, kw_only=True, frozen=True):
    id: str
    secret: str


class TenantDocuments:
    """Watches the folder; `changed` is called with all tenants' keys whenever one is added."""

    def __init__(
        self, folder: Path, keys: Path, admin: httpx.AsyncClient, changed: Callable[[dict[str, str]], None]
    ) -> None:
        self._folder = folder
        self._keys_folder = keys
        self._admin = admin
        self._changed = changed
        self._applied: dict[str, list[str]] = {}
        self._trouble = ""
        self._seen: object = None
        self._settled = False
        self.keys: dict[str, str] = {}

    async def watch(self) -> None:
        """Runs until cancelled."""
        while True:
            await self.step()
            await asyncio.sleep(POLL_SECONDS)

    async def step(self) -> None:
        """Apply what changed since the last step; troubles are logged once and tried again."""
        try:
            stamp = _stamp(self._folder)
            if self._settled and stamp == self._seen:
                return
            wished = read_tenants(self._folder)
            for name in sorted(self._applied.keys() - wished.keys()):
                log.warning(
                    "the document of tenant %s is gone; the tenant stays (loraplane tenant delete %s)", name, name
                )
                del self._applied[name]
            due = {name: namespaces for name, namespaces in wished.items() if self._applied.get(name) != namespaces}
            await asyncio.gather(*(self._apply(name, namespaces) for name, namespaces in due.items()))
            self._seen, self._settled, self._trouble = stamp, True, ""
        except Exception as error:  # a defect met in a document must not end the engines and databases beside us
            self._settled = False
            if repr(error) != self._trouble:
                self._trouble = repr(error)
                known = isinstance(error, LoraplaneError | httpx.HTTPError | OSError)
                log.warning("tenants: %s", str(error) or type(error).__name__, exc_info=None if known else error)

    async def _apply(self, name: str, namespaces: list[str]) -> None:
        await self._call("POST", "/admin/tenants", TenantSpec(name=name, namespaces=namespaces))
        self.keys[name] = await self._key(name)
        self._applied[name] = namespaces
        log.info("tenant %s may be claimed for in: %s", name, ", ".join(namespaces) or "no namespace")
        self._changed(dict(self.keys))

    async def _key(self, tenant: str) -> str:
        """The key kept for a tenant, while the registry knows it; else a new one."""
        path = self._keys_folder / f"{tenant}.json"
        known = wire.decode(await self._call("GET", f"/admin/tenants/{tenant}/keys"), Keys).keys
        stored = _stored(path)
        if stored is not None and any(key.id == stored.id and key.revoked_at is None for key in known):
            return stored.secret
        answer = await self._call("POST", f"/admin/tenants/{tenant}/keys", KeySpec(name=KEY_NAME))
        new = wire.decode(answer, NewKey)
        write_atomic(path, msgspec.json.encode(StoredKey(id=new.key.id, secret=new.secret)))
        return new.secret

    async def _call(self, method: str, path: str, body: object = None) -> bytes:
        content = None if body is None else msgspec.json.encode(body)
        answer = await self._admin.request(method, path, content=content, headers={"content-type": "application/json"})
        if answer.is_error:
            raise from_wire(answer.status_code, _json(answer.content))
        return answer.content


def read_tenants(folder: Path) -> dict[str, list[str]]:
    """Tenant name -> namespaces, of all documents below `folder`. One bad document hides no other; it is logged."""
    found: dict[str, list[str]] = {}
    for path in yaml_files(folder):
        try:
            for raw in load_raw(path):
                if is_ours(raw) and raw.get("kind") == TENANT_KIND:
                    document = parse_document(raw, where=str(path))
                    if isinstance(document, Tenant):
                        found[document.metadata.name] = sorted(document.spec.namespaces)
        except (BadDocument, InvalidParameter, InvalidRequest) as error:
            log.warning("%s", error)
    return found


def _stored(path: Path) -> StoredKey | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=StoredKey)
    except (FileNotFoundError, msgspec.DecodeError):
        return None


def _stamp(folder: Path) -> tuple[tuple[str, int, int], ...]:
    """Changes whenever a document is added, edited or removed."""
    found = []
    for path in yaml_files(folder):
        try:
            status = path.stat()
        except FileNotFoundError:
            continue
        found.append((str(path), status.st_mtime_ns, status.st_size))
    return tuple(found)


def _json(content: bytes) -> object:
    try:
        return msgspec.json.decode(content)
    except msgspec.DecodeError:
        return None
