"""One cluster: `start` makes the namespace and the processes, `stop` leaves nothing.

Whoever has the state folder can use it: `Cluster(state)` in a test speaks to the cluster that another process
started. Anything may be killed at any moment; `stop`, and the next `start`, clean up after it.
"""

import contextlib
import fcntl
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import httpx

from tests.cluster.kube import Kube, Refused
from tests.cluster.tool import controlplane, dns, node
from tests.cluster.tool.build import build
from tests.cluster.tool.errors import ClusterError
from tests.cluster.tool.images import reference_and_digest, write_images
from tests.cluster.tool.leftovers import (
    BASE,
    STATE_VARIABLE,
    cgroups,
    leftovers,
    mounts_under,
    processes_of,
    state_folder,
)
from tests.cluster.tool.network import Network
from tests.cluster.tool.pki import Pki, write_kubeconfig
from tests.cluster.tool.policies import in_force
from tests.cluster.tool.processes import Processes, kill_all

DEFAULT_NAME = "loraplane"
START_SECONDS = 60.0
CALL_SECONDS = 10.0
TOKEN_SECONDS = 24 * 3600
_POLL_SECONDS = 0.05
_COMMAND_SECONDS = 20.0
#: Marks a cluster that was left running on purpose.
_DETACHED = "detached"


class Cluster:
    """`state` lies below the tool's base folder; its name is the cluster's, and no two run at once.

    `level`: "api" is etcd, API server and controller manager; "node" runs pods too.
    """

    def __init__(self, state: Path, level: str = "api") -> None:
        self.name = state.name
        if state != state_folder(self.name):
            raise ClusterError(f"a cluster's state lies at {state_folder('NAME')}, not at {state}")
        self.state = state
        self.level = level
        self.server = controlplane.SERVER
        self.kubeconfig = controlplane.kubeconfig(state, "admin")
        self.audit_log = state / "audit.log"
        self.kubectl = state / "bin" / "kubectl"
        self.network = Network(self.name)
        self._pki = Pki(state / "pki")
        self.ca = self._pki.ca
        environment = {"PATH": os.environ.get("PATH", os.defpath), STATE_VARIABLE: str(state), "HOME": str(state)}
        self.processes = Processes(state, environment)
        self._lock: IO[str] | None = None

    # -- start and stop

    def start(self, *, bound: bool = True) -> None:
        """Ready on return. `bound`: its processes die with this one (start it from the main thread)."""
        binaries = build(self.level)  # outside of the namespace: needs the network
        self.claim()
        self._clear()
        self.state.mkdir(mode=0o700)
        (self.state / "bin").mkdir()
        for name, path in binaries.items():
            self._binary(name).symlink_to(path)
        controlplane.write_credentials(self.state)
        self.network.create()
        self._start("etcd", controlplane.etcd(self._binary("etcd"), self.state), bound)
        self.start_api_server(bound=bound)
        self._until(self._has_default_account, "the default ServiceAccount", "controller-manager")
        if self.level == "node":
            self._start_node(bound)
        if not bound:
            (self.state / _DETACHED).touch()
            self._release()

    def claim(self) -> None:
        """The name is this process's until `stop`; refused when a cluster of that name is in use."""
        self._hold()
        if (self.state / _DETACHED).exists() and self.running():
            self._release()
            raise ClusterError(f"cluster {self.name} runs already; `make cluster-down`, or use another --name")

    def stop(self) -> None:
        """What is not there is stopped. Raises ClusterError with what could not be removed."""
        self._hold()
        self._clear()
        self._release()
        left = leftovers(self.name)
        if left:
            raise ClusterError("\n".join([f"cluster {self.name} left behind:", *left]))

    def keep_logs(self) -> Path:
        """A copy of the processes' output and of the audit log that outlives the stop; the last one's is replaced."""
        kept = BASE / f"{self.name}.logs"
        shutil.rmtree(kept, ignore_errors=True)
        shutil.copytree(self.state / "logs", kept)
        if self.audit_log.exists():
            shutil.copy(self.audit_log, kept)
        return kept

    def running(self) -> bool:
        """Its API server's process is there."""
        return self.processes.pid("api-server") is not None

    # -- what tests do to it

    def stop_api_server(self) -> None:
        """kill -9; its data stays. The controller manager goes with it, as one does that cannot renew its lease:
        it would come back to the watches only after half a minute of back-off."""
        self.processes.kill("api-server")
        self.processes.kill("controller-manager")

    def start_api_server(self, *, bound: bool = False) -> None:
        """Ready on return."""
        self._start("api-server", controlplane.api_server(self._binary("kube-apiserver"), self.state, self._pki), bound)
        self._until(self._is_ready, "the API server", "api-server", "etcd")
        manager = controlplane.controller_manager(self._binary("kube-controller-manager"), self.state, self._pki)
        self._start("controller-manager", manager, bound)

    def compact_etcd(self) -> None:
        """Nobody can resume a watch from before now: it gets 410.

        The API server is restarted, since its watch cache would still know what etcd has forgotten.
        """
        with self.network.entered(), httpx.Client(timeout=CALL_SECONDS, trust_env=False) as http:
            header = http.post(f"{controlplane.ETCD_URL}/v3/kv/range", json={"key": "AA=="}).raise_for_status().json()
            revision = {"revision": header["header"]["revision"], "physical": True}
            self.stop_api_server()
            http.post(f"{controlplane.ETCD_URL}/v3/kv/compaction", json=revision).raise_for_status()
        self.start_api_server()

    def service_account_kubeconfig(self, namespace: str, name: str) -> Path:
        """A kubeconfig with a fresh token of that ServiceAccount, which must exist."""
        path = f"/api/v1/namespaces/{namespace}/serviceaccounts/{name}/token"
        request = {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenRequest",
            "spec": {"expirationSeconds": TOKEN_SECONDS},
        }
        answer = self._call("POST", path, request)
        folder = self.state / "accounts"
        folder.mkdir(exist_ok=True, mode=0o700)
        target = folder / f"{namespace}.{name}.kubeconfig"
        write_kubeconfig(self.ca, {"token": answer["status"]["token"]}, self.server, target)
        return target

    def load_image(self, archive: Path) -> None:
        """A docker or OCI archive becomes an image of the node (level "node"); use `imagePullPolicy: Never`. An OCI
        archive that is one already costs nothing."""
        named = reference_and_digest(archive)
        if named is not None and named[1] in self._images("list", f"name=={named[0]}").stdout:
            return
        done = self._images("import", str(archive))
        if done.returncode != 0:
            raise ClusterError(f"{archive.name} is no image that containerd takes:\n{done.stderr[-2000:]}")

    def policies_in_force(self) -> bool:
        """The node goes by every NetworkPolicy, pod and namespace as they are now (level "node")."""
        with self.network.entered(), contextlib.closing(Kube(self.kubeconfig)) as kube:
            return in_force(kube, self.state / node.POLICIES_STATUS)

    def start_policies(self, *, bound: bool = False) -> None:
        """The enforcer of NetworkPolicies, which the node starts with; one that runs already stays."""
        self._start("policies", node.policies(self.state), bound)

    # -- inside

    def _images(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        address = ("--address", str(self.state / node.CONTAINERD_SOCKET), "--namespace", "k8s.io")
        command = ["ctr", *address, "images", *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=START_SECONDS, check=False)

    def _hold(self) -> None:
        """Held until `stop`, or until this process ends however it does."""
        if self._lock is not None:
            return
        BASE.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = (BASE / f"{self.name}.lock").open("w")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            raise ClusterError(
                f"cluster {self.name} belongs to a process that still runs; use another --name"
            ) from None
        self._lock = lock

    def _release(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _binary(self, name: str) -> Path:
        return self.state / "bin" / name

    def _start(self, name: str, command: list[str | Path], bound: bool) -> None:
        """One that runs already stays."""
        if self.processes.pid(name) is not None:
            return
        with self.network.entered():
            self.processes.start(name, command, bound=bound)

    def _start_node(self, bound: bool) -> None:
        """Node and DNS are ready on return."""
        node.create_cgroups(self.name)
        node.write_configuration(self.state, self.name, self._pki)
        self._start("scheduler", node.scheduler(self._binary("kube-scheduler"), self.state), bound)
        self._start("node", node.node(self.state), bound)
        self.start_policies(bound=bound)
        images = write_images(self.state / "images", self._binary("coredns"))
        self._until((self.state / node.CONTAINERD_SOCKET).exists, "containerd", "node")
        for archive in images:
            self.load_image(archive)
        for collection, body in dns.objects():
            self._call("POST", collection, body)
        self._until(self._has_dns, "DNS", "node", "scheduler")
        self._until((self.state / node.POLICIES_STATUS).exists, "the enforcer of NetworkPolicies", "policies")

    def _has_dns(self) -> bool:
        return bool(self._call("GET", dns.DEPLOYMENT).get("status", {}).get("availableReplicas"))

    def _call(self, method: str, path: str, body: Any = None) -> dict[str, Any]:
        with self.network.entered(), contextlib.closing(Kube(self.kubeconfig)) as kube:
            return kube.call(method, path, body)

    def _is_ready(self) -> bool:
        return str(self._call("GET", "/readyz")["message"]) == "ok"

    def _has_default_account(self) -> bool:
        return bool(self._call("GET", "/api/v1/namespaces/default/serviceaccounts/default"))

    def _until(self, holds: Callable[[], bool], what: str, *needs: str) -> None:
        """Until it answers yes; a process of `needs` that ends meanwhile ends the wait with its last words."""
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            with contextlib.suppress(Refused, httpx.TransportError):
                if holds():
                    return
            for name in needs:
                if self.processes.pid(name) is None:
                    raise ClusterError(f"{name} ended during its start:\n{self.processes.tail(name)}")
            time.sleep(_POLL_SECONDS)
        tails = "\n".join(self.processes.tail(name) for name in needs)
        raise ClusterError(f"{what} was not ready after {START_SECONDS:.0f} s:\n{tails}")

    def _clear(self) -> None:
        for _ in range(3):  # what starts children may do so while it is being ended
            found = processes_of(self.state, self.network)
            if not found or not kill_all(found):
                break
        for mount in mounts_under(self.state):
            _unmount(mount)
        self.network.remove()
        for group in cgroups(self.name):
            _remove_groups(group)
        self._remove_state()

    def _remove_state(self) -> None:
        """Never through a mount: what is mounted there is not ours to delete."""
        mounts = mounts_under(self.state)
        if mounts:
            raise ClusterError(f"not deleting {self.state}: mounted below it are {', '.join(mounts)}")
        if self.state.exists():
            shutil.rmtree(self.state)


def _unmount(path: str) -> None:
    subprocess.run(["umount", "--lazy", path], check=False, capture_output=True, timeout=_COMMAND_SECONDS)


def _remove_groups(root: Path) -> None:
    """A cgroup is removed by rmdir, the deepest first; one that still holds a process is reported as left behind."""
    deadline = time.monotonic() + _COMMAND_SECONDS
    while root.is_dir() and time.monotonic() < deadline:
        for group in [*sorted((path for path in root.rglob("*") if path.is_dir()), reverse=True), root]:
            with contextlib.suppress(OSError):
                group.rmdir()
        time.sleep(_POLL_SECONDS)  # the kernel may still be ending a pod
