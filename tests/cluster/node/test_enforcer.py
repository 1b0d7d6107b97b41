"""NetworkPolicies on the node level: the rules of tests.cluster.tool.policies, and what the kernel makes of them."""

import contextlib
import os
import secrets
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.cluster.kube import Kube
from tests.cluster.node.restricted import until_ready
from tests.cluster.services import until
from tests.cluster.tool import Cluster
from tests.cluster.tool.controlplane import API_PORT
from tests.cluster.tool.images import BUSYBOX_IMAGE
from tests.cluster.tool.network import NODE_ADDRESS
from tests.cluster.tool.node import DNS_ADDRESS

Object = dict[str, Any]
POD_SECONDS = 30.0
FORCE_SECONDS = 5.0
EXEC_SECONDS = 20.0
HTTP, OTHER = 8080, 9090
#: ADDRESS PORT: open when something answers there, shut when nothing does within 2 s.
ASK = "printf 'GET / HTTP/1.0\\r\\n\\r\\n' | nc -w 2 {} {} 2>&1 | grep -q HTTP && echo open || echo shut"
#: Answers a request that is made on it when the file is there, and says so.
LATER = "(until test -e /tmp/go; do sleep 0.1; done; printf 'GET / HTTP/1.0\\r\\n\\r\\n') | nc {} {} >/tmp/answer"
DNS = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "kube-system"}}}


@dataclass(frozen=True)
class Bench:
    """A server and two clients in one namespace, a client of the same labels in another."""

    cluster: Cluster
    kube: Kube
    namespace: str
    other: str
    server: str  # its address
    service: str

    def policy(self, name: str, **spec: Any) -> None:
        """In force on return."""
        body = {"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "metadata": {"name": name}, "spec": spec}
        self.kube.apply(f"{self.policies}/{name}", body)
        self.until_in_force()

    @property
    def policies(self) -> str:
        return f"/apis/networking.k8s.io/v1/namespaces/{self.namespace}/networkpolicies"

    def until_in_force(self) -> None:
        until(self.cluster.policies_in_force, FORCE_SECONDS, "the policies in force")

    def asked(self, client: str, *targets: tuple[str, int], namespace: str = "") -> list[str]:
        """What each of them is from that client's side, asked at the same time."""
        asking = "".join(
            f"({ASK.format(address, port)}) >/tmp/{number} &\n" for number, (address, port) in enumerate(targets)
        )
        files = " ".join(f"/tmp/{number}" for number in range(len(targets)))
        return self.run(client, f"{asking}wait; cat {files}", namespace).split()

    def run(self, client: str, script: str, namespace: str = "") -> str:
        command = [str(self.cluster.kubectl), "--kubeconfig", str(self.cluster.kubeconfig)]
        command += ["exec", "-n", namespace or self.namespace, client, "--", "sh", "-c", script]
        done = subprocess.run(command, capture_output=True, text=True, timeout=EXEC_SECONDS, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def shared(cluster: Cluster) -> Iterator[Bench]:
    with contextlib.closing(Kube(cluster.kubeconfig)) as kube:
        names = [f"policies-{secrets.token_hex(3)}" for _ in range(2)]
        for name in names:
            kube.call("POST", "/api/v1/namespaces", {"metadata": {"name": name, "labels": {"side": name}}})
            account = f"/api/v1/namespaces/{name}/serviceaccounts/default"
            until(lambda account=account: kube.get(account), POD_SECONDS, account)  # type: ignore[misc]
        try:
            serving = f"httpd -p {OTHER} -h /tmp; exec httpd -f -p {HTTP} -h /tmp"
            paths = [start(kube, names[0], "server", serving, readinessProbe={"tcpSocket": {"port": "http"}})]
            paths += [start(kube, names[0], name, "exec sleep 1000") for name in ("friend", "stranger")]
            paths += [start(kube, names[1], "friend", "exec sleep 1000")]
            address = until_ready(kube, paths[0], POD_SECONDS)["status"]["podIP"]
            for path in paths[1:]:
                until_ready(kube, path, POD_SECONDS)
            service = {"selector": {"app": "server"}, "ports": [{"port": 80, "targetPort": "http"}]}
            body = {"metadata": {"name": "server"}, "spec": service}
            made = kube.call("POST", f"/api/v1/namespaces/{names[0]}/services", body)
            yield Bench(cluster, kube, names[0], names[1], address, made["spec"]["clusterIP"])
        finally:
            for name in names:
                kube.delete(f"/api/v1/namespaces/{name}")


@pytest.fixture
def bench(shared: Bench) -> Iterator[Bench]:
    """Without policies, before and after."""
    yield shared
    for raw in shared.kube.items(shared.policies):
        shared.kube.delete(f"{shared.policies}/{raw['metadata']['name']}")
    shared.until_in_force()


def start(kube: Kube, namespace: str, name: str, script: str, **fields: Any) -> str:
    container = {
        "name": "main",
        "image": BUSYBOX_IMAGE,
        "imagePullPolicy": "Never",
        "command": ["sh", "-c", script],
        "ports": [{"name": "http", "containerPort": HTTP}],
        **fields,
    }
    spec = {"containers": [container], "terminationGracePeriodSeconds": 0}
    pods = f"/api/v1/namespaces/{namespace}/pods"
    kube.call("POST", pods, {"metadata": {"name": name, "labels": {"app": name}}, "spec": spec})
    return f"{pods}/{name}"


def app(name: str) -> Object:
    return {"matchLabels": {"app": name}}


SERVER = app("server")
SHUT = {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}


def test_without_policies_everything_is_open(bench: Bench) -> None:
    api = (NODE_ADDRESS, API_PORT)
    targets = [(bench.server, HTTP), (bench.server, OTHER), (bench.service, 80), api]
    assert bench.asked("stranger", *targets) == ["open"] * 4
    assert bench.asked("friend", *targets, namespace=bench.other) == ["open"] * 4


def test_a_selected_pod_is_reached_by_whom_a_policy_names_by_its_service_too(bench: Bench) -> None:
    peers = [{"podSelector": app("friend")}]
    rule = {"from": peers, "ports": [{"port": "http"}]}
    bench.policy("server", podSelector=SERVER, policyTypes=["Ingress"], ingress=[rule])
    targets = [(bench.server, HTTP), (bench.service, 80), (bench.server, OTHER)]
    assert bench.asked("friend", *targets) == ["open", "open", "shut"]
    assert bench.asked("stranger", *targets) == ["shut"] * 3
    # The same label in another namespace is another pod, until that is named, too.
    assert bench.asked("friend", *targets, namespace=bench.other) == ["shut"] * 3
    peers[0]["namespaceSelector"] = {"matchLabels": {"side": bench.other}}
    bench.policy("server", podSelector=SERVER, policyTypes=["Ingress"], ingress=[rule])
    assert bench.asked("friend", *targets, namespace=bench.other) == ["open", "open", "shut"]
    assert bench.asked("friend", *targets) == ["shut"] * 3


def test_the_node_with_its_probes_reaches_a_pod_that_nobody_may_reach(bench: Bench) -> None:
    bench.policy("nobody", **SHUT)
    assert bench.asked("friend", (bench.server, HTTP)) == ["shut"]
    probe = {"tcpSocket": {"port": "http"}, "periodSeconds": 1}
    path = start(bench.kube, bench.namespace, "late", f"exec httpd -f -p {HTTP} -h /tmp", readinessProbe=probe)
    try:
        address = until_ready(bench.kube, path, POD_SECONDS)["status"]["podIP"]
        bench.until_in_force()  # for a pod that came later, too
        assert bench.asked("friend", (address, HTTP), namespace=bench.other) == ["shut"]
    finally:
        bench.kube.delete(path)


def test_a_pod_gets_out_only_where_a_policy_lets_it(bench: Bench) -> None:
    """To the API server, which is a process of the node, by the address that its Service stands for."""
    api, by_service = (NODE_ADDRESS, API_PORT), ("10.96.0.1", 443)
    targets = [(bench.server, HTTP), (bench.service, 80), api, by_service]
    bench.policy("out", podSelector=app("friend"), policyTypes=["Egress"])
    assert bench.asked("friend", *targets) == ["shut"] * 4
    assert bench.asked("stranger", *targets) == ["open"] * 4
    block = {"to": [{"ipBlock": {"cidr": f"{NODE_ADDRESS}/32"}}], "ports": [{"port": API_PORT}]}
    bench.policy("out", podSelector=app("friend"), policyTypes=["Egress"], egress=[block])
    assert bench.asked("friend", *targets) == ["shut", "shut", "open", "open"]
    anywhere_else = {"to": [{"ipBlock": {"cidr": "0.0.0.0/0", "except": [f"{NODE_ADDRESS}/32"]}}]}
    bench.policy("out", podSelector=app("friend"), policyTypes=["Egress"], egress=[anywhere_else])
    assert bench.asked("friend", *targets) == ["open", "open", "shut", "shut"]


def test_names_are_resolved_where_only_dns_is_let_out(bench: Bench) -> None:
    asking = f"busybox timeout 2 nslookup server.{bench.namespace}.svc.cluster.local {DNS_ADDRESS} && echo found; true"
    bench.policy("out", podSelector=app("friend"), policyTypes=["Egress"])
    assert "found" not in bench.run("friend", asking)
    ports = [{"port": 53, "protocol": protocol} for protocol in ("UDP", "TCP")]
    rule = {"to": [{**DNS, "podSelector": {"matchLabels": {"k8s-app": "kube-dns"}}}], "ports": ports}
    bench.policy("out", podSelector=app("friend"), policyTypes=["Egress"], egress=[rule])
    assert bench.service in bench.run("friend", asking)
    assert bench.asked("friend", (bench.server, HTTP)) == ["shut"]


def test_a_connection_from_before_a_policy_stays(bench: Bench) -> None:
    bench.run("friend", "rm -f /tmp/go /tmp/answer")
    bench.run("friend", f"({LATER.format(bench.server, HTTP)}) >/dev/null 2>&1 </dev/null &")
    connected = f"cat /proc/net/tcp | grep -q ':{HTTP:04X} 01 ' && echo yes; true"
    until(lambda: bench.run("friend", connected), POD_SECONDS, "a connection")
    bench.policy("nobody", **SHUT)
    assert bench.asked("friend", (bench.server, HTTP)) == ["shut"]
    bench.run("friend", "touch /tmp/go")
    until(lambda: "HTTP" in bench.run("friend", "cat /tmp/answer"), POD_SECONDS, "an answer")


def test_what_is_shut_stays_so_when_the_enforcer_is_killed_and_the_next_one_goes_on(bench: Bench) -> None:
    bench.policy("nobody", **SHUT)
    try:
        os.kill(bench.cluster.processes.running()["policies"], signal.SIGKILL)
        until(lambda: "policies" not in bench.cluster.processes.running(), FORCE_SECONDS, "its end")
        assert bench.asked("friend", (bench.server, HTTP)) == ["shut"]
        bench.kube.delete(f"{bench.policies}/nobody")
        assert not bench.cluster.policies_in_force()
        assert bench.asked("friend", (bench.server, HTTP)) == ["shut"]
    finally:
        bench.cluster.start_policies()
    bench.until_in_force()
    assert bench.asked("friend", (bench.server, HTTP)) == ["open"]
