"""Real pods on the node level: what later tests take for granted."""

import contextlib
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cluster.kube import Kube, Refused
from tests.cluster.services import ROOT, until
from tests.cluster.tool import Cluster, leftovers
from tests.cluster.tool.images import BUSYBOX_IMAGE
from tests.cluster.tool.leftovers import state_folder

POD_SECONDS = 20.0
RUN_SECONDS = 110.0
SERVED = "served-by-a-pod"


@pytest.fixture
def namespace(kube: Kube) -> Iterator[str]:
    chosen = f"pods-{secrets.token_hex(3)}"
    kube.call("POST", "/api/v1/namespaces", {"metadata": {"name": chosen}})
    path = f"/api/v1/namespaces/{chosen}"
    until(lambda: kube.get(f"{path}/serviceaccounts/default") is not None, POD_SECONDS, "its ServiceAccount")
    yield path
    kube.delete(path)


def start(kube: Kube, namespace: str, name: str, script: str) -> None:
    container = {
        "name": "main",
        "image": BUSYBOX_IMAGE,
        "imagePullPolicy": "Never",
        "command": ["sh", "-c", script],
        "readinessProbe": {"exec": {"command": ["sh", "-c", "test -e /tmp/ready"]}, "periodSeconds": 1},
    }
    spec = {"containers": [container], "terminationGracePeriodSeconds": 0}
    kube.call("POST", f"{namespace}/pods", {"metadata": {"name": name, "labels": {"app": name}}, "spec": spec})


def is_ready(kube: Kube, namespace: str, name: str) -> bool:
    status: dict[str, Any] = kube.call("GET", f"{namespace}/pods/{name}").get("status", {})
    return any(each["type"] == "Ready" and each["status"] == "True" for each in status.get("conditions", []))


def log(kube: Kube, namespace: str, name: str) -> str:
    """Through the API server, from the kubelet. A pod that has not started yet has none."""
    with contextlib.suppress(Refused, httpx.TransportError):
        return str(kube.call("GET", f"{namespace}/pods/{name}/log")["message"])
    return ""


def test_pods_become_ready_find_a_service_by_name_and_reach_it(kube: Kube, namespace: str) -> None:
    serving = f"echo {SERVED} >/tmp/index.html; touch /tmp/ready; exec httpd -f -p 8080 -h /tmp"
    start(kube, namespace, "server", serving)
    ports = [{"port": 80, "targetPort": 8080}]
    service = {"metadata": {"name": "web"}, "spec": {"selector": {"app": "server"}, "ports": ports}}
    address = kube.call("POST", f"{namespace}/services", service)["spec"]["clusterIP"]
    until(lambda: is_ready(kube, namespace, "server"), POD_SECONDS, lambda: str(kube.get(f"{namespace}/pods/server")))

    short = namespace.rpartition("/")[2]
    fetch = f"printf 'GET /index.html HTTP/1.0\\r\\n\\r\\n' | nc web.{short}.svc.cluster.local 80"
    asking = f"nslookup web.{short}.svc.cluster.local; until {fetch} | grep {SERVED}; do sleep 0.2; done; sleep 1000"
    start(kube, namespace, "client", asking)
    until(
        lambda: {address, SERVED} <= set(log(kube, namespace, "client").split()),
        POD_SECONDS,
        lambda: log(kube, namespace, "client"),
    )


def test_the_node_reaches_a_service_by_its_address(kube: Kube, namespace: str) -> None:
    """From the namespace itself, where a test or an operator runs."""
    start(kube, namespace, "server", f"echo {SERVED} >/tmp/index.html; touch /tmp/ready; exec httpd -f -p 8080 -h /tmp")
    service = {"metadata": {"name": "web"}, "spec": {"selector": {"app": "server"}, "ports": [{"port": 8080}]}}
    address = kube.call("POST", f"{namespace}/services", service)["spec"]["clusterIP"]

    def served() -> bool:
        with contextlib.suppress(httpx.TransportError):
            return SERVED in httpx.get(f"http://{address}:8080/index.html", timeout=2, trust_env=False).text
        return False

    until(served, POD_SECONDS, f"{address}:8080")


@pytest.mark.parametrize("victim", ["node", "tool"])
def test_nothing_is_left_of_pods_whatever_is_killed(victim: str) -> None:
    """A second node beside this one, with its DNS pod running."""
    name = f"pods-{secrets.token_hex(3)}"
    state = state_folder(name)
    tool = [sys.executable, "-m", "tests.cluster.tool"]
    child = subprocess.Popen(
        [*tool, "run", "--name", name, "--level", "node", "--", "sh", "-c", "echo up; sleep 1000"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "up\n"
        if victim == "node":
            os.kill(_child_of(Cluster(state).processes.running()["node"]), 9)
            child.terminate()
        else:
            child.kill()
        child.wait(timeout=RUN_SECONDS)
        subprocess.run([*tool, "down", "--name", name], cwd=ROOT, check=True, timeout=RUN_SECONDS)
        assert leftovers(name) == []
    finally:
        child.kill()
        child.communicate(timeout=RUN_SECONDS)
        subprocess.run([*tool, "down", "--name", name], cwd=ROOT, check=True, timeout=RUN_SECONDS)
        (state.parent / f"{name}.lock").unlink(missing_ok=True)


def _child_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])
