"""The kinds that are watched, and their API paths."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from loraplane_core.labels import ADAPTER_KIND, GROUP, LABEL_POOL, POOL_KIND, VERSION
from loraplane_operator.actions import ObjectRef


class Kind(NamedTuple):
    name: str
    group: str  # "" is the core group
    version: str
    plural: str
    selector: str = ""  # only objects with this label are of interest

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version

    def path(self, namespace: str, name: str = "") -> str:
        root = f"/apis/{self.api_version}" if self.group else f"/api/{self.version}"
        return f"{root}/namespaces/{namespace}/{self.plural}" + (f"/{name}" if name else "")


POOL = Kind(POOL_KIND, GROUP, VERSION, "basemodelpools")
ADAPTER = Kind(ADAPTER_KIND, GROUP, VERSION, "loraadapters")
STATEFUL_SET = Kind("StatefulSet", "apps", "v1", "statefulsets", LABEL_POOL)
POD = Kind("Pod", "", "v1", "pods", LABEL_POOL)
SERVICE = Kind("Service", "", "v1", "services", LABEL_POOL)
KINDS = {kind.name: kind for kind in (POOL, ADAPTER, STATEFUL_SET, POD, SERVICE)}


def ref_of(kind: str, raw: Mapping[str, Any]) -> ObjectRef:
    return ObjectRef(kind, raw["metadata"].get("namespace", "default"), raw["metadata"]["name"])
