"""`helm install` with real pods of the shipped images under `restricted`: an adapter answers, and all of it goes."""

import base64
import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.charts.helm import CHART, helm
from tests.cluster.images import archive, reference
from tests.cluster.install import install_crds
from tests.cluster.kube import ADAPTERS, POOLS, Kube
from tests.cluster.node.restricted import mounted_claim, restricted_namespace, told
from tests.cluster.services import ROOT, until
from tests.cluster.tool import Cluster
from tests.cluster.tool.controlplane import NODE_NAME

RELEASE = "loraplane"
INSTALL_SECONDS = 180
READY_SECONDS = 120.0
SITE = ROOT / ".venv" / "lib" / "python3.11" / "site-packages"
FOLDERS = {"models": ROOT / ".loraplane" / "models", "adapters": ROOT / "examples" / "adapters"}
NAMES = {
    "operator": "operator",
    "gateway": "gateway",
    "engine": "engine-slim",
    "postgres": "postgres",
    "valkey": "valkey",
}


class Installed:
    def __init__(self, cluster: Cluster, kube: Kube, namespace: str) -> None:
        self.kube = kube
        self.namespace = namespace
        self.env = {"KUBECONFIG": str(cluster.kubeconfig)}
        self.http = httpx.Client(timeout=60, trust_env=False)

    def helm(self, *arguments: str) -> str:
        command, *rest = arguments
        name = [] if command == "list" else [RELEASE]
        timeout = f"--timeout={INSTALL_SECONDS}s"
        return helm(command, *name, *rest, "-n", self.namespace, timeout, env=self.env, seconds=INSTALL_SECONDS + 20)

    def url(self, service: str, port: int) -> str:
        found = self.kube.call("GET", f"/api/v1/namespaces/{self.namespace}/services/{RELEASE}-{service}")
        return f"http://{found['spec']['clusterIP']}:{port}"

    def admin(self, method: str, path: str, body: Any) -> Any:
        secret = self.kube.call("GET", f"/api/v1/namespaces/{self.namespace}/secrets/{RELEASE}-keys")
        key = base64.b64decode(secret["data"]["admin.key"]).decode()
        headers = {"authorization": f"Bearer {key}"}
        answer = self.http.request(method, f"{self.url('registry', 8001)}{path}", json=body, headers=headers)
        assert answer.is_success, answer.text
        return answer.json()

    def told(self) -> str:
        pods = self.kube.items(f"/api/v1/namespaces/{self.namespace}/pods")
        return "\n".join(
            told(self.kube, f"/api/v1/namespaces/{self.namespace}/pods/{raw['metadata']['name']}") for raw in pods
        )


@pytest.fixture
def installed(cluster: Cluster, tmp_path: Path) -> Iterator[Installed]:
    kube = Kube(cluster.kubeconfig)
    for name in NAMES.values():
        cluster.load_image(archive(name))
    install_crds(kube)
    with contextlib.ExitStack() as stack:
        stack.callback(kube.close)
        namespace = stack.enter_context(restricted_namespace(kube))
        for name, folder in (*FOLDERS.items(), ("site", SITE)):
            mounted_claim(kube, namespace, name, folder, NODE_NAME)
        for name in ("store", "postgres"):
            written_volume(kube, f"{namespace}-{name}", tmp_path / name)
        for name in (*FOLDERS, "site", "store", "postgres"):
            stack.callback(kube.delete, f"/api/v1/persistentvolumes/{namespace}-{name}")
        made = Installed(cluster, kube, namespace)
        stack.callback(made.http.close)
        values = tmp_path / "values.json"
        values.write_text(json.dumps(values_of(namespace)))
        try:
            made.helm("install", str(CHART), "--values", str(values), "--wait")
        except Exception as error:
            raise AssertionError(made.told()) from error
        yield made


def written_volume(kube: Kube, name: str, folder: Path) -> None:
    folder.mkdir()
    term = {"matchExpressions": [{"key": "kubernetes.io/hostname", "operator": "In", "values": [NODE_NAME]}]}
    spec = {
        "capacity": {"storage": "1Gi"},
        "accessModes": ["ReadWriteOnce"],
        "storageClassName": "none",
        "persistentVolumeReclaimPolicy": "Retain",
        "local": {"path": str(folder)},
        "nodeAffinity": {"required": {"nodeSelectorTerms": [term]}},
    }
    kube.call("POST", "/api/v1/persistentvolumes", {"metadata": {"name": name}, "spec": spec})


def values_of(namespace: str) -> dict[str, Any]:
    """Small requests: all of it, and an engine, on two cores."""

    def image(name: str) -> dict[str, str]:
        repository, _, tag = reference(NAMES[name]).removeprefix("localhost/").rpartition(":")
        return {"registry": "localhost", "repository": repository, "tag": tag}

    def claim(name: str) -> dict[str, Any]:
        return {"size": "1Gi", "storageClassName": "none", "volumeName": f"{namespace}-{name}"}

    small = {"resources": {"requests": {"cpu": "10m", "memory": "64Mi"}, "limits": {"memory": "768Mi"}}}
    return {
        "image": {"pullPolicy": "Never"},
        "models": {"create": False, "claim": "models"},
        "adapters": {"create": False, "claim": "adapters"},
        "operator": {"image": image("operator"), **small},
        "engine": {"image": image("engine")},
        "gateway": {"image": image("gateway"), "replicas": 1, "drainSeconds": 5, "preStopSeconds": 1, **small},
        "registry": {"store": claim("store"), **small},
        "postgres": {"image": image("postgres"), **claim("postgres"), **small},
        "valkey": {"image": image("valkey"), **small},
    }


def pool() -> dict[str, Any]:
    site = {"name": "site", "persistentVolumeClaim": {"claimName": "site", "readOnly": True}}
    mount = {"name": "site", "mountPath": "/opt/loraplane/site", "readOnly": True}
    patch = {"spec": {"volumes": [site], "containers": [{"name": "engine", "volumeMounts": [mount]}]}}
    engine = {"maxModelLen": 256, "maxBatchTokens": 64, "maxSequences": 4, "adapterMemory": "32Mi", "threads": 1}
    base = {
        "name": "smollm2-135m-instruct",
        "aliases": ["HuggingFaceTB/SmolLM2-135M-Instruct"],
        "uri": "file:smollm2-135m-instruct",
    }
    spec = {"baseModel": base, "replicas": 1, "engine": {**engine, "hostCache": "64Mi"}, "podTemplate": patch}
    return {"apiVersion": "loraplane.dev/v1alpha1", "kind": "BaseModelPool", "metadata": {"name": "smol"}, "spec": spec}


@pytest.mark.timeout(600)
def test_helm_install_an_adapter_an_answer_and_uninstall(installed: Installed) -> None:
    kube, namespace = installed.kube, installed.namespace
    installed.helm("test")
    installed.admin("POST", "/admin/tenants", {"name": "acme", "namespaces": [namespace]})
    key = installed.admin("POST", "/admin/tenants/acme/keys", {"name": "tests"})["secret"]
    kube.apply(f"{POOLS.format(namespace=namespace)}/smol", pool())
    adapter = f"{ADAPTERS.format(namespace=namespace)}/pirate"
    spec = {"tenant": "acme", "poolRef": {"name": "smol"}, "source": {"uri": "file:pirate"}, "warmReplicas": 1}
    named = {"apiVersion": "loraplane.dev/v1alpha1", "kind": "LoRAAdapter", "metadata": {"name": "pirate"}}
    kube.apply(adapter, {**named, "spec": spec})
    until(lambda: ready(kube, adapter), READY_SECONDS, lambda: f"{kube.get(adapter)}\n{installed.told()}", every=0.5)

    body = {"model": "pirate", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8}
    url = f"{installed.url('gateway', 8000)}/v1/chat/completions"
    answer = installed.http.post(url, json=body, headers={"authorization": f"Bearer {key}"})
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-loraplane-adapter-id"].startswith("acme/pirate@1#")

    installed.helm("uninstall")
    assert finalizers(kube, adapter) == []
    for path in (adapter, f"{POOLS.format(namespace=namespace)}/smol"):
        kube.delete(path)
        until(lambda path=path: kube.get(path) is None, 10, path)  # type: ignore[misc]
    left = {raw["metadata"]["name"] for raw in kube.items(f"/api/v1/namespaces/{namespace}/secrets")}
    assert left == {f"{RELEASE}-keys", f"{RELEASE}-postgres"}
    until(lambda: kube.items(f"/api/v1/namespaces/{namespace}/pods") == [], 90, installed.told)


def ready(kube: Kube, path: str) -> bool:
    conditions = ((kube.get(path) or {}).get("status") or {}).get("conditions") or []
    return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)


def finalizers(kube: Kube, path: str) -> list[str]:
    found = kube.get(path)
    assert found is not None
    return list(found["metadata"].get("finalizers") or [])
