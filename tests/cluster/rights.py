"""CRDs and the operator's ServiceAccount with its Role, installed from what the repository ships."""

from pathlib import Path
from typing import Any

import yaml

from tests.cluster.kube import Kube
from tests.cluster.services import until

ROOT = Path(__file__).parents[2]
_OPERATOR = "loraplane-operator"
_RULES: list[dict[str, Any]] = [
    {"apiGroups": ["loraplane.dev"], "resources": ["*"], "verbs": ["*"]},
    {"apiGroups": ["apps"], "resources": ["statefulsets"], "verbs": ["*"]},
    {"apiGroups": [""], "resources": ["pods", "services", "secrets", "events"], "verbs": ["*"]},
    {"apiGroups": ["events.k8s.io"], "resources": ["events"], "verbs": ["*"]},
    {"apiGroups": ["policy"], "resources": ["poddisruptionbudgets"], "verbs": ["*"]},
]


def install(kube: Kube, namespace: str) -> None:
    for file in sorted((ROOT / "crds").glob("*.yaml")):
        body = yaml.safe_load(file.read_text())
        path = f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{body['metadata']['name']}"
        kube.apply(path, body)
        until(lambda path=path: _established(kube, path), 20, path)  # type: ignore[misc]
    base, rbac = f"/api/v1/namespaces/{namespace}", f"/apis/rbac.authorization.k8s.io/v1/namespaces/{namespace}"
    meta = {"name": _OPERATOR, "namespace": namespace}
    kube.apply(f"{base}/serviceaccounts/{_OPERATOR}", {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": meta})
    role = {"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "Role", "metadata": meta, "rules": _RULES}
    kube.apply(f"{rbac}/roles/{_OPERATOR}", role)
    binding = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "RoleBinding",
        "metadata": meta,
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": _OPERATOR},
        "subjects": [{"kind": "ServiceAccount", "name": _OPERATOR, "namespace": namespace}],
    }
    kube.apply(f"{rbac}/rolebindings/{_OPERATOR}", binding)


def _established(kube: Kube, path: str) -> bool:
    raw = kube.get(path) or {}
    conditions = (raw.get("status") or {}).get("conditions") or []
    return any(each["type"] == "Established" and each["status"] == "True" for each in conditions)
