"""The registry's admin REST as the CLI uses it (loraplane_core.wire.registry). One call, one method."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import httpx
import msgspec

from loraplane_cli.envfile import ADMIN_KEY
from loraplane_cli.errors import NotRunning
from loraplane_core import wire
from loraplane_core.errors import InvalidRequest, Unauthenticated, from_wire
from loraplane_core.wire.registry import (
    Activate,
    Adapter,
    AdapterList,
    Key,
    Keys,
    KeySpec,
    NewKey,
    RegisterVersion,
    Rollback,
    SetTraffic,
    Tenant,
    Tenants,
    TenantSpec,
    Upload,
    Version,
)

CONNECT_SECONDS = 5.0
CALL_SECONDS = 30.0
UPLOAD_CHUNK = 1 << 20
_HOW_TO_REACH = "does `loraplane up` run here, or for Kubernetes `kubectl port-forward svc/loraplane-registry 8001`?"
_WHERE_THE_KEY_IS = "`loraplane up` writes it to .loraplane/env; on Kubernetes it is admin.key of Secret loraplane-keys"

T = TypeVar("T")


class AdminClient:
    """Calls raise the LoraplaneError that the registry answered with, or NotRunning when nobody answers."""

    def __init__(self, url: str, key: str, transport: httpx.BaseTransport | None = None) -> None:
        self._url = url
        self._client = httpx.Client(
            base_url=url,
            headers={"authorization": f"Bearer {key}"},
            timeout=httpx.Timeout(CALL_SECONDS, connect=CONNECT_SECONDS),
            transport=transport,
            trust_env=False,
        )

    def close(self) -> None:
        self._client.close()

    def tenants(self) -> list[Tenant]:
        return self._call("GET", "/admin/tenants", Tenants).tenants

    def put_tenant(self, spec: TenantSpec) -> Tenant:
        """Create it, or bring an existing one to these namespaces."""
        return self._call("POST", "/admin/tenants", Tenant, spec)

    def delete_tenant(self, tenant: str) -> None:
        self._send("DELETE", f"/admin/tenants/{tenant}")

    def keys(self, tenant: str) -> list[Key]:
        return self._call("GET", f"/admin/tenants/{tenant}/keys", Keys).keys

    def create_key(self, tenant: str, spec: KeySpec) -> NewKey:
        return self._call("POST", f"/admin/tenants/{tenant}/keys", NewKey, spec)

    def revoke_key(self, tenant: str, key: str) -> None:
        self._send("DELETE", f"/admin/tenants/{tenant}/keys/{key}")

    def adapters(self, tenant: str) -> list[Adapter]:
        return self._call("GET", f"/admin/tenants/{tenant}/adapters", AdapterList).adapters

    def adapter(self, tenant: str, adapter: str) -> Adapter:
        return self._call("GET", f"/admin/tenants/{tenant}/adapters/{adapter}", Adapter)

    def register(self, tenant: str, adapter: str, spec: RegisterVersion, wait: float) -> Version:
        path = f"/admin/tenants/{tenant}/adapters/{adapter}/versions"
        return self._call("POST", path, Version, spec, wait=wait)

    def verify(self, tenant: str, adapter: str, version: int, wait: float) -> Version:
        path = f"/admin/tenants/{tenant}/adapters/{adapter}/versions/{version}/verify"
        return self._call("POST", path, Version, wait=wait)

    def delete_version(self, tenant: str, adapter: str, version: int) -> None:
        self._send("DELETE", f"/admin/tenants/{tenant}/adapters/{adapter}/versions/{version}")

    def activate(self, tenant: str, adapter: str, spec: Activate) -> Adapter:
        path = f"/admin/tenants/{tenant}/adapters/{adapter}/activate"
        return self._call("POST", path, Adapter, spec, patience=spec.deadline_s if spec.wait else 0)

    def rollback(self, tenant: str, adapter: str, spec: Rollback) -> Adapter:
        path = f"/admin/tenants/{tenant}/adapters/{adapter}/rollback"
        return self._call("POST", path, Adapter, spec, patience=spec.deadline_s if spec.wait else 0)

    def set_traffic(self, tenant: str, adapter: str, spec: SetTraffic) -> Adapter:
        return self._call("POST", f"/admin/tenants/{tenant}/adapters/{adapter}/traffic", Adapter, spec)

    def begin_upload(self, tenant: str) -> Upload:
        return self._call("POST", f"/admin/tenants/{tenant}/uploads", Upload)

    def upload_part(self, tenant: str, upload: str, name: str, offset: int, part: bytes) -> Upload:
        path = f"/admin/tenants/{tenant}/uploads/{upload}/files/{name}"
        answer = self._send("PUT", path, content=part, headers={"upload-offset": str(offset)})
        return wire.decode(answer.content, Upload)

    def _call(
        self,
        method: str,
        path: str,
        kind: type[T],
        body: object = None,
        *,
        wait: float | None = None,
        patience: float = 0,
    ) -> T:
        content = msgspec.json.encode(body) if body is not None else None
        headers = {"content-type": "application/json"}
        answer = self._send(method, path, content=content, wait=wait, patience=patience, headers=headers)
        return wire.decode(answer.content, kind)

    def _send(
        self,
        method: str,
        path: str,
        *,
        content: bytes | None = None,
        headers: dict[str, str] | None = None,
        wait: float | None = None,
        patience: float = 0,
    ) -> httpx.Response:
        """`wait` is asked of the registry by the query; `patience` is how long the body asks it to take."""
        try:
            answer = self._client.request(
                method,
                path,
                content=content,
                headers=headers,
                params={"wait": f"{wait:g}"} if wait else None,
                timeout=httpx.Timeout(CALL_SECONDS + (wait or patience), connect=CONNECT_SECONDS),
            )
        except httpx.HTTPError as error:
            told = str(error) or type(error).__name__
            raise NotRunning(f"nothing answers on {self._url}: {told}; {_HOW_TO_REACH}") from error
        if answer.status_code == httpx.codes.UNAUTHORIZED:
            raise Unauthenticated(f"{self._url} does not take the key in {ADMIN_KEY}; {_WHERE_THE_KEY_IS}")
        if answer.is_error:
            raise from_wire(answer.status_code, _json(answer))
        return answer


def upload_folder(client: AdminClient, tenant: str, folder: Path) -> Iterator[tuple[str, int, int]]:
    """Upload an adapter's two files; yields (file name, bytes done, bytes in all), at last ("upload:ID", …)."""
    files = [folder / "adapter_config.json", folder / "adapter_model.safetensors"]
    missing = [path.name for path in files if not path.is_file()]
    if missing:
        raise InvalidRequest(f"{folder} lacks {', '.join(missing)}")
    upload = client.begin_upload(tenant)
    total, done = sum(path.stat().st_size for path in files), 0
    for path in files:
        with path.open("rb") as stream:
            offset = 0
            while part := stream.read(UPLOAD_CHUNK):
                client.upload_part(tenant, upload.id, path.name, offset, part)
                offset += len(part)
                done += len(part)
                yield path.name, done, total
    yield f"upload:{upload.id}", done, total


def _json(answer: httpx.Response) -> object:
    with contextlib.suppress(ValueError):
        return answer.json()
    return None
