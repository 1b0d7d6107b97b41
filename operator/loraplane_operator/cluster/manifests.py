"""What a pool is on Kubernetes: a StatefulSet, a headless Service and a Secret of credentials. Pure functions."""

from dataclasses import dataclass
from typing import Any

from loraplane_core.labels import API_VERSION, LABEL_MANAGED_BY, LABEL_POOL, MANAGED_BY, POOL_KIND
from loraplane_core.wire import encode
from loraplane_core.wire.supervisor import EngineCredentials
from loraplane_operator.actions import WorkloadSpec

#: On pods: the revision they were made for. The StatefulSet replaces none by itself (OnDelete).
ANNOTATION_REVISION = "loraplane.dev/revision"
PORTS = {"data": 8000, "admin": 8001, "metrics": 8002}
MODELS_PATH = "/models"
_SECRETS_PATH = "/var/run/loraplane"
_CACHE_PATH = "/cache"
_POD_INDEX = "metadata.labels['apps.kubernetes.io/pod-index']"
#: Engines stop by themselves after --drain-seconds; the kubelet waits a little longer.
DRAIN_SECONDS = 30


@dataclass(frozen=True)
class Site:
    """What the chart decides for all pools."""

    engine_image: str
    model_claim: str


def workload_manifests(
    spec: WorkloadSpec, credentials: EngineCredentials, site: Site
) -> list[tuple[str, dict[str, Any]]]:
    """(API path, manifest), in the order in which they are applied."""
    name, namespace = spec.pool.name, spec.pool.namespace
    return [
        (f"/api/v1/namespaces/{namespace}/secrets/{secret_name(name)}", _secret(spec, credentials)),
        (f"/api/v1/namespaces/{namespace}/services/{name}", _service(spec)),
        (stateful_set_path(namespace, name), _stateful_set(spec, site)),
    ]


def secret_name(pool: str) -> str:
    return f"{pool}-engine"


def stateful_set_path(namespace: str, name: str = "") -> str:
    return f"/apis/apps/v1/namespaces/{namespace}/statefulsets" + (f"/{name}" if name else "")


def _metadata(spec: WorkloadSpec, name: str) -> dict[str, Any]:
    """The pool owns all of it: what this operator never deletes goes with the pool."""
    owner = {"apiVersion": API_VERSION, "kind": POOL_KIND, "name": spec.pool.name, "uid": spec.uid, "controller": True}
    return {"name": name, "namespace": spec.pool.namespace, "labels": _labels(spec), "ownerReferences": [owner]}


def _labels(spec: WorkloadSpec) -> dict[str, str]:
    return {LABEL_POOL: spec.pool.name, LABEL_MANAGED_BY: MANAGED_BY}


def _secret(spec: WorkloadSpec, credentials: EngineCredentials) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": _metadata(spec, secret_name(spec.pool.name)),
        "type": "Opaque",
        "stringData": {"credentials.json": encode(credentials).decode()},
    }


def _service(spec: WorkloadSpec) -> dict[str, Any]:
    """Not-ready pods are published too: readers of /state begin before readiness, routing looks at it itself."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(spec, spec.pool.name),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {LABEL_POOL: spec.pool.name},
            "ports": [{"name": name, "port": port, "targetPort": name} for name, port in PORTS.items()],
        },
    }


def _stateful_set(spec: WorkloadSpec, site: Site) -> dict[str, Any]:
    return {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": _metadata(spec, spec.pool.name),
        "spec": {
            "replicas": spec.replicas,
            "serviceName": spec.pool.name,
            "podManagementPolicy": "Parallel",
            "updateStrategy": {"type": "OnDelete"},
            "selector": {"matchLabels": {LABEL_POOL: spec.pool.name}},
            "template": {
                "metadata": {"labels": _labels(spec), "annotations": {ANNOTATION_REVISION: spec.revision}},
                "spec": _pod(spec, site),
            },
        },
    }


def _pod(spec: WorkloadSpec, site: Site) -> dict[str, Any]:
    return {
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": DRAIN_SECONDS + 10,
        "securityContext": {"runAsNonRoot": True, "fsGroup": 65532, "seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [_container(spec, site)],
        "volumes": [
            {"name": "models", "persistentVolumeClaim": {"claimName": site.model_claim, "readOnly": True}},
            {"name": "credentials", "secret": {"secretName": secret_name(spec.pool.name), "defaultMode": 0o440}},
            {"name": "cache", "emptyDir": {}},
        ],
    }


def _container(spec: WorkloadSpec, site: Site) -> dict[str, Any]:
    return {
        "name": "engine",
        "image": site.engine_image,
        "command": ["loraplane-engine"],
        "args": _arguments(spec),
        "env": [
            {"name": "POD_INDEX", "valueFrom": {"fieldRef": {"fieldPath": _POD_INDEX}}},
        ],
        "ports": [{"name": name, "containerPort": port} for name, port in PORTS.items()],
        "startupProbe": _probe("/health/live", every=2, failures=300),
        "readinessProbe": _probe("/health/ready", every=1, failures=2),
        "livenessProbe": _probe("/health/live", every=5, failures=6),
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
        },
        "volumeMounts": [
            {"name": "models", "mountPath": MODELS_PATH, "readOnly": True},
            {"name": "credentials", "mountPath": _SECRETS_PATH, "readOnly": True},
            {"name": "cache", "mountPath": _CACHE_PATH},
        ],
    }


def _probe(path: str, *, every: int, failures: int) -> dict[str, Any]:
    return {"httpGet": {"path": path, "port": "metrics"}, "periodSeconds": every, "failureThreshold": failures}


def _arguments(spec: WorkloadSpec) -> list[str]:
    options = {
        **dict(spec.engine),
        "replica": f"{spec.pool}/$(POD_INDEX)",
        "host": "0.0.0.0",  # noqa: S104 - a pod's own address; the engine demands credentials for it
        "port": str(PORTS["data"]),
        "admin-port": str(PORTS["admin"]),
        "metrics-port": str(PORTS["metrics"]),
        "credentials": f"{_SECRETS_PATH}/credentials.json",
        "cache-dir": _CACHE_PATH,
        "drain-seconds": str(DRAIN_SECONDS),
    }
    return [f"--{name}={value}" for name, value in sorted(options.items())]
