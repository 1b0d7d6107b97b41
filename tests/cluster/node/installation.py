"""One installation of the chart for all tests here: `helm install`, tenants by the CLI, the examples by kubectl.

The release has a namespace of its own; pools and adapters are in `default`, where the examples' files say that they
are, and adapters also in one of a team. All of them enforce `restricted`. The tests run in file order; the last one
uninstalls. What is asked is asked of Services' addresses, which the node reaches through kube-proxy.
"""

import base64
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import httpx2  # of the openai client
import openai
import pytest

from tests.charts.helm import CHART, helm
from tests.cluster.images import archive, reference
from tests.cluster.kube import ADAPTERS, POOLS, Kube, Refused
from tests.cluster.node.canaries import Witness
from tests.cluster.node.inventory import inventory
from tests.cluster.node.restricted import RESTRICTED, local_volume, mounted_claim, restricted_namespace, told
from tests.cluster.services import ROOT, until
from tests.cluster.tool import Cluster
from tests.cluster.tool.controlplane import API_PORT, NODE_NAME
from tests.cluster.tool.network import NODE_ADDRESS

RELEASE = "loraplane"
#: Of the examples' files.
POOL_NAMESPACE, POOL = "default", "smol"
#: tenant -> its adapter, as examples/lora declares them.
TENANTS = {"acme": "pirate", "globex": "json", "initech": "html"}
INSTALL_SECONDS = 180
READY_SECONDS = 180
COMMAND_SECONDS = 60.0
GONE_SECONDS = 60.0
SITE = ROOT / ".venv" / "lib" / "python3.11" / "site-packages"
LORAPLANE = Path(sys.executable).with_name("loraplane")
FOLDERS = {"models": ROOT / ".loraplane" / "models", "adapters": ROOT / "examples" / "adapters"}
IMAGES = {
    "operator": "operator",
    "gateway": "gateway",
    "engine": "engine-slim",
    "postgres": "postgres",
    "valkey": "valkey",
}
_COMPONENT = "app.kubernetes.io/component"


class Installation:
    def __init__(self, cluster: Cluster, kube: Kube, namespace: str, team: str, folder: Path) -> None:
        self.cluster = cluster
        self.kube = kube
        self.namespace = namespace
        self.team = team  # a namespace that may have adapters and no pools
        self.env = {"KUBECONFIG": str(cluster.kubeconfig)}
        self.http = httpx.Client(timeout=60, trust_env=False)
        #: Of all that happens to it from before its install on; a test at the end asks whether a secret got out.
        self.witness = Witness(cluster, (namespace, POOL_NAMESPACE, team), [(RELEASE, namespace)])
        self.before: set[str] = set()  # the inventory before the install
        self._values = folder / "values.json"
        self._values.write_text(json.dumps(values_of(namespace, team)))

    # -- commands, as people type them

    def helm(self, *arguments: str) -> str:
        command, *rest = arguments
        if command == "uninstall":
            self.witness.look()
        own = [] if command == "list" else [RELEASE, f"--timeout={INSTALL_SECONDS}s"]
        return helm(command, *own, *rest, "-n", self.namespace, env=self.env, seconds=INSTALL_SECONDS + 20)

    def install(self) -> None:
        """`helm install --wait`."""
        self.before = self.inventory()
        try:
            self.helm("install", str(CHART), "--values", str(self._values), "--wait")
        except Exception as error:
            raise AssertionError(f"{error}\n{self.told()}") from error
        self.witness.look()

    def upgrade(self, **settings: Any) -> None:
        """`helm upgrade --wait` with these values (a.b written a__b) beside those of the installation."""
        changes = [f"--set-json={name.replace('__', '.')}={json.dumps(value)}" for name, value in settings.items()]
        self.helm("upgrade", str(CHART), "--values", str(self._values), *changes, "--wait")
        self.witness.look()

    def installed(self) -> bool:
        return RELEASE in self.helm("list", "--short").split()

    def kubectl(self, *arguments: str, seconds: float = COMMAND_SECONDS) -> str:
        command = [str(self.cluster.kubectl), *arguments]
        return _output(command, {**self.env, "HOME": str(self._values.parent)}, seconds)

    def cli(self, *arguments: str) -> str:
        """`loraplane`, against the registry's admin port."""
        found = {"LORAPLANE_ADMIN_URL": self.url("registry", 8001), "LORAPLANE_ADMIN_KEY": self.admin_key()}
        return _output([str(LORAPLANE), *arguments], found, COMMAND_SECONDS)

    # -- what is there

    def url(self, service: str, port: int) -> str:
        """By the Service's address."""
        found = self.kube.call("GET", f"/api/v1/namespaces/{self.namespace}/services/{RELEASE}-{service}")
        return f"http://{found['spec']['clusterIP']}:{port}"

    @property
    def gateway(self) -> str:
        return self.url("gateway", 8000)

    def admin_key(self) -> str:
        return self._key("admin")

    def master_key(self) -> bytes:
        return bytes.fromhex(self._key("master").strip())

    def _key(self, name: str) -> str:
        secret = self.kube.call("GET", f"/api/v1/namespaces/{self.namespace}/secrets/{RELEASE}-keys")
        return base64.b64decode(secret["data"][f"{name}.key"]).decode()

    def admin(self, method: str, path: str, body: Any = None) -> Any:
        headers = {"authorization": f"Bearer {self.admin_key()}"}
        answer = self.http.request(method, f"{self.url('registry', 8001)}{path}", json=body, headers=headers)
        assert answer.is_success, answer.text
        return answer.json() if answer.content else None

    def pods(self, component: str) -> dict[str, dict[str, Any]]:
        """Of a component of the release, by name; those that are going are not counted."""
        path = f"/api/v1/namespaces/{self.namespace}/pods?labelSelector={_COMPONENT}={component}"
        return _alive(self.kube.items(path))

    def engines(self, pool: str = POOL) -> dict[str, dict[str, Any]]:
        path = f"/api/v1/namespaces/{POOL_NAMESPACE}/pods?labelSelector=loraplane.dev/pool={pool}"
        return _alive(self.kube.items(path))

    def adapter(self, name: str, namespace: str = POOL_NAMESPACE) -> dict[str, Any]:
        return self.kube.call("GET", f"{ADAPTERS.format(namespace=namespace)}/{name}")

    def condition(self, name: str, kind: str, namespace: str = POOL_NAMESPACE) -> dict[str, Any]:
        """Of an adapter; its status is "" while the operator has said nothing."""
        conditions = (self.adapter(name, namespace).get("status") or {}).get("conditions") or []
        return next((each for each in conditions if each["type"] == kind), {"status": "", "reason": "", "message": ""})

    def wait(self, *names: str, seconds: int = READY_SECONDS) -> None:
        """`kubectl wait` until these adapters of the examples' namespace are Ready, by default all."""
        which = [f"lora/{name}" for name in names] or ["lora", "--all"]
        command = ["wait", "-n", POOL_NAMESPACE, "--for=condition=Ready", f"--timeout={seconds}s", *which]
        try:
            self.kubectl(*command, seconds=seconds + 10)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.kubectl('get', 'lora,bmp', '-A')}\n{self.told()}") from error

    def inventory(self) -> set[str]:
        """Of the namespaces that the release, its pools and its tenants have, and beside them."""
        return inventory(self.kube, (self.namespace, POOL_NAMESPACE, self.team), RELEASE)

    def told(self) -> str:
        """Status and output of every pod, for whoever reads a failure."""
        texts = []
        for namespace in (self.namespace, POOL_NAMESPACE):
            pods = f"/api/v1/namespaces/{namespace}/pods"
            with contextlib.suppress(Refused):  # one of them went meanwhile
                texts += [told(self.kube, f"{pods}/{raw['metadata']['name']}") for raw in self.kube.items(pods)]
        return "\n".join(texts)

    def close(self) -> None:
        self.http.close()


def _output(command: list[str], env: Mapping[str, str], seconds: float) -> str:
    base = {"PATH": os.environ.get("PATH", os.defpath)}
    done = subprocess.run(
        command, env={**base, **env}, cwd=ROOT, capture_output=True, text=True, timeout=seconds, check=False
    )
    assert done.returncode == 0, f"{command}: {done.returncode}\n{done.stderr}{done.stdout}"
    return done.stdout


def _alive(pods: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {raw["metadata"]["name"]: raw for raw in pods if "deletionTimestamp" not in raw["metadata"]}


def values_of(namespace: str, team: str) -> dict[str, Any]:
    """Small requests, since all of it is on two cores; two gateways, as shipped."""

    def image(name: str) -> dict[str, str]:
        repository, _, tag = reference(IMAGES[name]).removeprefix("localhost/").rpartition(":")
        return {"registry": "localhost", "repository": repository, "tag": tag}

    def claim(name: str) -> dict[str, Any]:
        return {"size": "1Gi", "storageClassName": "none", "volumeName": f"{namespace}-{name}"}

    small = {"resources": {"requests": {"cpu": "10m", "memory": "64Mi"}, "limits": {"memory": "768Mi"}}}
    return {
        "image": {"pullPolicy": "Never"},
        "pools": {"namespaces": [POOL_NAMESPACE]},
        "tenants": {"namespaces": [team]},
        "models": claim("models"),
        "adapters": claim("adapters"),
        "operator": {"image": image("operator"), **small},
        "engine": {"image": image("engine")},
        "gateway": {"image": image("gateway"), "drainSeconds": 60, **small},
        "registry": {"store": claim("store"), **small},
        "postgres": {"image": image("postgres"), **claim("postgres"), **small},
        "valkey": {"image": image("valkey"), **small},
        "networkPolicy": {"apiServer": {"cidrs": [f"{NODE_ADDRESS}/32"], "ports": [API_PORT]}},
    }


def load_images(cluster: Cluster) -> None:
    """Those of an installation, two at a time."""
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda name: cluster.load_image(archive(name)), IMAGES.values()))


@contextlib.contextmanager
def running_installation(cluster: Cluster, folder: Path) -> Iterator[Installation]:
    """Afterwards nothing of it is left but its CRDs, whatever a test left behind."""
    load_images(cluster)
    with contextlib.ExitStack() as stack:
        kube = stack.enter_context(contextlib.closing(Kube(cluster.kubeconfig)))
        namespace = stack.enter_context(restricted_namespace(kube, "loraplane"))
        team = stack.enter_context(restricted_namespace(kube, "team"))
        stack.enter_context(_pool_namespace(kube))
        stack.enter_context(_volumes(kube, namespace, folder))
        made = stack.enter_context(contextlib.closing(Installation(cluster, kube, namespace, team, folder)))
        stack.enter_context(made.witness)
        stack.callback(_remove, made)
        made.install()
        yield made


@contextlib.contextmanager
def _pool_namespace(kube: Kube) -> Iterator[None]:
    """`default` as a platform would prepare it, so that the pools' files are applied as they are.

    Engines whose image lacks its packages (images/README.md) get them from a claim there, and a pool that does not
    say how many threads an engine has gets one, since all of them share two cores.
    """
    namespace = f"/api/v1/namespaces/{POOL_NAMESPACE}"
    kube.merge(namespace, {"metadata": {"labels": RESTRICTED}})
    mounted_claim(kube, POOL_NAMESPACE, "site", SITE, NODE_NAME)
    admission = "/apis/admissionregistration.k8s.io/v1"
    policies = {"engine-packages": _engines_get_packages(), "engine-threads": _engines_get_a_thread()}
    try:
        for name, spec in policies.items():
            there = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": POOL_NAMESPACE}}}
            binding = {"policyName": name, "matchResources": there}
            for plural, wished in (("policies", spec), ("policybindings", binding)):
                kube.call(
                    "POST", f"{admission}/mutatingadmission{plural}", {"metadata": {"name": name}, "spec": wished}
                )
        yield
    finally:
        for name in policies:
            for plural in ("policybindings", "policies"):
                kube.delete(f"{admission}/mutatingadmission{plural}/{name}")
        kube.delete(f"{namespace}/persistentvolumeclaims/site")
        kube.delete(f"/api/v1/persistentvolumes/{POOL_NAMESPACE}-site")
        kube.merge(namespace, {"metadata": {"labels": dict.fromkeys(RESTRICTED)}})


def _engines_get_packages() -> dict[str, Any]:
    volume = 'Object.spec.volumes{name: "site", persistentVolumeClaim: '
    volume += 'Object.spec.volumes.persistentVolumeClaim{claimName: "site", readOnly: true}}'
    mount = 'Object.spec.containers.volumeMounts{name: "site", mountPath: "/opt/loraplane/site", readOnly: true}'
    container = f'Object.spec.containers{{name: "engine", volumeMounts: [{mount}]}}'
    expression = f"Object{{spec: Object.spec{{volumes: [{volume}], containers: [{container}]}}}}"
    of_pools = {"matchExpressions": [{"key": "loraplane.dev/pool", "operator": "Exists"}]}
    change = {"patchType": "ApplyConfiguration", "applyConfiguration": {"expression": expression}}
    return {**_when_made("", "v1", "pods", objectSelector=of_pools), "mutations": [change]}


def _engines_get_a_thread() -> dict[str, Any]:
    expression = '[JSONPatch{op: "add", path: "/spec/engine/threads", value: 1}]'
    unsaid = {"name": "unsaid", "expression": "!has(object.spec.engine.threads)"}
    change = {"patchType": "JSONPatch", "jsonPatch": {"expression": expression}}
    return {
        **_when_made("loraplane.dev", "v1alpha1", "basemodelpools"),
        "matchConditions": [unsaid],
        "mutations": [change],
    }


def _when_made(group: str, version: str, plural: str, **which: Any) -> dict[str, Any]:
    rule = {"apiGroups": [group], "apiVersions": [version], "operations": ["CREATE"], "resources": [plural]}
    constraints = {"resourceRules": [rule], **which}
    return {"matchConstraints": constraints, "failurePolicy": "Fail", "reinvocationPolicy": "Never"}


@contextlib.contextmanager
def _volumes(kube: Kube, namespace: str, folder: Path) -> Iterator[None]:
    """What the chart's claims name: models and adapters as they lie here, and two empty ones."""
    folders = {**FOLDERS, **{name: folder / name for name in ("store", "postgres")}}
    try:
        for name, where in folders.items():
            where.mkdir(exist_ok=True)
            local_volume(kube, f"{namespace}-{name}", where, NODE_NAME)
        yield
    finally:
        for name in folders:
            kube.delete(f"/api/v1/persistentvolumes/{namespace}-{name}")


def _remove(made: Installation) -> None:
    if made.installed():
        made.helm("uninstall")
    objects = [path.format(namespace=POOL_NAMESPACE) for path in (ADAPTERS, POOLS)]
    for path in (*objects, f"/api/v1/namespaces/{POOL_NAMESPACE}/persistentvolumeclaims"):
        for raw in made.kube.items(path):
            if raw["metadata"]["name"] != "site":
                made.kube.delete(f"{path}/{raw['metadata']['name']}")
    until(lambda: not any(made.kube.items(path) for path in objects), GONE_SECONDS, "objects that stay")


@pytest.fixture(scope="session")
def installed(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installation]:
    with running_installation(cluster, tmp_path_factory.mktemp("installation")) as made:
        yield made


@dataclass(frozen=True)
class Served:
    """The examples, Ready: three tenants, each with a key and an adapter, on two engines."""

    installed: Installation
    keys: Mapping[str, str]

    def client(self, tenant: str, *, pooled: bool = True, at: str = "") -> openai.OpenAI:
        """Through the gateway's Service, or at one gateway's address; retrying nothing. Unpooled: a new connection for
        each request."""
        limits = httpx2.Limits(max_keepalive_connections=None if pooled else 0)
        http = httpx2.Client(limits=limits, timeout=60, trust_env=False)
        return openai.OpenAI(
            base_url=f"{at or self.installed.gateway}/v1", api_key=self.keys[tenant], max_retries=0, http_client=http
        )


@pytest.fixture(scope="session")
def served(installed: Installation) -> Served:
    for tenant in TENANTS:
        namespaces = (f"--namespace={POOL_NAMESPACE}", f"--namespace={installed.team}")
        installed.cli("tenant", "create", tenant, *namespaces)
    keys = {tenant: installed.cli("key", "create", tenant, "--name=e2e").strip() for tenant in TENANTS}
    for tenant, key in keys.items():
        installed.witness.add(f"the key of {tenant}", key)
    installed.kubectl("apply", "-f", "examples/pools", "-f", "examples/lora")
    installed.wait()
    return Served(installed, keys)
