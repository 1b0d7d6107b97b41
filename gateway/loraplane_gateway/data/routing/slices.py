"""Where engines are, from the Kubernetes API: EndpointSlices of pools, listed and watched. Knows nothing else of it."""

import asyncio
import logging
import ssl
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec

from loraplane_core.errors import InvalidName
from loraplane_core.labels import LABEL_POOL
from loraplane_core.wire.endpoints import Endpoint, from_slice
from loraplane_gateway.data.routing.endpoints import Endpoints

log = logging.getLogger(__name__)
_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
#: A watch asks again after this; the API server's bookmarks come every minute, so a longer silence is a lost one.
WATCH_SECONDS = 300
SILENT_SECONDS = 90.0
CALL_SECONDS = 10.0
_FIRST_RETRY, _LAST_RETRY = 0.2, 2.0
_PAGE = 500


@dataclass(frozen=True)
class ApiServer:
    url: str
    authority: Path  # its certificate's
    token: Path  # read again for each request: the kubelet renews it

    @classmethod
    def in_cluster(cls, environment: Mapping[str, str]) -> "ApiServer":
        """As a pod finds it. Raises ValueError outside of one."""
        host, port = environment.get("KUBERNETES_SERVICE_HOST"), environment.get("KUBERNETES_SERVICE_PORT")
        if not host or not port:
            raise ValueError("endpoints_namespaces needs a pod with a service account; elsewhere set endpoints_dir")
        return cls(f"https://{f'[{host}]' if ':' in host else host}:{port}", _ACCOUNT / "ca.crt", _ACCOUNT / "token")

    def client(self) -> httpx.AsyncClient:
        context = ssl.create_default_context(cafile=str(self.authority))
        return httpx.AsyncClient(base_url=self.url, verify=context, trust_env=False, timeout=CALL_SECONDS)

    def headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.token.read_text().strip()}"}


class Lost(Exception):
    """The view of a namespace has to begin anew, with a list."""


class EndpointSlices:
    """Calls `changed` with all endpoints whenever they differ from the last time; first once every namespace was
    listed, or the API server said that it may not be.

    While the API server is away, and in a namespace that may not be read, the last view holds: `/state` decides
    about life.
    """

    def __init__(
        self,
        client: httpx.AsyncClient,
        headers: Callable[[], Mapping[str, str]],
        namespaces: Sequence[str],
        changed: Callable[[Endpoints], None],
    ) -> None:
        self._client = client
        self._headers = headers
        self._changed = changed
        self._slices: dict[str, dict[str, list[Endpoint]]] = {namespace: {} for namespace in namespaces}
        self._unknown = set(namespaces)
        self._last: Endpoints | None = None

    async def watch(self) -> None:
        """Runs until cancelled."""
        async with asyncio.TaskGroup() as group:
            for namespace in self._slices:
                group.create_task(self._follow(namespace), name=f"endpoints-{namespace}")

    async def _follow(self, namespace: str) -> None:
        path = f"/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"
        delay = _FIRST_RETRY
        while True:
            try:
                version = await self._list(path, namespace)
                delay = _FIRST_RETRY
                while True:
                    version = await self._watch(path, namespace, version)
            except (httpx.HTTPError, Lost, OSError, msgspec.DecodeError) as error:
                log.warning("endpoints in %s are listed again: %s", namespace, error or type(error).__name__)
                if isinstance(error, httpx.HTTPStatusError):
                    self._unknown.discard(namespace)
                    self._tell()
            await asyncio.sleep(delay)
            delay = min(2 * delay, _LAST_RETRY)

    async def _list(self, path: str, namespace: str) -> str:
        """Replaces the namespace's view; the resourceVersion that it shows."""
        found: dict[str, list[Endpoint]] = {}
        query: dict[str, str | int] = {"labelSelector": LABEL_POOL, "limit": _PAGE}
        while True:
            answer = await self._client.get(path, params=query, headers=self._headers())
            answer.raise_for_status()
            page = msgspec.json.decode(answer.content)
            for raw in page.get("items") or []:
                self._put(namespace, found, raw)
            token = page["metadata"].get("continue")
            if not token:
                break
            query["continue"] = token
        self._slices[namespace] = found
        self._unknown.discard(namespace)
        self._tell()
        return str(page["metadata"]["resourceVersion"])

    async def _watch(self, path: str, namespace: str, version: str) -> str:
        """Until the server ends it; the resourceVersion to go on with. Raises Lost when there is none."""
        query: dict[str, str | int] = {
            "labelSelector": LABEL_POOL,
            "watch": 1,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": WATCH_SECONDS,
            "resourceVersion": version,
        }
        timeout = httpx.Timeout(CALL_SECONDS, read=SILENT_SECONDS)
        async with self._client.stream("GET", path, params=query, headers=self._headers(), timeout=timeout) as answer:
            answer.raise_for_status()
            async for line in answer.aiter_lines():
                if not line:
                    continue
                event = msgspec.json.decode(line)
                raw = event["object"]
                if event["type"] == "ERROR":
                    raise Lost(str(raw.get("message", "")))
                version = raw["metadata"]["resourceVersion"]
                if event["type"] == "DELETED":
                    self._slices[namespace].pop(raw["metadata"]["name"], None)
                elif event["type"] != "BOOKMARK":
                    self._put(namespace, self._slices[namespace], raw)
                self._tell()
        return version

    def _put(self, namespace: str, view: dict[str, list[Endpoint]], raw: dict[str, Any]) -> None:
        """A slice that cannot be read keeps its last good reading."""
        name = raw["metadata"]["name"]
        try:
            view[name] = from_slice({"kind": "EndpointSlice", **raw})
        except InvalidName as error:
            log.warning("EndpointSlice %s/%s: %s", namespace, name, error)
            view.setdefault(name, self._slices[namespace].get(name, []))

    def _tell(self) -> None:
        if self._unknown:
            return
        slices = [endpoints for view in self._slices.values() for _, endpoints in sorted(view.items())]
        found = {endpoint.replica: endpoint for endpoints in slices for endpoint in endpoints}
        if found != self._last:
            self._last = found
            self._changed(found)
