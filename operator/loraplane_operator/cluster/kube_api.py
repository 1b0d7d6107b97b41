"""The Kubernetes API by path and plain objects, over kubernetes.aio. The only module that imports it.

The typed API classes are passed by on purpose: manifests are plain objects here, and a round trip
through generated models would drop fields that they do not know.
"""

from collections.abc import Mapping
from typing import Any
from urllib.parse import urlencode

import aiohttp
import msgspec
from kubernetes.aio import client, config

from loraplane_core.errors import Conflict, Forbidden, InvalidRequest, LoraplaneError, NotFound, Unavailable
from loraplane_core.labels import FIELD_MANAGER
from loraplane_operator import metrics

CALL_SECONDS = 10.0
PAGE = "500"
MERGE_PATCH = "application/merge-patch+json"
APPLY_PATCH = "application/apply-patch+yaml"
JSON_PATCH = "application/json-patch+json"


class Expired(InvalidRequest):
    """410: the state that was asked for is forgotten."""


class KubeApi:
    """Owns the connection pool; close it."""

    def __init__(self, configuration: client.Configuration) -> None:
        self._client = client.ApiClient(configuration)

    @classmethod
    async def connect(cls) -> "KubeApi":
        """With the pod's service account, or the kubeconfig of whoever starts it."""
        configuration = client.Configuration()
        configuration.client_session_kwargs = {"trust_env": False}  # as kopf: not by way of anybody's proxy
        await config.load_config(client_configuration=configuration)
        return cls(configuration)

    async def close(self) -> None:
        await self._client.close()

    async def get(self, path: str) -> dict[str, Any]:
        return await self._request("GET", path)

    async def list_items(self, path: str, **query: str) -> tuple[list[dict[str, Any]], str]:
        """All items, page by page, and the resourceVersion whose state they show."""
        try:
            return await self._pages(path, query)
        except Expired:  # the pages took so long that the state they show was forgotten
            return await self._pages(path, query)

    async def _pages(self, path: str, query: Mapping[str, str]) -> tuple[list[dict[str, Any]], str]:
        items: list[dict[str, Any]] = []
        token = ""
        while True:
            page = await self._request("GET", path, query={**query, "limit": PAGE, "continue": token})
            items += page.get("items") or []
            metadata = page.get("metadata") or {}
            token = metadata.get("continue") or ""
            if not token:
                return items, metadata.get("resourceVersion") or ""

    async def merge(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        return await self._request("PATCH", path, body, query={"fieldManager": FIELD_MANAGER}, content_type=MERGE_PATCH)

    async def change(self, path: str, *operations: Mapping[str, Any]) -> dict[str, Any]:
        """A JSON Patch, all or nothing. Raises Conflict when a `test` in it fails, or the patch cannot be made."""
        query = {"fieldManager": FIELD_MANAGER}
        try:
            return await self._request("PATCH", path, list(operations), query=query, content_type=JSON_PATCH)
        except InvalidRequest as error:
            raise Conflict(error.message) from error

    async def apply(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Server-side apply; this operator is the one owner of the fields it sets."""
        query = {"fieldManager": FIELD_MANAGER, "force": "true"}
        return await self._request("PATCH", path, body, query=query, content_type=APPLY_PATCH)

    async def create(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        return await self._request("POST", path, body)

    async def delete(self, path: str, uid: str = "") -> None:
        """What is not there is deleted. Raises Conflict when a `uid` is given and another object has the name."""
        try:
            await self._request("DELETE", path, {"preconditions": {"uid": uid}} if uid else None)
        except NotFound:
            return

    async def _request(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | list[Mapping[str, Any]] | None = None,
        *,
        query: Mapping[str, str] | None = None,
        content_type: str = "application/json",
    ) -> dict[str, Any]:
        asked = urlencode({name: value for name, value in (query or {}).items() if value})
        headers = {"Accept": "application/json", "Content-Type": content_type}
        serialized = await self._client.param_serialize(
            method,
            f"{path}?{asked}" if asked else path,
            header_params=headers,
            body=dict(body) if isinstance(body, Mapping) else body,
            auth_settings=["BearerToken"],
        )
        code = 0
        try:
            answer = await self._client.call_api(*serialized, _request_timeout=CALL_SECONDS)
            await answer.read()
            code = answer.status
        except TimeoutError as error:
            raise Unavailable("the API server did not answer in time", code="cluster_unavailable") from error
        except (aiohttp.ClientError, client.ApiException, OSError) as error:
            raise Unavailable(f"the API server: {error}", code="cluster_unavailable") from error
        finally:
            metrics.API_REQUESTS.labels(method, _resource(path), str(code)).inc()
        return _read(answer.status, answer.data)


def _resource(path: str) -> str:
    """The plural, and the subresource where one is meant, of a namespaced path."""
    plural, _, below = path.partition("/namespaces/")[2].partition("/")[2].partition("/")
    subresource = below.partition("/")[2]
    return f"{plural}/{subresource}" if subresource else plural


def _read(status: int, data: bytes) -> dict[str, Any]:
    try:
        body = msgspec.json.decode(data)
    except msgspec.DecodeError:
        body = None
        if status == 404:  # in plain text: of a path that it does not serve, not of an object
            told = "the API server serves no such resource; are the CRDs there (charts/loraplane/crds)?"
            raise NotFound(told) from None
    if status >= 400 or not isinstance(body, dict):
        raise _refusal(status, str(body.get("message", "")) if isinstance(body, dict) else "")
    return body


def _refusal(status: int, message: str) -> LoraplaneError:
    kinds: dict[int, type[LoraplaneError]] = {403: Forbidden, 404: NotFound, 409: Conflict, 410: Expired}
    kind = kinds.get(status, InvalidRequest if 400 <= status < 500 and status != 429 else Unavailable)
    code = "cluster_unavailable" if kind is Unavailable else None
    return kind(f"the API server answered {status}: {message or 'no message'}", code=code)
