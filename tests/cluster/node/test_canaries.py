"""What canaries.Witness finds: a secret planted in each kind of place, also where it is gone at the end."""

import base64
import re
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.charts.helm import helm
from tests.cluster.kube import Kube
from tests.cluster.node.canaries import Witness
from tests.cluster.node.restricted import until_ready
from tests.cluster.services import until
from tests.cluster.tool import Cluster
from tests.cluster.tool.images import BUSYBOX_IMAGE

POD_SECONDS = 30.0
#: Each is the value of a Secret; pods have all of them as files, as the shipped ones do, so that no object has them.
CANARIES = ("log", "crash", "gone", "argument", "event", "config", "rotated")
#: Has ended badly once, and lives on.
CRASHING = "test -e /own/crashed || { touch /own/crashed; cat /keys/crash; echo; exit 1; }"
LOGGING = 'cat /keys/log; echo; sh -c "sleep 1000; : $(cat /keys/argument)" &'
RELEASE = "planted"
CHART = "apiVersion: v2\nname: planted\nversion: 0.1.0\n"
TEMPLATE = """apiVersion: v1
kind: ConfigMap
metadata: {{ name: settings }}
data: {{ password: {config} }}
---
apiVersion: v1
kind: Secret
metadata: {{ name: manifest }}
stringData: {{ password: {secret} }}
"""


@pytest.fixture
def namespace(kube: Kube) -> Iterator[str]:
    chosen = f"canaries-{secrets.token_hex(3)}"
    kube.call("POST", "/api/v1/namespaces", {"metadata": {"name": chosen}})
    path = f"/api/v1/namespaces/{chosen}"
    until(lambda: kube.get(f"{path}/serviceaccounts/default") is not None, POD_SECONDS, "its ServiceAccount")
    yield chosen
    kube.delete(path)


def secret(kube: Kube, namespace: str, name: str, value: str) -> None:
    body = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}, "stringData": {"key": value}}
    kube.apply(f"/api/v1/namespaces/{namespace}/secrets/{name}", body)


def start(kube: Kube, namespace: str, name: str, script: str, **fields: Any) -> str:
    """A pod that is ready when its script has ended well, and then waits; its path."""
    container = {
        "name": "main",
        "image": BUSYBOX_IMAGE,
        "imagePullPolicy": "Never",
        "command": ["sh", "-c", f"{script}\n>/tmp/done; exec sleep 1000"],
        "readinessProbe": {"exec": {"command": ["cat", "/tmp/done"]}, "periodSeconds": 1},
        "volumeMounts": [{"name": "keys", "mountPath": "/keys"}, {"name": "own", "mountPath": "/own"}],
        **fields,
    }
    sources = [{"secret": {"name": each, "items": [{"key": "key", "path": each}]}} for each in CANARIES]
    volumes = [{"name": "keys", "projected": {"sources": sources}}, {"name": "own", "emptyDir": {}}]
    spec = {"containers": [container], "volumes": volumes, "terminationGracePeriodSeconds": 0}
    pods = f"/api/v1/namespaces/{namespace}/pods"
    kube.call("POST", pods, {"metadata": {"name": name}, "spec": spec})
    return f"{pods}/{name}"


def event(kube: Kube, namespace: str, name: str, message: str) -> None:
    about = {"kind": "Pod", "namespace": namespace, "name": "some"}
    body = {"metadata": {"name": name}, "involvedObject": about, "reason": "Planted", "message": message}
    kube.call("POST", f"/api/v1/namespaces/{namespace}/events", body)


def chart(folder: Path, value: str) -> str:
    (folder / "templates").mkdir()
    (folder / "Chart.yaml").write_text(CHART)
    (folder / "templates" / "all.yaml").write_text(TEMPLATE.format(config=value, secret=value))
    return str(folder)


def test_a_secret_is_found_in_each_kind_of_place_also_when_that_is_gone(
    cluster: Cluster, kube: Kube, namespace: str, tmp_path: Path
) -> None:
    planted = {name: secrets.token_hex(32) for name in (*CANARIES, "manifest", "tenant")}
    for name in CANARIES:
        secret(kube, namespace, name, planted[name])
    with Witness(cluster, [namespace], [(RELEASE, namespace)]) as witness:
        witness.add("a tenant's key", planted["tenant"])
        installed = chart(tmp_path, planted["manifest"])
        helm("install", RELEASE, installed, "-n", namespace, env={"KUBECONFIG": str(cluster.kubeconfig)})
        variable = {"name": "KEY", "valueFrom": {"secretKeyRef": {"name": "gone", "key": "key"}}}
        pods = [
            start(kube, namespace, "crasher", CRASHING),
            start(kube, namespace, "keeper", LOGGING),
            start(kube, namespace, "doomed", "echo $KEY", env=[variable]),
        ]
        for path in pods:
            until_ready(kube, path, POD_SECONDS)
        event(kube, namespace, "told", f"connecting with {planted['event']}")
        login = base64.b64encode(f"user:{planted['config']}".encode()).decode()
        config = {"metadata": {"name": "login"}, "data": {"header": f"Basic {login}", "key": planted["tenant"]}}
        kube.call("POST", f"/api/v1/namespaces/{namespace}/configmaps", config)
        secret(kube, namespace, "rotated", secrets.token_hex(32))
        witness.read("what a command printed", planted["rotated"])
        witness.look()
        for path in (pods[-1], f"/api/v1/namespaces/{namespace}/configmaps/login"):
            kube.delete(path)
            until(lambda path=path: kube.get(path) is None, POD_SECONDS, path)  # type: ignore[misc]
        found = {(re.sub(r" of .* in ", " in ", find.place), find.secret) for find in witness.finds()}
    of = {name: f"Secret {namespace}/{name}: key" for name in CANARIES}
    assert found == {
        (f"log of {namespace}/keeper/main", of["log"]),
        (f"log of {namespace}/crasher/main", of["crash"]),
        (f"log of {namespace}/doomed/main", of["gone"]),
        (f"environment in {namespace}/doomed", of["gone"]),
        (f"command line in {namespace}/keeper", of["argument"]),
        (f"object Event {namespace}/told", of["event"]),
        (f"object ConfigMap {namespace}/login", of["config"]),
        (f"object ConfigMap {namespace}/login", "a tenant's key"),
        ("what a command printed", of["rotated"]),
        (f"manifest helm get manifest {RELEASE}", f"Secret {namespace}/manifest: password"),
        (f"object ConfigMap {namespace}/settings", f"Secret {namespace}/manifest: password"),
    }


def test_a_witness_that_saw_nothing_says_so(cluster: Cluster, namespace: str) -> None:
    with Witness(cluster, [namespace]) as witness, pytest.raises(AssertionError, match="nothing was seen of: command"):
        witness.finds()
