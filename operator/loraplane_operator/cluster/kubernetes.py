"""The Cluster port on Kubernetes. Objects and pods come by LIST once and by kopf's watch from then on
(`seen`); writes are patches. kopf keeps nothing in the objects: the finalizer and the status are ours.
"""

import asyncio
import logging
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

from loraplane_core.errors import InvalidParameter, LoraplaneError, NotFound
from loraplane_core.identity import PoolRef, ReplicaId
from loraplane_core.labels import (
    ADAPTER_KIND,
    API_VERSION,
    FINALIZER,
    GROUP,
    LABEL_POOL,
    MANAGED_BY,
    POOL_KIND,
    VERSION,
)
from loraplane_core.resources import uris
from loraplane_core.resources.adapter import LoRAAdapter
from loraplane_core.resources.documents import parse_document
from loraplane_core.resources.pool import BaseModelPool
from loraplane_core.resources.reasons import Reason
from loraplane_core.wire.supervisor import EngineCredentials
from loraplane_operator.actions import Note, ObjectRef, WorkloadSpec
from loraplane_operator.backoff import Backoff
from loraplane_operator.cluster import manifests
from loraplane_operator.cluster.kube_api import KubeApi
from loraplane_operator.cluster.port import Observation
from loraplane_operator.objects import adapter_object, pool_object
from loraplane_operator.plan.conditions import rfc3339
from loraplane_operator.words import AdapterObject, BaseLocation, PoolObject, Replica

log = logging.getLogger(__name__)
T = TypeVar("T")

#: Watches do the work; a full list now and then finds what they may have missed.
RELIST_SECONDS = 300.0
_RETRY = Backoff(first=0.5, cap=10.0)


class Kind(NamedTuple):
    name: str
    root: str  # API path before /namespaces
    plural: str
    selector: str = ""

    def path(self, namespace: str, name: str = "") -> str:
        return f"{self.root}/namespaces/{namespace}/{self.plural}" + (f"/{name}" if name else "")


POOL = Kind(POOL_KIND, f"/apis/{API_VERSION}", "basemodelpools")
ADAPTER = Kind(ADAPTER_KIND, f"/apis/{API_VERSION}", "loraadapters")
STATEFUL_SET = Kind("StatefulSet", "/apis/apps/v1", "statefulsets", LABEL_POOL)
POD = Kind("Pod", "/api/v1", "pods", LABEL_POOL)
KINDS = {kind.name: kind for kind in (POOL, ADAPTER, STATEFUL_SET, POD)}
RESOURCES = {POOL_KIND: (GROUP, VERSION, POOL.plural), ADAPTER_KIND: (GROUP, VERSION, ADAPTER.plural)}


class KubernetesCluster:
    """Honours objects in `namespaces` only."""

    def __init__(
        self,
        api: KubeApi,
        *,
        namespaces: Iterable[str],
        site: manifests.Site,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._api = api
        self._namespaces = tuple(sorted(set(namespaces)))
        self._site = site
        self._clock = clock
        self._objects: dict[ObjectRef, dict[str, Any]] = {}
        self._complete = False
        self._wake: Callable[[], None] = lambda: None

    def subscribe(self, wake: Callable[[], None]) -> None:
        self._wake = wake

    async def run(self) -> None:
        failures = 0
        while True:
            try:
                await self.relist()
                failures = 0
            except LoraplaneError as error:
                failures += 1
                log.warning("the cluster could not be listed", extra={"error": error.message})
            await asyncio.sleep(_RETRY.delay(failures) if failures else RELIST_SECONDS)

    async def relist(self) -> None:
        fresh: dict[ObjectRef, dict[str, Any]] = {}
        for kind in KINDS.values():
            for namespace in self._namespaces:
                query = {"labelSelector": kind.selector} if kind.selector else {}
                for raw in await self._api.list(kind.path(namespace), **query):
                    fresh[_ref(kind.name, raw)] = raw
        self._objects = fresh
        self._complete = True
        self._wake()

    def seen(self, kind: str, raw: Mapping[str, Any], deleted: bool) -> None:
        """One watch event, as kopf delivers it."""
        ref = _ref(kind, raw)
        if ref.namespace not in self._namespaces:
            return
        if deleted:
            self._objects.pop(ref, None)
        else:
            self._objects[ref] = dict(raw)
        self._wake()

    async def observe(self) -> Observation | None:
        if not self._complete:
            return None
        pools = {pool.ref: pool for pool in self._parsed(POOL, _pool)}
        return Observation(
            pools=pools,
            adapters=tuple(self._parsed(ADAPTER, _adapter)),
            bases={ref: locate_base(pool) for ref, pool in pools.items()},
            workloads=self._workloads(),
            namespaces=frozenset(self._namespaces),
        )

    async def apply(self, spec: WorkloadSpec, credentials: EngineCredentials) -> None:
        for path, manifest in manifests.workload_manifests(spec, credentials, self._site):
            await self._api.apply(path, manifest)

    async def restart(self, pool: PoolRef, ordinal: int) -> None:
        await self._api.delete(POD.path(pool.namespace, ReplicaId(*pool, ordinal).pod))

    async def delete(self, pool: PoolRef) -> None:
        await self._api.delete(STATEFUL_SET.path(*pool))

    async def patch_status(self, ref: ObjectRef, uid: str, status: Mapping[str, Any]) -> None:
        known = self._known(ref, uid)
        if known is None:
            return
        # A merge patch keeps what it does not name; fields that went are named as null.
        gone = dict.fromkeys(known.get("status", {}).keys() - status.keys())
        body = {"metadata": {"uid": uid}, "status": {**gone, **status}}
        await self._patch(ref, KINDS[ref.kind].path(ref.namespace, ref.name) + "/status", body)

    async def set_finalizer(self, ref: ObjectRef, uid: str, present: bool) -> None:
        """The resourceVersion makes it a compare-and-set: finalizers of others are never lost."""
        known = self._known(ref, uid)
        if known is None:
            return
        metadata = known["metadata"]
        finalizers = [name for name in metadata.get("finalizers") or [] if name != FINALIZER]
        finalizers += [FINALIZER] if present else []
        if finalizers == (metadata.get("finalizers") or []):
            return
        expected = {"uid": uid}
        if "resourceVersion" in metadata:
            expected["resourceVersion"] = metadata["resourceVersion"]
        body = {"metadata": {**expected, "finalizers": finalizers}}
        await self._patch(ref, KINDS[ref.kind].path(ref.namespace, ref.name), body)

    async def emit(self, note: Note) -> None:
        moment = rfc3339(self._clock())
        ref = note.ref
        event = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": f"{ref.name}.{uuid.uuid4().hex[:16]}", "namespace": ref.namespace},
            "involvedObject": {
                "apiVersion": API_VERSION,
                "kind": ref.kind,
                "namespace": ref.namespace,
                "name": ref.name,
                "uid": note.uid,
            },
            "type": note.kind,
            "reason": str(note.reason),
            "message": note.message[:1024],
            "firstTimestamp": moment,
            "lastTimestamp": moment,
            "count": 1,
            "source": {"component": MANAGED_BY},
        }
        try:
            await self._api.create(f"/api/v1/namespaces/{ref.namespace}/events", event)
        except LoraplaneError as error:
            log.warning("an Event was not written", extra={"object": str(ref), "error": error.message})

    # -- inside

    async def _patch(self, ref: ObjectRef, path: str, body: Mapping[str, Any]) -> None:
        """Keep the answer, so that the next pass sees what was written before the watch tells it."""
        try:
            fresh = await self._api.merge(path, body)
        except NotFound:
            self._objects.pop(ref, None)
            return
        metadata = fresh.get("metadata") or {}
        if metadata.get("deletionTimestamp") and not metadata.get("finalizers"):
            self._objects.pop(ref, None)
        elif metadata.get("name") == ref.name:
            self._objects[ref] = fresh

    def _known(self, ref: ObjectRef, uid: str) -> dict[str, Any] | None:
        known = self._objects.get(ref)
        return known if known is not None and known["metadata"].get("uid", "") == uid else None

    def _parsed(self, kind: Kind, parse: Callable[[dict[str, Any]], T]) -> list[T]:
        """Objects of another release's schema are passed over with a log line; the API server checked the rest."""
        found = []
        for ref, raw in sorted(self._objects.items()):
            if ref.kind != kind.name:
                continue
            try:
                found.append(parse(raw))
            except InvalidParameter as error:
                log.error("an object cannot be read", extra={"object": str(ref), "error": error.message})
        return found

    def _workloads(self) -> dict[PoolRef, tuple[Replica, ...]]:
        pods = [raw for ref, raw in self._objects.items() if ref.kind == POD.name]
        found = {each.id: each for each in map(_replica, pods) if each is not None}
        sets = {ref: raw for ref, raw in self._objects.items() if ref.kind == STATEFUL_SET.name}
        return {PoolRef(ref.namespace, ref.name): _replicas(ref, raw, found) for ref, raw in sets.items()}


def _replicas(ref: ObjectRef, stateful_set: dict[str, Any], pods: Mapping[ReplicaId, Replica]) -> tuple[Replica, ...]:
    """One per wished replica, also where the pod is still to come; what is scaled away is no replica any more."""
    wished = int((stateful_set.get("spec") or {}).get("replicas", 0))
    ids = [ReplicaId(ref.namespace, ref.name, ordinal) for ordinal in range(wished)]
    return tuple(pods.get(id_) or Replica(id_, ready=False, running=False, revision="") for id_ in ids)


def locate_base(pool: PoolObject) -> BaseLocation:
    """Inside the pod; whether it exists is told by the engine."""
    claim, path = uris.base_location(pool.base_uri)
    if claim is not None:
        message = "a claim of the pool's own is not mounted yet; use file:PATH below the model root"
        return BaseLocation(reason=Reason.BASE_NOT_FOUND, message=message)
    return BaseLocation(path=f"{manifests.MODELS_PATH}/{path}")


def _ref(kind: str, raw: Mapping[str, Any]) -> ObjectRef:
    return ObjectRef(kind, raw["metadata"].get("namespace", "default"), raw["metadata"]["name"])


def _pool(raw: dict[str, Any]) -> PoolObject:
    resource = parse_document({**raw, "kind": POOL_KIND, "apiVersion": API_VERSION, "status": None}, where="object")
    if not isinstance(resource, BaseModelPool):
        raise InvalidParameter("not a pool")
    return pool_object(resource, raw.get("status") or {})


def _adapter(raw: dict[str, Any]) -> AdapterObject:
    resource = parse_document({**raw, "kind": ADAPTER_KIND, "apiVersion": API_VERSION, "status": None}, where="object")
    if not isinstance(resource, LoRAAdapter):
        raise InvalidParameter("not an adapter")
    return adapter_object(resource, raw.get("status") or {})


def _replica(pod: dict[str, Any]) -> Replica | None:
    metadata, status = pod["metadata"], pod.get("status") or {}
    pool = (metadata.get("labels") or {}).get(LABEL_POOL, "")
    ordinal = metadata["name"].removeprefix(f"{pool}-")
    if not ordinal.isdecimal():
        return None
    conditions = {each["type"]: each["status"] for each in status.get("conditions") or []}
    terminating = "deletionTimestamp" in metadata
    return Replica(
        id=ReplicaId(metadata["namespace"], pool, int(ordinal)),
        ready=conditions.get("Ready") == "True" and not terminating,
        running=status.get("phase") == "Running" and not terminating,
        revision=(metadata.get("annotations") or {}).get(manifests.ANNOTATION_REVISION, ""),
        address=status.get("podIP") or "",
        admin_port=manifests.PORTS["admin"],
        message=_trouble(status),
    )


def _trouble(status: Mapping[str, Any]) -> str:
    """Why a container waits, when that is not simply its start."""
    for each in status.get("containerStatuses") or []:
        waiting = (each.get("state") or {}).get("waiting") or {}
        if waiting.get("reason") not in (None, "ContainerCreating", "PodInitializing"):
            return f"{waiting['reason']}: {waiting.get('message', '')}"
    return ""
