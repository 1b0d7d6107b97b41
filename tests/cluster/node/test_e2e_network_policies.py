"""The chart's NetworkPolicies in force: who reaches what, and that all of it would be open without them."""

import contextlib
import socket
import subprocess
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import urlsplit

import pytest

from loraplane_core.labels import LABEL_POOL
from loraplane_operator.cluster.manifests import PORTS
from tests.cluster.images import reference
from tests.cluster.node.installation import POOL, POOL_NAMESPACE, Installation, Served
from tests.cluster.node.probing import Prober, Target, probed
from tests.cluster.node.restricted import container, pod, restricted_namespace, until_ready
from tests.cluster.services import until
from tests.cluster.tool.controlplane import API_PORT
from tests.cluster.tool.network import NODE_ADDRESS, NODE_LINK
from tests.cluster.tool.node import DNS_ADDRESS

pytestmark = pytest.mark.timeout(400)
FORCE_SECONDS = 10.0
POD_SECONDS = 60.0
#: Nobody's (RFC 5737); while a test runs, the node answers for it.
INTERNET = "203.0.113.7"
COMPONENTS = ("gateway", "registry", "operator", "postgres", "valkey")
#: On a pod of somebody else: where databases, API servers and engines listen elsewhere.
STRANGER_PORTS = (5432, 6443, 8000, 8002)
LISTEN = """
import signal, socket, sys
held = [socket.create_server(("", int(port))) for port in sys.argv[1:]]
signal.pause()
"""

DATABASES = {"postgres", "valkey"}
DNS = {"dns by udp", "dns by tcp"}
API = {"api server", "api server's service"}
ENGINES = ("engine 0", "engine 1")
ELSEWHERE = {"internet", *(f"stranger {port}" for port in STRANGER_PORTS)}
#: What no policy shuts: whoever has a key may call the gateway.
FREE = {"gateway", "gateway's service"} | API | DNS | ELSEWHERE
#: For each who: where it gets through. To everything else nothing comes back.
REACHES: dict[str, set[str]] = {
    "gateway": {f"{engine} {port}" for engine in ENGINES for port in ("data", "admin")} | DATABASES | API | DNS,
    "operator": {*(f"{engine} admin" for engine in ENGINES), "registry admin"} | API | DNS,
    "registry": DATABASES | DNS,
    "engine 0": {"registry artifacts", "registry artifacts' service"} | DNS,
    "postgres": set(),
    "valkey": set(),
    # None of the installation's, whatever their labels say: those count in one namespace each.
    "bystander beside the gateway": FREE,
    "bystander beside the engines": FREE,
    "engine's labels beside the gateway": FREE,
    "gateway's labels beside the engines": FREE,
    "engine's labels elsewhere": FREE,
    "gateway's labels elsewhere": FREE,
}


#: Roles of pods elsewhere, as values of the chart may name them; each gets to the free places but the gateway, too.
ROLES = {
    "client": {"gateway", "gateway's service"},
    "admin": {"registry admin"},
    "monitor": {"gateway metrics", "registry admin", "operator", *(f"{engine} metrics" for engine in ENGINES)},
}


@dataclass(frozen=True)
class Scene:
    installed: Installation
    elsewhere: str
    probers: dict[str, Prober]
    targets: dict[str, Target]

    def until_in_force(self) -> None:
        until(self.installed.cluster.policies_in_force, FORCE_SECONDS, "the policies in force")

    def wrong(self, reaches: Mapping[str, Collection[str]]) -> dict[str, str]:
        """What is not as it should be, from each of these probers to every target."""
        found = probed(self.installed.cluster, {who: self.probers[who] for who in reaches}, self.targets)
        wrong = {}
        for who, reached in found.items():
            for where, state in reached.items():
                expected = "open" if where in reaches[who] else "shut"
                itself = where.startswith(who)  # the gateway, the gateway's service: no policy keeps a pod from itself
                if state != expected and not itself:
                    wrong[f"{who} -> {where}"] = f"{state}, not {expected}"
        return wrong


@pytest.fixture(scope="module")
def scene(served: Served) -> Iterator[Scene]:
    """The installation with its engines, and pods of others in the two namespaces and in a third."""
    installed, kube = served.installed, served.installed.kube
    with contextlib.ExitStack() as stack:
        elsewhere = stack.enter_context(restricted_namespace(kube, "elsewhere"))
        stack.enter_context(internet())
        own = {name: next(iter(installed.pods(name).values())) for name in COMPONENTS}
        own |= {f"engine {raw['metadata']['name'][-1]}": raw for raw in installed.engines().values()}
        gateway, engine = own["gateway"]["metadata"]["labels"], {LABEL_POOL: POOL}
        home, pools = installed.namespace, POOL_NAMESPACE
        others = {
            "stranger": (elsewhere, "stranger", {}),
            "bystander beside the gateway": (home, "bystander", {}),
            "bystander beside the engines": (pools, "bystander", {}),
            "engine's labels beside the gateway": (home, "as-engine", engine),
            "gateway's labels beside the engines": (pools, "as-gateway", gateway),
            "engine's labels elsewhere": (elsewhere, "as-engine", engine),
            "gateway's labels elsewhere": (elsewhere, "as-gateway", gateway),
            **{role: (elsewhere, role, {"role": role}) for role in ROLES},
        }
        paths = {}
        for who, (namespace, name, labels) in others.items():
            pods = f"/api/v1/namespaces/{namespace}/pods"
            kube.call("POST", pods, listening(name, labels, STRANGER_PORTS if who == "stranger" else ()))
            paths[who] = f"{pods}/{name}"
            stack.callback(kube.delete, paths[who])
        found = {**own, **{who: until_ready(kube, path, POD_SECONDS) for who, path in paths.items()}}
        probers = {who: prober(raw, "bash" if who in DATABASES else "python") for who, raw in found.items()}
        made = Scene(installed, elsewhere, probers, targets_of(installed, found))
        made.until_in_force()
        yield made


@contextlib.contextmanager
def internet() -> Iterator[None]:
    """Its address on the node's link, and a server there."""
    address = ["address", "add", f"{INTERNET}/32", "dev", NODE_LINK]
    subprocess.run(["ip", *address], check=True, timeout=10)
    try:
        with socket.create_server((INTERNET, 443)):
            yield
    finally:
        subprocess.run(["ip", "address", "delete", *address[2:]], check=True, timeout=10)


def listening(name: str, labels: dict[str, str], ports: tuple[int, ...]) -> dict[str, Any]:
    words = ["python3", "-c", LISTEN, *(str(port) for port in ports)]
    made = pod(name, [container("main", reference("gateway"), command=words)], terminationGracePeriodSeconds=0)
    if ports:
        made["spec"]["containers"][0]["readinessProbe"] = {"tcpSocket": {"port": ports[-1]}, "periodSeconds": 1}
    made["metadata"]["labels"] = labels
    return made


def prober(raw: dict[str, Any], shell: Literal["python", "bash"]) -> Prober:
    return Prober(raw["metadata"]["namespace"], raw["metadata"]["name"], shell)


def targets_of(installed: Installation, found: dict[str, Any]) -> dict[str, Target]:
    def at(who: str, port: int) -> Target:
        return Target(found[who]["status"]["podIP"], port)

    def service(name: str, port: int) -> Target:
        return Target(urlsplit(installed.url(name, port)).hostname or "", port)

    targets = {
        "gateway": at("gateway", 8000),
        "gateway's service": service("gateway", 8000),
        "gateway metrics": at("gateway", 9000),
        "registry admin": at("registry", 8001),
        "registry artifacts": at("registry", 8002),
        "registry artifacts' service": service("registry", 8002),
        "operator": at("operator", 8090),
        "postgres": at("postgres", 5432),
        "valkey": at("valkey", 6379),
        "api server": Target(NODE_ADDRESS, API_PORT),
        "api server's service": Target("10.96.0.1", 443),
        "internet": Target(INTERNET, 443),
        "dns by udp": Target(DNS_ADDRESS, 53, "udp"),
        "dns by tcp": Target(DNS_ADDRESS, 53),
    }
    for engine in ENGINES:
        targets |= {f"{engine} {name}": at(engine, port) for name, port in PORTS.items()}
    return targets | {f"stranger {port}": at("stranger", port) for port in STRANGER_PORTS}


def test_each_component_reaches_what_it_needs_and_nothing_else(scene: Scene) -> None:
    """What is shut would be open without the policies: the node, which they do not concern, reaches all of it."""
    assert scene.wrong(REACHES) == {}


def test_all_of_it_is_there_to_be_reached(scene: Scene) -> None:
    shut = []
    for name, target in scene.targets.items():
        if target.protocol == "tcp":
            try:
                socket.create_connection((target.address, target.port), timeout=5).close()
            except OSError as error:
                shut.append(f"{name}: {error}")
    assert shut == []


def test_who_may_call_administer_and_scrape_are_values(scene: Scene) -> None:
    there = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": scene.elsewhere}}}
    peers = {role: [{**there, "podSelector": {"matchLabels": {"role": role}}}] for role in ROLES}
    scene.installed.upgrade(
        networkPolicy__clients=peers["client"], networkPolicy__admins=peers["admin"], monitoring__from=peers["monitor"]
    )
    try:
        scene.until_in_force()
        free = FREE - ROLES["client"]
        stranger = "bystander beside the gateway"
        assert scene.wrong({stranger: free, **{role: free | own for role, own in ROLES.items()}}) == {}
    finally:
        scene.installed.upgrade()
        scene.until_in_force()
    assert scene.wrong(dict.fromkeys(ROLES, FREE)) == {}
