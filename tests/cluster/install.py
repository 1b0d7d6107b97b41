"""What an install puts into a cluster before the operator starts, from what the repository ships."""

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import yaml

from tests.cluster.kube import Kube, Refused
from tests.cluster.services import until

ROOT = Path(__file__).parents[2]
SERVICE_ACCOUNT = "loraplane-operator"
ESTABLISHED_SECONDS = 20.0


def install(kube: Kube, namespaces: list[str], release: str | None = None) -> None:
    """CRDs, the operator's ServiceAccount in `release` (by default the first namespace), its Role and
    RoleBinding in each of `namespaces`. Idempotent.
    """
    home = release or namespaces[0]
    install_crds(kube)
    for namespace in namespaces:
        for raw in manifests(namespace, home):
            kube.apply(_path(raw), raw)
        # The authorizer learns of a binding a moment later; an operator that is quicker would be refused.
        until(lambda namespace=namespace: _bound(kube, namespace, home), ESTABLISHED_SECONDS, namespace)  # type: ignore[misc]


def install_crds(kube: Kube) -> None:
    for raw in crds():
        path = f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{raw['metadata']['name']}"
        kube.apply(path, raw)
        until(lambda path=path: _established(kube, path), ESTABLISHED_SECONDS, path)  # type: ignore[misc]


@contextlib.contextmanager
def restricted_namespaces(kubeconfig: Path, names: Iterable[str]) -> Iterator[Kube]:
    """With the CRDs, and these namespaces, which enforce `restricted` and go at the end."""
    wanted = list(names)
    with contextlib.closing(Kube(kubeconfig)) as kube:
        install_crds(kube)
        try:
            for name in wanted:
                metadata = {"name": name, "labels": {"pod-security.kubernetes.io/enforce": "restricted"}}
                body = {"apiVersion": "v1", "kind": "Namespace", "metadata": metadata}
                kube.apply(f"/api/v1/namespaces/{name}", body)
            for name in wanted:
                account = f"/api/v1/namespaces/{name}/serviceaccounts/default"
                until(lambda account=account: kube.get(account), ESTABLISHED_SECONDS, account)  # type: ignore[misc]
            yield kube
        finally:
            for name in wanted:
                with contextlib.suppress(Refused):
                    kube.delete(f"/api/v1/namespaces/{name}")


def _bound(kube: Kube, namespace: str, release: str) -> bool:
    asked = {"namespace": namespace, "verb": "list", "group": "loraplane.dev", "resource": "loraadapters"}
    spec = {"user": user_of(release), "resourceAttributes": asked}
    body = {"apiVersion": "authorization.k8s.io/v1", "kind": "SubjectAccessReview", "spec": spec}
    answer = kube.call("POST", "/apis/authorization.k8s.io/v1/subjectaccessreviews", body)
    return bool(answer["status"]["allowed"])


def user_of(release: str) -> str:
    """The operator's name in the audit log."""
    return f"system:serviceaccount:{release}:{SERVICE_ACCOUNT}"


def crds() -> list[dict[str, Any]]:
    return [yaml.safe_load(file.read_text()) for file in sorted((ROOT / "crds").glob("*.yaml"))]


def manifests(namespace: str, release: str) -> list[dict[str, Any]]:
    """The operator's account, Role and RoleBinding as the chart makes them for one namespace with pools.

    Made here from the rules that the chart includes, so that these tests need no helm; tests/charts compares.
    """
    rbac = "rbac.authorization.k8s.io"
    here = {"name": SERVICE_ACCOUNT, "namespace": namespace}
    home = {"name": SERVICE_ACCOUNT, "namespace": release}
    return [
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": home, "automountServiceAccountToken": False},
        {"apiVersion": f"{rbac}/v1", "kind": "Role", "metadata": here, "rules": role_rules()},
        {
            "apiVersion": f"{rbac}/v1",
            "kind": "RoleBinding",
            "metadata": here,
            "roleRef": {"apiGroup": rbac, "kind": "Role", "name": SERVICE_ACCOUNT},
            "subjects": [{"kind": "ServiceAccount", **home}],
        },
    ]


def role_rules(name: str = "operator-rules") -> list[dict[str, Any]]:
    """The rules of a shipped Role."""
    file = ROOT / "charts" / "loraplane" / "files" / f"{name}.yaml"
    rules: list[dict[str, Any]] = yaml.safe_load(file.read_text())
    return rules


def _path(raw: dict[str, Any]) -> str:
    root = "/api/v1" if raw["apiVersion"] == "v1" else f"/apis/{raw['apiVersion']}"
    plural = f"{raw['kind'].lower()}s"
    return f"{root}/namespaces/{raw['metadata']['namespace']}/{plural}/{raw['metadata']['name']}"


def _established(kube: Kube, path: str) -> bool:
    raw = kube.get(path) or {}
    conditions = (raw.get("status") or {}).get("conditions") or []
    return any(each["type"] == "Established" and each["status"] == "True" for each in conditions)
