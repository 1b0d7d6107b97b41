"""The node: configuration of containerd, kubelet and kube-proxy, and the one process under which they run.

That process (node_init) has a pid and a mount namespace of its own. When it ends, however that happens, the kernel
ends every pod and drops every mount and pod network, so there is nothing to take down one by one.
"""

import json
import sys
from pathlib import Path

from tests.cluster.tool.controlplane import NODE_NAME, kubeconfig
from tests.cluster.tool.network import NODE_ADDRESS
from tests.cluster.tool.packages import CNI
from tests.cluster.tool.pki import Pki

DNS_ADDRESS = "10.96.0.10"
POD_RANGE = "10.244.0.0/24"
PAUSE_IMAGE = "localhost/pause:1"
CONTAINERD_SOCKET = "containerd.sock"
POLICIES_STATUS = "policies.json"
_CGROUPS = Path("/sys/fs/cgroup")
_INIT = Path(__file__).with_name("node_init.py")
_ROOT = Path(__file__).parents[3]


def scheduler(binary: Path, state: Path) -> list[str | Path]:
    quick = ("--kube-api-qps", "500", "--kube-api-burst", "1000", "--leader-elect=false")
    return [
        *(binary, "--kubeconfig", kubeconfig(state, "scheduler"), *quick),
        *("--bind-address", "127.0.0.1", "--secure-port", "20259"),
    ]


def node(state: Path) -> list[str | Path]:
    # Private mounts: nothing that the node mounts is seen, or stays, outside.
    namespaces = ("--mount", "--propagation", "private", "--pid", "--fork", "--kill-child=KILL", "--mount-proc")
    return ["unshare", *namespaces, sys.executable, "-P", _INIT, state / "node.json"]


def policies(state: Path) -> list[str | Path]:
    python = ("env", f"PYTHONPATH={_ROOT}", sys.executable, "-P", "-m", "tests.cluster.tool.policies")
    return [*python, kubeconfig(state, "admin"), state / POLICIES_STATUS]


def write_configuration(state: Path, name: str, pki: Pki) -> None:
    """Everything that node_init and its children read, under `state`."""
    (state / "cni").mkdir()
    (state / "cni" / "10-ptp.conflist").write_text(json.dumps(_cni(state, name)))
    (state / "containerd.toml").write_text(_containerd(state))
    (state / "kubelet.json").write_text(json.dumps(_kubelet(state, name, pki)))
    (state / "resolv.conf").write_text("nameserver 127.0.0.1\n")
    commands: dict[str, list[str | Path]] = {
        "containerd": ["containerd", "-c", state / "containerd.toml"],
        "kubelet": _kubelet_command(state),
        "kube-proxy": _proxy_command(state),
    }
    plan = {
        "socket": str(state / CONTAINERD_SOCKET),
        "commands": {key: [str(word) for word in words] for key, words in commands.items()},
        "logs": str(state / "logs"),
    }
    (state / "node.json").write_text(json.dumps(plan))


def create_cgroups(name: str) -> None:
    """The kubelet's root in every v1 hierarchy; a new cpuset has neither processors nor memory."""
    for hierarchy in _CGROUPS.iterdir():
        if not hierarchy.is_dir() or hierarchy.is_symlink() or hierarchy.name == "unified":
            continue
        group = hierarchy / f"lpc-{name}"
        group.mkdir(exist_ok=True)
        for setting in ("cpuset.cpus", "cpuset.mems"):
            if (group / setting).exists():
                (group / setting).write_text((hierarchy / setting).read_text())


def _kubelet_command(state: Path) -> list[str | Path]:
    return [
        *(state / "bin" / "kubelet", "--config", state / "kubelet.json"),
        *("--kubeconfig", kubeconfig(state, "kubelet"), "--hostname-override", NODE_NAME),
        *("--node-ip", NODE_ADDRESS, "--root-dir", state / "kubelet", "--cert-dir", state / "kubelet-pki"),
    ]


def _proxy_command(state: Path) -> list[str | Path]:
    return [
        *(state / "bin" / "kube-proxy", "--kubeconfig", kubeconfig(state, "proxy")),
        *("--hostname-override", NODE_NAME, "--proxy-mode", "nftables", "--cluster-cidr", POD_RANGE),
        *("--conntrack-max-per-core", "0"),
        *("--metrics-bind-address", "127.0.0.1:20249", "--healthz-bind-address", "127.0.0.1:20256"),
    ]


def _cni(state: Path, name: str) -> dict[str, object]:
    """ptp, not bridge: every packet between pods is routed, so that policies see it."""
    addresses = {
        "type": "host-local",
        "dataDir": str(state / "ipam"),
        "ranges": [[{"subnet": POD_RANGE}]],
        "routes": [{"dst": "0.0.0.0/0"}],
    }
    return {
        "cniVersion": "0.4.0",
        "name": f"lpc-{name}",
        "plugins": [{"type": "ptp", "ipMasq": False, "ipam": addresses}],
    }


def _containerd(state: Path) -> str:
    """restrict_oom_score_adj: where lowering it is forbidden every sandbox would fail."""
    return f"""version = 2
root = "{state}/containerd"
state = "{state}/containerd-state"
[grpc]
address = "{state}/{CONTAINERD_SOCKET}"
[plugins."io.containerd.internal.v1.opt"]
path = "{state}/containerd-opt"
[plugins."io.containerd.grpc.v1.cri"]
sandbox_image = "{PAUSE_IMAGE}"
restrict_oom_score_adj = true
disable_apparmor = true
[plugins."io.containerd.grpc.v1.cri".cni]
bin_dir = "{CNI}"
conf_dir = "{state}/cni"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
SystemdCgroup = false
"""


def _kubelet(state: Path, name: str, pki: Pki) -> dict[str, object]:
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "failCgroupV1": False,
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": f"/lpc-{name}",
        "failSwapOn": False,
        "makeIPTablesUtilChains": False,
        "address": NODE_ADDRESS,
        "healthzBindAddress": "127.0.0.1",
        "tlsCertFile": str(pki.certificate("kubelet-serving")),
        "tlsPrivateKeyFile": str(pki.key("kubelet-serving")),
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": str(pki.ca)},
        },
        "authorization": {"mode": "Webhook"},
        "containerRuntimeEndpoint": f"unix://{state}/{CONTAINERD_SOCKET}",
        "podLogsDir": str(state / "pod-logs"),
        "volumePluginDir": str(state / "volume-plugins"),
        "resolvConf": str(state / "resolv.conf"),
        "clusterDNS": [DNS_ADDRESS],
        "clusterDomain": "cluster.local",
        "evictionHard": {"nodefs.available": "1%", "imagefs.available": "1%", "memory.available": "100Mi"},
        "imageGCHighThresholdPercent": 100,
        "imageGCLowThresholdPercent": 99,
        "kubeAPIQPS": 200,
        "kubeAPIBurst": 400,
    }
