"""The cluster's DNS: CoreDNS as a Deployment, so that policies can name its pods."""

from typing import Any

from tests.cluster.tool.images import DNS_IMAGE
from tests.cluster.tool.node import DNS_ADDRESS

_NAMESPACE = "/api/v1/namespaces/kube-system"
_DEPLOYMENTS = "/apis/apps/v1/namespaces/kube-system/deployments"
_RBAC = "/apis/rbac.authorization.k8s.io/v1"
DEPLOYMENT = f"{_DEPLOYMENTS}/coredns"
_COREFILE = """.:53 {
    errors
    ready :8181
    kubernetes cluster.local in-addr.arpa {
        pods insecure
        ttl 5
    }
    cache 5
}
"""


def objects() -> list[tuple[str, dict[str, Any]]]:
    """Collection and object, in the order in which they are made."""
    account = {"kind": "ServiceAccount", "name": "coredns", "namespace": "kube-system"}
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "system:coredns"}
    rules = [
        {"apiGroups": [""], "resources": ["services", "pods", "namespaces"], "verbs": ["list", "watch"]},
        {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["list", "watch"]},
    ]
    ports = [{"name": "dns", "port": 53, "protocol": "UDP"}, {"name": "dns-tcp", "port": 53, "protocol": "TCP"}]
    labels = {"k8s-app": "kube-dns"}
    service = {"clusterIP": DNS_ADDRESS, "selector": labels, "ports": ports}
    return [
        (f"{_NAMESPACE}/serviceaccounts", {"metadata": {"name": "coredns"}}),
        (f"{_RBAC}/clusterroles", {"metadata": {"name": role["name"]}, "rules": rules}),
        (
            f"{_RBAC}/clusterrolebindings",
            {"metadata": {"name": role["name"]}, "roleRef": role, "subjects": [account]},
        ),
        (f"{_NAMESPACE}/configmaps", {"metadata": {"name": "coredns"}, "data": {"Corefile": _COREFILE}}),
        (f"{_NAMESPACE}/services", {"metadata": {"name": "kube-dns", "labels": labels}, "spec": service}),
        (_DEPLOYMENTS, {"metadata": {"name": "coredns"}, "spec": _deployment(labels)}),
    ]


def _deployment(labels: dict[str, str]) -> dict[str, Any]:
    container = {
        "name": "coredns",
        "image": DNS_IMAGE,
        "imagePullPolicy": "Never",
        "command": ["/coredns", "-conf", "/etc/coredns/Corefile"],
        "ports": [{"containerPort": 53, "protocol": "UDP"}, {"containerPort": 53, "protocol": "TCP"}],
        "readinessProbe": {"httpGet": {"path": "/ready", "port": 8181}, "periodSeconds": 1},
        "volumeMounts": [{"name": "config", "mountPath": "/etc/coredns"}],
    }
    pod = {
        "serviceAccountName": "coredns",
        "priorityClassName": "system-cluster-critical",
        "dnsPolicy": "Default",
        "terminationGracePeriodSeconds": 1,
        "containers": [container],
        "volumes": [{"name": "config", "configMap": {"name": "coredns"}}],
    }
    return {"selector": {"matchLabels": labels}, "template": {"metadata": {"labels": labels}, "spec": pod}}
