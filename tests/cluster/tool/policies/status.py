"""What the enforcer goes by, and whether that is what the API server holds now."""

import json
from collections.abc import Iterable
from pathlib import Path

from tests.cluster.kube import Kube
from tests.cluster.tool.policies.rules import Object

COLLECTIONS = {
    "policies": "/apis/networking.k8s.io/v1/networkpolicies",
    "pods": "/api/v1/pods",
    "namespaces": "/api/v1/namespaces",
}


def versions(objects: Iterable[Object]) -> dict[str, str]:
    """resourceVersion by namespace/name."""
    found = [each["metadata"] for each in objects]
    return {f"{each.get('namespace', '')}/{each['name']}": each["resourceVersion"] for each in found}


def in_force(kube: Kube, status: Path) -> bool:
    """Every policy, pod and namespace as it is now is in the rules; for connections made from now on."""
    if not status.exists():
        return False
    judged = json.loads(status.read_text())
    return all(judged[name] == versions(kube.items(path)) for name, path in COLLECTIONS.items())


def write(status: Path, objects: dict[str, list[Object]]) -> None:
    unfinished = status.with_name(f".{status.name}")
    unfinished.write_text(json.dumps({name: versions(found) for name, found in objects.items()}))
    unfinished.replace(status)
