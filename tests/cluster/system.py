"""The whole product against a running control plane: real API server and controller manager, real Postgres,
registry, data gateway and operator, and the kubelet stand-in, which starts the engines.

Everything runs in the network namespace in which pytest already is (`python -m tests.cluster.tool run`).
"""

import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import httpx
import msgspec
import yaml

from loraplane_core.labels import ADAPTER_KIND, API_VERSION, POOL_KIND
from tests.cluster.container import FAKE_IMAGE, REAL_IMAGE
from tests.cluster.install import SERVICE_ACCOUNT, install
from tests.cluster.kube import ADAPTERS, POOLS, Kube, Refused
from tests.cluster.models import MODEL_CLAIM, REAL_BASE, TINY_BASE, model_root
from tests.cluster.pod import PodFile
from tests.cluster.services import Process, Services, running_services, until
from tests.gateway.postgres import free_port

ROOT = Path(__file__).parents[2]
POOL = "smol"


class ClusterAccess(Protocol):
    """What of the cluster tool is used here."""

    @property
    def kubeconfig(self) -> Path: ...

    @property
    def audit_log(self) -> Path: ...

    def service_account_kubeconfig(self, namespace: str, name: str) -> Path: ...

    def stop_api_server(self) -> None: ...

    def start_api_server(self) -> None: ...

    def compact_etcd(self) -> None: ...


class System:
    """One namespace with one operator. `image` decides which engines its pools get."""

    def __init__(self, cluster: ClusterAccess, folder: Path, services: Services, image: str) -> None:
        self.cluster = cluster
        self.folder = folder
        self.services = services
        self.image = image
        self.kube = Kube(cluster.kubeconfig)
        self.namespace = f"lp-{secrets.token_hex(3)}"
        self.account = SERVICE_ACCOUNT  # that operators are started under
        self.models = folder / "models"
        self.state = folder / "kubelet"
        self.kubelet = Process("kubelet", folder)
        self._operators: dict[str, Process] = {}
        self._health = free_port()
        self._kubeconfigs: dict[str, Path] = {}  # by account

    # -- life

    def start(self) -> None:
        model_root(self.models)
        self.kube.call("POST", "/api/v1/namespaces", {"metadata": {"name": self.namespace}})
        until(lambda: self.kube.get(f"/api/v1/namespaces/{self.namespace}/serviceaccounts/default"), 20)
        self.start_kubelet()
        install(self.kube, [self.namespace])

    def start_kubelet(self) -> None:
        arguments = ["--kubeconfig", str(self.cluster.kubeconfig), "--state", str(self.state)]
        arguments += ["--namespace", self.namespace]
        self.kubelet.start(
            "tests.cluster.kubelet", *arguments, "--claim", f"{MODEL_CLAIM}={self.models}", env={"HOME": "/root"}
        )

    def close(self) -> None:
        """Objects lose their finalizers, for nobody is left to take them off."""
        for process in self._operators.values():
            process.kill()
        with contextlib.suppress(httpx.HTTPError, Refused):
            for path in (ADAPTERS, POOLS):
                for raw in self.kube.items(path.format(namespace=self.namespace)):
                    where = f"{path.format(namespace=self.namespace)}/{raw['metadata']['name']}"
                    with contextlib.suppress(Refused):
                        self.kube.merge(where, {"metadata": {"finalizers": None}})
            self.kube.delete(f"/api/v1/namespaces/{self.namespace}")
        self.kubelet.stop()
        with contextlib.suppress(httpx.HTTPError):
            self.kube.delete(f"/api/v1/nodes/node-of-{self.namespace}")
        self.kube.close()

    # -- the operator

    def start_operator(
        self, name: str = "operator", *, fault: str = "", module: str = "loraplane_operator", extra: Sequence[str] = ()
    ) -> Process:
        """Under its own ServiceAccount. `fault` is a point of LORAPLANE_FAULT at which it dies, `module` a program
        with the operator's command line, to which `extra` is added."""
        process = self._operators.setdefault(name, Process(name, self.folder))
        env = {"KUBECONFIG": str(self._account()), "HOME": str(self.folder)}
        if fault:
            env["LORAPLANE_FAULT"] = fault
        process.start(
            module,
            "kubernetes",
            *("--namespace", self.namespace),
            *("--engine-image", self.image),
            *("--model-claim", MODEL_CLAIM),
            *("--registry-url", self.services.admin_url),
            *("--artifacts-url", self.services.artifacts_url),
            *("--master-key-file", str(self.services.material.master_file)),
            *("--port", str(self._health if name == "operator" else 0)),
            *extra,
            env=env,
        )
        return process

    def _account(self) -> Path:
        """Made once, so that an operator can be started while the API server is away."""
        if self.account not in self._kubeconfigs:
            self._kubeconfigs[self.account] = self.cluster.service_account_kubeconfig(self.namespace, self.account)
        return self._kubeconfigs[self.account]

    def operator(self, name: str = "operator") -> Process:
        return self._operators[name]

    def kill_operator(self, name: str = "operator") -> None:
        self._operators[name].kill()

    def operator_metrics(self) -> str:
        return httpx.get(f"http://127.0.0.1:{self._health}/metrics", trust_env=False, timeout=10).text

    def operator_health(self, probe: str) -> int:
        """The status code of /health/live or /health/ready; 0 while nobody answers."""
        with contextlib.suppress(httpx.HTTPError):
            url = f"http://127.0.0.1:{self._health}/health/{probe}"
            return httpx.get(url, trust_env=False, timeout=5).status_code
        return 0

    def until_operator_ready(self, seconds: float = 30) -> None:
        until(lambda: self.operator_health("ready") == 200, seconds, lambda: self.operator().tail())

    # -- objects

    def pool(self, name: str = POOL, replicas: int = 2, **spec: Any) -> dict[str, Any]:
        """Apply a pool of the base that fits this system's engines."""
        base = REAL_BASE if self.image == REAL_IMAGE else TINY_BASE
        engine = {"maxModelLen": 256, "maxBatchTokens": 64, "maxSequences": 4, "adapterMemory": "32Mi"}
        wanted = {"baseModel": base, "replicas": replicas, "engine": {**engine, "hostCache": "64Mi"}, **spec}
        return self._apply(POOL_KIND, POOLS, name, wanted)

    def adapter(self, name: str, tenant: str = "acme", *, source: str = "", **spec: Any) -> dict[str, Any]:
        wanted = {
            "tenant": tenant,
            "poolRef": {"name": POOL},
            "source": {"uri": f"file:{source or name}"},
            "warmReplicas": 1,
            **spec,
        }
        return self._apply(ADAPTER_KIND, ADAPTERS, name, wanted)

    def _apply(self, kind: str, path: str, name: str, spec: Mapping[str, Any]) -> dict[str, Any]:
        body = {"apiVersion": API_VERSION, "kind": kind, "metadata": {"name": name}, "spec": spec}
        return self.kube.apply(f"{path.format(namespace=self.namespace)}/{name}", body)

    def adapter_path(self, name: str) -> str:
        return f"{ADAPTERS.format(namespace=self.namespace)}/{name}"

    def pool_path(self, name: str = POOL) -> str:
        return f"{POOLS.format(namespace=self.namespace)}/{name}"

    def get(self, name: str) -> dict[str, Any] | None:
        return self.kube.get(self.adapter_path(name))

    def status(self, name: str) -> dict[str, Any]:
        return (self.get(name) or {}).get("status") or {}

    def condition(self, name: str, kind: str) -> tuple[str, str]:
        """(status, reason); of the pool when `name` is empty."""
        raw = self.get(name) if name else self.kube.get(self.pool_path())
        for each in ((raw or {}).get("status") or {}).get("conditions") or []:
            if each["type"] == kind:
                return each["status"], each["reason"]
        return "", ""

    def ready(self, name: str) -> bool:
        return self.condition(name, "Ready")[0] == "True"

    def until_ready(self, *names: str, seconds: float = 30) -> float:
        """Seconds that it took."""
        begun = time.monotonic()
        for name in names:
            until(lambda name=name: self.ready(name), seconds, lambda name=name: self.explain(name))  # type: ignore[misc]
        return time.monotonic() - begun

    def until_available(self, seconds: float = 90, name: str = POOL) -> None:
        def available() -> bool:
            raw = self.kube.get(self.pool_path(name)) or {}
            status = raw.get("status") or {}
            return status.get("readyReplicas") == raw["spec"].get("replicas", 1) and bool(status.get("baseDigest"))

        until(available, seconds, lambda: self.explain(""))

    def delete(self, name: str) -> None:
        self.kube.delete(self.adapter_path(name))

    def until_gone(self, name: str, seconds: float = 30) -> None:
        until(lambda: self.get(name) is None, seconds, lambda: self.explain(name))

    def clear(self, seconds: float = 60) -> None:
        """Delete all adapters and wait until the operator has let them go."""
        names = [raw["metadata"]["name"] for raw in self.kube.items(ADAPTERS.format(namespace=self.namespace))]
        for name in names:
            self.delete(name)
        for name in names:
            self.until_gone(name, seconds)

    def events(self, name: str = "") -> list[tuple[str, str]]:
        """(reason, message) of this namespace's Events about `name`, or all of the operator's."""
        raw = self.kube.items(f"/api/v1/namespaces/{self.namespace}/events")
        kinds = (ADAPTER_KIND, POOL_KIND)
        mine = [each for each in raw if each["involvedObject"]["kind"] in kinds]
        return [(each["reason"], each["message"]) for each in mine if name in ("", each["involvedObject"]["name"])]

    def explain(self, name: str) -> str:
        """Why a wait may have failed."""
        raw = self.kube.get(self.adapter_path(name) if name else self.pool_path()) or {}
        status = json.dumps(raw.get("status"), indent=1)
        return f"{name or POOL}: {status}\nevents: {self.events(name)[-20:]}\noperator: {self._operators_tail()}"

    def _operators_tail(self) -> str:
        return "\n".join(process.tail(1500) for process in self._operators.values())

    def kubectl(self, *arguments: str) -> str:
        command = ["kubectl", "--kubeconfig", str(self.cluster.kubeconfig), "-n", self.namespace, *arguments]
        env = {"PATH": os.environ.get("PATH", os.defpath), "HOME": str(self.folder)}
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=env, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def columns(self, kind: str) -> dict[str, dict[str, str]]:
        """`kubectl get KIND` by name and column; an empty cell is missing, as it is on the screen."""
        head, *lines = self.kubectl("get", kind).splitlines()
        starts = [(head.index(word), word) for word in head.split()]
        ends = [start for start, _ in starts[1:]] + [1 << 16]
        rows = [
            {word: line[start:end].strip() for (start, word), end in zip(starts, ends, strict=True)} for line in lines
        ]
        return {row["NAME"]: row for row in rows}

    # -- engines

    def pods(self, pool: str = POOL) -> dict[int, PodFile]:
        """By ordinal, as the stand-in runs them now."""
        found = {}
        for file in (self.state / "pods").glob(f"{self.namespace}.{pool}-*.json"):
            with contextlib.suppress(FileNotFoundError):
                pod = msgspec.json.decode(file.read_bytes(), type=PodFile)
                found[int(pod.name.rpartition("-")[2])] = pod
        return found

    def kill_engine(self, ordinal: int, signum: int = signal.SIGKILL) -> PodFile:
        pod = self.pods()[ordinal]
        os.kill(pod.pid, signum)
        return pod

    def engine(self, ordinal: int, method: str, path: str, **options: Any) -> httpx.Response:
        """An engine's admin port, with the credential that its Secret holds."""
        pod = self.pods()[ordinal]
        file = next((self.state / "volumes" / pod.uid).rglob("credentials.json"))
        token = json.loads(file.read_text())["admin"][0]
        headers = {"authorization": f"Bearer {token}", **options.pop("headers", {})}
        url = f"http://{pod.ip}:8001{path}"
        return httpx.request(method, url, headers=headers, trust_env=False, timeout=15, **options)

    def misdeeds(self, ordinal: int, **wanted: Any) -> None:
        """Fake engines only (fake_engine.Misdeeds)."""
        url = f"http://{self.pods()[ordinal].ip}:8002/control"
        assert httpx.post(url, json=wanted, trust_env=False, timeout=5).is_success

    def held(self, ordinal: int) -> dict[str, str]:
        """ref -> residency, as that engine says."""
        with contextlib.suppress(httpx.HTTPError, LookupError, StopIteration, OSError):
            answer = self.engine(ordinal, "GET", "/adapters")
            if answer.is_success:
                return {each["ref"]: each["residency"] for each in answer.json()["adapters"]}
        return {}

    def warm(self, ordinal: int) -> set[str]:
        """The refs that the operator wants warm there, and that are."""
        answer = self.engine(ordinal, "GET", "/adapters")
        listed = answer.json()["adapters"] if answer.is_success else []
        return {each["ref"] for each in listed if each["warm_wanted"] and each["residency"] in ("host", "device")}

    def engine_rows(self, ref: str) -> list[dict[str, Any]]:
        """What every replica that holds it warm says of it."""
        found = []
        for ordinal in self.pods():
            answer = self.engine(ordinal, "GET", "/adapters")
            listed = answer.json()["adapters"] if answer.is_success else []
            found += [each for each in listed if each["ref"] == ref and each["warm_wanted"]]
        return found

    def arguments(self, pool: str, ordinal: int) -> list[str]:
        """Of the pod's container as the API server has it."""
        raw = self.kube.get(f"/api/v1/namespaces/{self.namespace}/pods/{pool}-{ordinal}")
        return list(raw["spec"]["containers"][0]["args"]) if raw is not None else []

    def holders(self, ref: str) -> set[int]:
        return {ordinal for ordinal in self.pods() if self.held(ordinal).get(ref) in ("host", "device")}

    # -- what the API server saw

    def requests(self, since: float, user: str = SERVICE_ACCOUNT) -> list[dict[str, Any]]:
        """Audit entries of that ServiceAccount since that Unix time."""
        name = f"system:serviceaccount:{self.namespace}:{user}"
        found = []
        for line in self.cluster.audit_log.read_text().splitlines():
            if name in line:
                entry = json.loads(line)
                if entry["user"]["username"] == name and _unix(entry["requestReceivedTimestamp"]) >= since:
                    found.append(entry)
        return found


def _unix(text: str) -> float:
    import datetime

    return datetime.datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()


def measured(action: Callable[[], Any], holds: Callable[[], Any], seconds: float, what: Callable[[], str]) -> float:
    """Seconds from the end of `action` until `holds`."""
    action()
    begun = time.monotonic()
    until(holds, seconds, what, every=0.02)
    return time.monotonic() - begun


@contextlib.contextmanager
def running_system(cluster: ClusterAccess, folder: Path, image: str) -> Iterator[System]:
    """Services, stand-in and operator; no pool yet. Tenants acme and globex may be claimed for here."""
    with running_services(folder) as services:
        for source in (ROOT / "examples" / "adapters").iterdir():
            if source.is_dir():
                shutil.copytree(source, services.adapter_root / source.name)
        system = System(cluster, folder, services, image)
        try:
            system.start()
            for tenant in ("acme", "globex"):
                services.tenant(tenant, system.namespace)
            system.start_operator()
            system.until_operator_ready()
            yield system
        finally:
            system.close()


def load(path: Path) -> list[dict[str, Any]]:
    return [each for each in yaml.safe_load_all(path.read_text()) if each]


__all__ = ["FAKE_IMAGE", "REAL_IMAGE", "System", "running_system"]
