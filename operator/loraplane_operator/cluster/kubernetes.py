"""The Cluster port on Kubernetes. Objects and pods come by lists and by kopf's watch (`seen`); writes are
server-side applies under one field manager. kopf keeps nothing in the objects: finalizer and status are ours.
"""

import asyncio
import contextlib
import logging
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

from loraplane_core.errors import Conflict, Forbidden, InvalidParameter, LoraplaneError, NotFound, Unavailable
from loraplane_core.identity import PoolRef, ReplicaId
from loraplane_core.labels import ADAPTER_KIND, API_VERSION, FINALIZER, LABEL_POOL, POOL_KIND
from loraplane_core.resources import uris
from loraplane_core.resources.adapter import LoRAAdapter
from loraplane_core.resources.documents import parse_document
from loraplane_core.resources.pool import BaseModelPool
from loraplane_core.resources.reasons import Reason
from loraplane_core.wire.supervisor import EngineCredentials
from loraplane_operator.actions import Note, ObjectRef, WorkloadSpec
from loraplane_operator.backoff import Backoff
from loraplane_operator.cluster import manifests, pods
from loraplane_operator.cluster.cache import Cache, Entry
from loraplane_operator.cluster.kinds import ADAPTER, KINDS, POD, POOL, SERVICE, STATEFUL_SET, ref_of
from loraplane_operator.cluster.kube_api import KubeApi
from loraplane_operator.cluster.ownership import owned_status
from loraplane_operator.cluster.port import Observation
from loraplane_operator.cluster.recorder import Recorder
from loraplane_operator.objects import adapter_object, pool_object
from loraplane_operator.words import AdapterObject, BaseLocation, PoolObject

log = logging.getLogger(__name__)

#: Watches do the work; a full list now and then finds what they may have missed.
RELIST_SECONDS = 60.0
#: The manifests that are not watched (Secret, budget) are applied again this often.
REAPPLY_SECONDS = 300.0
#: One that starts is refused what it may by an API server that has just started. Whoever is refused for longer has
#: lost a namespace, to its deletion for example, which must not hold up the others.
REFUSED_SECONDS = 10.0
#: Doubts come in bursts, one per object of a list.
_GATHER_SECONDS = 0.5
_RETRY_LIST = Backoff(first=0.25, cap=2.0)
_RETRY_CONFLICT = Backoff(first=0.05, cap=1.0)
_CONFLICT_ATTEMPTS = 8


class KubernetesCluster:
    """Honours adapters in `namespaces` only, and pools in `pool_namespaces` of these; None: in all of these."""

    def __init__(
        self,
        api: KubeApi,
        *,
        namespaces: Iterable[str],
        pool_namespaces: Iterable[str] | None = None,
        site: manifests.Site,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._api = api
        self._namespaces = tuple(sorted(set(namespaces)))
        self._pool_namespaces = None if pool_namespaces is None else frozenset(pool_namespaces)
        self._site = site
        site_revision = manifests.site_revision(site)
        self._cache = Cache(
            {
                POOL.name: _pool,
                ADAPTER.name: _adapter,
                STATEFUL_SET.name: pods.set_view,
                POD.name: lambda raw: pods.pod_view(raw, site_revision),
                SERVICE.name: manifests.service_view,
            }
        )
        self._recorder = Recorder(api, clock)
        self._applied: dict[PoolRef, WorkloadSpec] = {}
        self._applying: defaultdict[PoolRef, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._doubt = asyncio.Event()
        self._complete = False
        self._refused: dict[str, float] = {}  # namespaces that may not be read, since when
        self._suspects: set[PoolRef] = set()  # whose manifests others may have changed since they were applied
        self._wake: Callable[[], None] = lambda: None
        self._returned: Callable[[], None] = lambda: None

    def subscribe(self, wake: Callable[[], None], returned: Callable[[], None] = lambda: None) -> None:
        self._wake, self._returned = wake, returned

    async def run(self) -> None:
        failures, reapply_at = 0, time.monotonic() + REAPPLY_SECONDS
        while True:
            self._doubt.clear()
            try:
                await self.relist()
                if failures:
                    self._returned()
                failures = 0
                if time.monotonic() >= reapply_at:
                    reapply_at = time.monotonic() + REAPPLY_SECONDS
                    self._suspect(*self._applied)
            except LoraplaneError as error:
                failures += 1
                log.warning("the cluster could not be read", extra={"error": error.message})
            if failures:
                await asyncio.sleep(_RETRY_LIST.delay(failures))
                continue
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(RELIST_SECONDS):
                    await self._doubt.wait()
            await asyncio.sleep(_GATHER_SECONDS)

    async def relist(self) -> None:
        """What was seen of a namespace stays when it may not be read any more. Raises Forbidden when none may."""
        changed, refused = not self._complete, dict[str, Forbidden]()
        for kind in KINDS.values():
            query = {"labelSelector": kind.selector} if kind.selector else {}
            for namespace in self._namespaces:
                if namespace in refused:
                    continue
                try:
                    items, version = await self._api.list_items(kind.path(namespace), **query)
                except Forbidden as error:
                    refused[namespace] = error
                    continue
                changed |= self._cache.replace(kind.name, namespace, items, version)
        changed |= self._refuse(refused)
        self._complete = True
        if changed:
            self._wake()
        for pool in self._applied:
            self._check_service(pool)

    def _refuse(self, refused: Mapping[str, Forbidden]) -> bool:
        """Whether there is news of what may be read."""
        before, now = self._refused, time.monotonic()
        self._refused = {namespace: before.get(namespace, now) for namespace in refused}
        for namespace, error in refused.items():
            waiting = not self._complete and now - self._refused[namespace] < REFUSED_SECONDS
            if waiting or len(refused) == len(self._namespaces):
                raise error
            if namespace not in before:
                log.warning("a namespace may not be read", extra={"namespace": namespace, "error": error.message})
        return self._refused.keys() != before.keys()

    def seen(self, kind: str, raw: Mapping[str, Any], deleted: bool, listed: bool = False) -> None:
        """One watch event, as kopf delivers it. `listed`: it began anew with a list, which tells no deletions."""
        ref = ref_of(kind, raw)
        if ref.namespace not in self._namespaces:
            return
        if listed:
            self._doubt.set()
        uid = raw["metadata"].get("uid", "")
        known = self._cache.get(ref)
        if self._cache.drop(ref, uid) if deleted else self._cache.put(kind, dict(raw)):
            self._wake()
        if kind == SERVICE.name:
            self._check_service(PoolRef(ref.namespace, ref.name))
        elif kind == POD.name and not (deleted or listed) and (known is None or known.uid != uid):
            pool = (raw["metadata"].get("labels") or {}).get(LABEL_POOL, "")
            self._suspect(PoolRef(ref.namespace, pool))  # it cannot start without its Secret

    async def observe(self) -> Observation | None:
        if not self._complete:
            return None
        pools: dict[PoolRef, PoolObject] = {pool.ref: pool for pool in self._cache.views(POOL.name)}
        return Observation(
            pools=pools,
            adapters=tuple(self._cache.views(ADAPTER.name)),
            bases={ref: locate_base(pool) for ref, pool in pools.items()},
            workloads=pods.workloads(self._cache.views(STATEFUL_SET.name), self._cache.views(POD.name)),
            unreadable=self._cache.unreadable(POOL.name, ADAPTER.name),
            # What nobody can read is no orphan.
            namespaces=frozenset(self._namespaces) - self._refused.keys(),
            suspects=frozenset(self._suspects),
            pool_namespaces=self._pool_namespaces,
        )

    async def apply(self, spec: WorkloadSpec, credentials: EngineCredentials) -> None:
        async with self._applying[spec.pool]:
            self._suspects.discard(spec.pool)
            try:
                await self._apply(spec, credentials)
            except LoraplaneError:
                self._suspects.add(spec.pool)
                raise
            self._applied[spec.pool] = spec

    async def restart(self, pool: PoolRef, ordinal: int) -> None:
        """Deletes the pod that was seen: whatever has taken its name meanwhile is what was wanted."""
        ref = ObjectRef(POD.name, pool.namespace, ReplicaId(*pool, ordinal).pod)
        known, wished = self._cache.get(ref), self._applied.get(pool)
        if known is None or not isinstance(known.view, pods.PodView):
            return
        if wished is not None and known.view.replica.revision == wished.revision:
            return
        with contextlib.suppress(Conflict):
            await self._call(self._api.delete(_path(ref), uid=known.uid))

    async def delete(self, pool: PoolRef) -> None:
        """The other manifests are owned by the pool and go with it."""
        async with self._applying[pool]:
            self._applied.pop(pool, None)
            self._suspects.discard(pool)
            known = self._cache.get(ObjectRef(STATEFUL_SET.name, *pool))
            if known is not None and known.view is not None:  # else it is gone, or another's of that name
                with contextlib.suppress(Conflict):
                    await self._call(self._api.delete(STATEFUL_SET.path(*pool), uid=known.uid))
        self._applying.pop(pool, None)

    async def patch_status(self, ref: ObjectRef, uid: str, status: Mapping[str, Any]) -> None:
        """Applied, so that conditions of other managers stay and fields that we leave out go."""
        metadata = {"name": ref.name, "namespace": ref.namespace, "uid": uid}
        body = {"apiVersion": API_VERSION, "kind": ref.kind, "metadata": metadata, "status": dict(status)}
        path = _path(ref) + "/status"
        await self._write(ref, uid, lambda _: self._api.apply(path, body))

    async def set_finalizer(self, ref: ObjectRef, uid: str, present: bool) -> None:
        """A compare-and-set of the finalizers alone: those of others are never lost, and however often others
        write the rest of the object, it does not wait for a quiet moment.

        Not applied: an object that was restored with our finalizer in it would keep it for ever.
        """

        async def write(known: Entry) -> dict[str, Any] | None:
            finalizers = [name for name in known.finalizers if name != FINALIZER]
            finalizers += [FINALIZER] if present else []
            if finalizers == list(known.finalizers):
                return None
            return await self._api.change(_path(ref), *_replace_finalizers(known, finalizers))

        await self._write(ref, uid, write)

    async def emit(self, note: Note) -> None:
        await self._recorder.add(note)

    # -- inside

    async def _write(
        self, ref: ObjectRef, uid: str, write: Callable[[Entry], Awaitable[dict[str, Any] | None]]
    ) -> None:
        """Keep the answer, so that the next pass sees what was written before the watch tells it.

        On a conflict the object is read again; nothing is written once it is another one of that name.
        """
        refusal: Conflict | None = None
        for attempt in range(_CONFLICT_ATTEMPTS):
            if attempt:
                await asyncio.sleep(_RETRY_CONFLICT.delay(attempt))
                await self._reread(ref)
            known = self._cache.get(ref)
            if known is None or known.uid != uid:
                return
            try:
                fresh = await self._call(write(known))
            except NotFound:
                self._cache.drop(ref, uid)
                return
            except Conflict as error:
                refusal = error
                continue
            self._took(ref, uid, fresh)
            return
        if refusal is not None:
            raise refusal

    def _took(self, ref: ObjectRef, uid: str, fresh: dict[str, Any] | None) -> None:
        metadata = (fresh or {}).get("metadata") or {}
        if fresh is None or metadata.get("name") != ref.name:
            return
        if metadata.get("deletionTimestamp") and not metadata.get("finalizers"):
            self._cache.drop(ref, uid)
        else:
            self._cache.put(ref.kind, fresh)

    async def _reread(self, ref: ObjectRef) -> None:
        try:
            self._cache.put(ref.kind, await self._call(self._api.get(_path(ref))))
        except NotFound:
            known = self._cache.get(ref)
            if known is not None:
                self._cache.drop(ref, known.uid)

    async def _call(self, answer: Awaitable[Any]) -> Any:
        """When the API server was away, the watch may have missed something, too."""
        try:
            return await answer
        except Unavailable:
            self._doubt.set()
            raise

    async def _apply(self, spec: WorkloadSpec, credentials: EngineCredentials) -> None:
        """Raises Conflict (name_taken), before anything is written, when somebody else's object has a name of its."""
        wanted = manifests.workload_manifests(spec, credentials, self._site)
        for path, manifest in wanted:
            await self._check_free(path, manifest["kind"], spec.pool)
        for path, manifest in wanted:
            answer = await self._call(self._api.apply(path, manifest))
            if manifest["kind"] in KINDS and (answer.get("metadata") or {}).get("name"):
                self._cache.put(manifest["kind"], answer)

    async def _check_free(self, path: str, kind: str, pool: PoolRef) -> None:
        """An apply would take the object over, and later take it along with the pool. Looked at by a patch that
        changes nothing, which needs no right to read: there is none for Secrets."""
        try:
            found = await self._call(self._api.merge(path, {}))
        except NotFound:
            return
        metadata = found.get("metadata") or {}
        if not manifests.may_take(metadata, pool.name):
            told = f"{kind} {metadata.get('name')} exists and is not pool {pool}'s; remove or rename one of them"
            raise Conflict(told, code="name_taken")

    def _suspect(self, *pools: PoolRef) -> None:
        fresh = {pool for pool in pools if pool in self._applied} - self._suspects
        if fresh:
            self._suspects |= fresh
            self._wake()

    def _check_service(self, pool: PoolRef) -> None:
        if pool not in self._applied or self._applying[pool].locked():
            return
        known = self._cache.get(ObjectRef(SERVICE.name, *pool))
        if known is None or known.view != manifests.wished_service(self._applied[pool]):
            self._suspect(pool)


def locate_base(pool: PoolObject) -> BaseLocation:
    """Inside the pod; whether it exists is told by the engine."""
    try:
        claim, path = uris.base_location(pool.base_uri)
    except ValueError as error:
        return BaseLocation(reason=Reason.BASE_NOT_FOUND, message=str(error))
    return BaseLocation(path=f"{manifests.MODELS_PATH if claim is None else f'{manifests.CLAIMS_PATH}/{claim}'}/{path}")


def _replace_finalizers(known: Entry, finalizers: list[str]) -> list[dict[str, Any]]:
    operations: list[dict[str, Any]] = [{"op": "test", "path": "/metadata/uid", "value": known.uid}]
    if known.finalizers or known.resource_version:  # an API server takes null for "is not there"; a fake one may not
        operations.append({"op": "test", "path": "/metadata/finalizers", "value": list(known.finalizers) or None})
    return [*operations, {"op": "add", "path": "/metadata/finalizers", "value": finalizers}]


def _path(ref: ObjectRef) -> str:
    return KINDS[ref.kind].path(ref.namespace, ref.name)


def _pool(raw: dict[str, Any]) -> PoolObject | None:
    resource = _parsed(raw, POOL_KIND)
    return pool_object(resource, owned_status(raw)) if isinstance(resource, BaseModelPool) else None


def _adapter(raw: dict[str, Any]) -> AdapterObject | None:
    resource = _parsed(raw, ADAPTER_KIND)
    return adapter_object(resource, owned_status(raw)) if isinstance(resource, LoRAAdapter) else None


def _parsed(raw: dict[str, Any], kind: str) -> object | None:
    """Objects of another release's schema are passed over with a log line; the API server checked the rest."""
    try:
        return parse_document({**raw, "kind": kind, "apiVersion": API_VERSION, "status": None}, where="object")
    except InvalidParameter as error:
        log.error("an object cannot be read", extra={"object": str(ref_of(kind, raw)), "error": error.message})
        return None
