"""The local cluster's objects: one JSON file each, as `loraplane get` shows them.

It plays the API server's part: uid, generation, creation and deletion times, finalizers, status apart
from spec. Files are replaced atomically and only when something changed.
"""

import json
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from loraplane_core.errors import InvalidParameter
from loraplane_core.files import write_atomic
from loraplane_core.identity import PoolRef
from loraplane_core.labels import FINALIZER, GROUP
from loraplane_core.resources.adapter import LoRAAdapter
from loraplane_core.resources.documents import check_update, parse_document
from loraplane_core.resources.pool import BaseModelPool
from loraplane_operator.actions import ObjectRef
from loraplane_operator.cluster.folder import Document, Problem, Scan
from loraplane_operator.objects import adapter_object, pool_object
from loraplane_operator.plan.conditions import rfc3339
from loraplane_operator.words import AdapterObject, PoolObject

#: Which file of the folder an object came from.
ANNOTATION_SOURCE = f"{GROUP}/source-file"


class Store:
    def __init__(self, root: Path, clock: Callable[[], float] = time.time) -> None:
        self._root = root
        self._clock = clock
        self._objects: dict[ObjectRef, dict[str, Any]] = {}
        self._views: dict[ObjectRef, PoolObject | AdapterObject] = {}
        self._load()

    def merge(self, scan: Scan) -> tuple[bool, list[Problem]]:
        """Make the objects follow a scan; returns whether anything changed, and edits that were refused."""
        changed, problems = False, list[Problem]()
        for ref, document in scan.documents.items():
            known = self._objects.get(ref)
            if known is None:
                self._put(ref, self._created(ref, document))
                changed = True
            elif "deletionTimestamp" not in known["metadata"]:
                try:
                    changed |= self._edit(ref, known, document)
                except InvalidParameter as error:
                    problems.append(Problem(document.path, f"{ref}: {error.message}; the old spec stays in force"))
        for ref in [ref for ref in self._objects if ref not in scan.documents and scan.complete]:
            changed |= self._remove(ref, scan)
        return changed, problems

    def pools(self) -> dict[PoolRef, PoolObject]:
        return {each.ref: each for _, each in sorted(self._views.items()) if isinstance(each, PoolObject)}

    def adapters(self) -> tuple[AdapterObject, ...]:
        return tuple(each for _, each in sorted(self._views.items()) if isinstance(each, AdapterObject))

    def set_status(self, ref: ObjectRef, uid: str, status: Mapping[str, Any]) -> bool:
        known = self._known(ref, uid)
        if known is None or known["status"] == status:
            return False
        self._put(ref, {**known, "status": dict(status)})
        return True

    def set_finalizer(self, ref: ObjectRef, uid: str, present: bool) -> bool:
        """The object goes with its last finalizer once it is being deleted."""
        known = self._known(ref, uid)
        if known is None:
            return False
        finalizers = [name for name in known["metadata"]["finalizers"] if name != FINALIZER]
        finalizers += [FINALIZER] if present else []
        if finalizers == known["metadata"]["finalizers"]:
            return False
        metadata = {**known["metadata"], "finalizers": finalizers}
        if not finalizers and "deletionTimestamp" in metadata:
            self._drop(ref)
        else:
            self._put(ref, {**known, "metadata": metadata})
        return True

    # -- as the API server would

    def _created(self, ref: ObjectRef, document: Document) -> dict[str, Any]:
        metadata = {
            "name": ref.name,
            "namespace": ref.namespace,
            "uid": str(uuid.uuid4()),
            "generation": 1,
            "creationTimestamp": rfc3339(self._clock()),
            "finalizers": [],
            **_labels(document),
        }
        resource = document.resource
        return {
            "apiVersion": resource.api_version,
            "kind": ref.kind,
            "metadata": metadata,
            "spec": resource.spec.to_wire(),
            "status": {},
        }

    def _edit(self, ref: ObjectRef, known: dict[str, Any], document: Document) -> bool:
        """Raises InvalidParameter when an immutable field changed."""
        spec, labels = document.resource.spec.to_wire(), _labels(document)
        metadata = {**known["metadata"], **labels}
        if spec == known["spec"] and metadata == known["metadata"]:
            return False
        if spec != known["spec"]:
            check_update(self._parsed(known), document.resource)
            metadata["generation"] += 1
        self._put(ref, {**known, "metadata": metadata, "spec": spec})
        return True

    def _remove(self, ref: ObjectRef, scan: Scan) -> bool:
        known = self._objects[ref]
        metadata = known["metadata"]
        if "deletionTimestamp" in metadata or metadata["annotations"].get(ANNOTATION_SOURCE) in scan.held:
            return False
        if not metadata["finalizers"]:
            self._drop(ref)
        else:
            deleted = {**metadata, "deletionTimestamp": rfc3339(self._clock())}
            self._put(ref, {**known, "metadata": deleted})
        return True

    # -- files

    def _load(self) -> None:
        """Raises ValueError for a file that is not ours to guess about."""
        for path in sorted(self._root.glob("*/*/*.json")):
            try:
                raw = json.loads(path.read_text())
                self._keep(raw)
            except (ValueError, KeyError, InvalidParameter) as error:
                raise ValueError(f"{path} is not an object of this release: {error}") from error

    def _parsed(self, raw: dict[str, Any]) -> BaseModelPool | LoRAAdapter:
        resource = parse_document({**raw, "status": None}, where="stored object")
        if not isinstance(resource, BaseModelPool | LoRAAdapter):
            raise InvalidParameter("a Tenant is no stored object")
        return resource

    def _known(self, ref: ObjectRef, uid: str) -> dict[str, Any] | None:
        known = self._objects.get(ref)
        return known if known is not None and known["metadata"]["uid"] == uid else None

    def _put(self, ref: ObjectRef, raw: dict[str, Any]) -> None:
        replace_file(self._path(ref), json.dumps(raw, indent=2) + "\n")
        self._keep(raw)

    def _keep(self, raw: dict[str, Any]) -> None:
        ref = ObjectRef(raw["kind"], raw["metadata"]["namespace"], raw["metadata"]["name"])
        resource = self._parsed(raw)
        if isinstance(resource, BaseModelPool):
            self._views[ref] = pool_object(resource, raw["status"])
        else:
            self._views[ref] = adapter_object(resource, raw["status"])
        self._objects[ref] = raw

    def _drop(self, ref: ObjectRef) -> None:
        self._path(ref).unlink(missing_ok=True)
        del self._objects[ref], self._views[ref]

    def _path(self, ref: ObjectRef) -> Path:
        return self._root / ref.kind.lower() / ref.namespace / f"{ref.name}.json"


def _labels(document: Document) -> dict[str, dict[str, str]]:
    metadata = document.resource.metadata
    annotations = {**metadata.annotations, ANNOTATION_SOURCE: document.path}
    return {"labels": dict(metadata.labels), "annotations": annotations}


def replace_file(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, text, 0o644)
