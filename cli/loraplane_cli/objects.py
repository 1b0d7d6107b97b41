"""Objects with their status as the local operator stores them: `<state>/objects/<kind>/<namespace>/<name>.json`."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from loraplane_core.labels import ADAPTER_KIND, POOL_KIND

Object = dict[str, Any]
KINDS = {
    **dict.fromkeys(("pool", "pools", "bmp", "basemodelpool", "basemodelpools"), POOL_KIND),
    **dict.fromkeys(("adapter", "adapters", "lora", "loraadapter", "loraadapters"), ADAPTER_KIND),
}


def read_objects(root: Path, kind: str, namespace: str | None = None, name: str | None = None) -> Iterator[Object]:
    """Stored objects by kind, sorted by namespace and name. A file that goes while it is read is passed over."""
    pattern = f"{namespace or '*'}/{name or '*'}.json"
    for path in sorted((root / kind.lower()).glob(pattern)):
        with contextlib.suppress(FileNotFoundError, ValueError):
            if not path.name.startswith("."):
                yield json.loads(path.read_text())


def condition(found: Object, kind: str) -> dict[str, Any]:
    """The condition of that type; {} when it was not judged yet."""
    for candidate in (found.get("status") or {}).get("conditions") or []:
        if candidate.get("type") == kind:
            return dict(candidate)
    return {}


def reference(found: Object) -> tuple[str, str]:
    """Namespace and name."""
    meta = found.get("metadata") or {}
    return str(meta.get("namespace", "default")), str(meta.get("name", ""))


def adapter_row(found: Object) -> list[object]:
    """NAME TENANT BASE VERSION READY RESIDENT RANK REASON, and the creation time."""
    spec, status, ready = found.get("spec") or {}, found.get("status") or {}, condition(found, "Ready")
    return [
        reference(found)[1],
        spec.get("tenant"),
        status.get("baseModel"),
        status.get("activeVersion"),
        ready.get("status", "Unknown"),
        status.get("resident"),
        status.get("rank"),
        ready.get("reason", "Pending"),
        (found.get("metadata") or {}).get("creationTimestamp", ""),
    ]


def pool_row(found: Object) -> list[object]:
    """NAME BASE REPLICAS READY SLOTS ADAPTERS RESIDENT AVAILABLE REASON, and the creation time."""
    spec, status, available = found.get("spec") or {}, found.get("status") or {}, condition(found, "Available")
    counts = status.get("adapters") or {}
    return [
        reference(found)[1],
        (spec.get("baseModel") or {}).get("name"),
        spec.get("replicas", 1),
        status.get("readyReplicas", 0),
        (status.get("capacity") or {}).get("slots"),
        counts.get("registered", 0),
        counts.get("resident", 0),
        available.get("status", "Unknown"),
        available.get("reason", "Pending"),
        (found.get("metadata") or {}).get("creationTimestamp", ""),
    ]
