"""Command lines of the control plane's processes (flags and their reasons: ADR 0013). No state, no waiting."""

import json
from pathlib import Path

from tests.cluster.tool.network import NODE_ADDRESS
from tests.cluster.tool.pki import Pki, client_kubeconfig

API_PORT = 6443
SERVER = f"https://{NODE_ADDRESS}:{API_PORT}"
ETCD_URL = "http://127.0.0.1:2379"
SERVICE_RANGE = "10.96.0.0/16"
NODE_NAME = "n1"
ISSUER = "https://kubernetes.default.svc.cluster.local"
#: Name of the kubeconfig and its subject. api-kubelet is how the API server calls a kubelet.
CLIENTS = {
    "admin": "/O=system:masters/CN=admin",
    "api-kubelet": "/O=system:masters/CN=api-kubelet",
    "controller-manager": "/CN=system:kube-controller-manager",
    "scheduler": "/CN=system:kube-scheduler",
    "kubelet": f"/O=system:nodes/CN=system:node:{NODE_NAME}",
    "proxy": "/CN=system:kube-proxy",
}
_API_SERVER_NAMES = (
    "IP:10.96.0.1",
    f"IP:{NODE_ADDRESS}",
    "IP:127.0.0.1",
    "DNS:localhost",
    "DNS:kubernetes",
    "DNS:kubernetes.default",
    "DNS:kubernetes.default.svc",
    "DNS:kubernetes.default.svc.cluster.local",
)
#: Every request of a ServiceAccount that is not the controller manager's own.
_AUDIT_POLICY = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived"],
    "rules": [
        {"level": "None", "userGroups": ["system:serviceaccounts:kube-system"]},
        {"level": "Metadata", "userGroups": ["system:serviceaccounts"]},
        {"level": "None"},
    ],
}
_FAST_CLIENT = ("--kube-api-qps", "500", "--kube-api-burst", "1000")


def write_credentials(state: Path) -> Pki:
    """Certificates under `state`/pki, kubeconfigs as `state`/NAME.kubeconfig, and the audit policy."""
    pki = Pki(state / "pki")
    pki.create()
    pki.issue("apiserver", "/CN=kube-apiserver", serves=_API_SERVER_NAMES)
    pki.issue(
        "kubelet-serving",
        f"/O=system:nodes/CN=system:node:{NODE_NAME}",
        serves=(f"IP:{NODE_ADDRESS}", f"DNS:{NODE_NAME}"),
    )
    for name, subject in CLIENTS.items():
        pki.issue(name, subject)
        client_kubeconfig(pki, name, SERVER, kubeconfig(state, name))
    (state / "audit-policy.json").write_text(json.dumps(_AUDIT_POLICY))
    return pki


def kubeconfig(state: Path, name: str) -> Path:
    return state / f"{name}.kubeconfig"


def etcd(binary: Path, state: Path) -> list[str | Path]:
    peer = "http://127.0.0.1:2380"
    client = ("--listen-client-urls", ETCD_URL, "--advertise-client-urls", ETCD_URL)
    peers = ("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--initial-cluster", f"default={peer}")
    # Throw-away data: no fsync.
    return [binary, "--data-dir", state / "etcd", "--unsafe-no-fsync", "--log-level", "warn", *client, *peers]


def api_server(binary: Path, state: Path, pki: Pki) -> list[str | Path]:
    return [
        binary,
        *("--etcd-servers", ETCD_URL),
        *("--bind-address", NODE_ADDRESS, "--advertise-address", NODE_ADDRESS, "--secure-port", str(API_PORT)),
        *("--tls-cert-file", pki.certificate("apiserver"), "--tls-private-key-file", pki.key("apiserver")),
        *("--client-ca-file", pki.ca, "--cert-dir", state / "apiserver"),
        *("--service-account-issuer", ISSUER),
        *("--service-account-key-file", pki.service_account_public),
        *("--service-account-signing-key-file", pki.service_account_key),
        *("--kubelet-client-certificate", pki.certificate("api-kubelet")),
        *("--kubelet-client-key", pki.key("api-kubelet")),
        *("--kubelet-certificate-authority", pki.ca, "--kubelet-preferred-address-types", "InternalIP"),
        *("--authorization-mode", "Node,RBAC", "--enable-admission-plugins", "NodeRestriction"),
        *("--service-cluster-ip-range", SERVICE_RANGE, "--allow-privileged"),
        # Blocking: a request that was answered is in the log.
        *("--audit-policy-file", state / "audit-policy.json", "--audit-log-path", state / "audit.log"),
        *("--audit-log-mode", "blocking"),
    ]


def controller_manager(binary: Path, state: Path, pki: Pki) -> list[str | Path]:
    return [
        binary,
        *("--kubeconfig", kubeconfig(state, "controller-manager")),
        *("--service-account-private-key-file", pki.service_account_key, "--root-ca-file", pki.ca),
        *("--cluster-signing-cert-file", pki.ca, "--cluster-signing-key-file", pki.key("ca")),
        *("--use-service-account-credentials", "--leader-elect=false", "--node-monitor-period", "1s"),
        # With the usual limits its first pass over a new cluster takes 5 s longer.
        *_FAST_CLIENT,
        *("--bind-address", "127.0.0.1", "--secure-port", "20257"),
    ]
