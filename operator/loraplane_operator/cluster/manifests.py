"""What a pool is on Kubernetes: a StatefulSet, a headless Service, a Secret of credentials and a
PodDisruptionBudget. Pure functions.
"""

import base64
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from loraplane_core.identity import PoolRef
from loraplane_core.labels import (
    ANNOTATION_EPOCH,
    API_VERSION,
    GROUP,
    LABEL_MANAGED_BY,
    LABEL_POOL,
    MANAGED_BY,
    POOL_KIND,
)
from loraplane_core.wire import encode
from loraplane_core.wire.supervisor import EngineCredentials
from loraplane_operator.actions import WorkloadSpec
from loraplane_operator.cluster import pod_template

#: On pods: the revision they were made for. The StatefulSet replaces none by itself (OnDelete).
ANNOTATION_REVISION = "loraplane.dev/revision"
PORTS = {"data": 8000, "admin": 8001, "metrics": 8002}
MODELS_PATH = "/models"
#: Claims that pools name themselves (pvc://CLAIM/PATH) are mounted at <this>/CLAIM.
CLAIMS_PATH = "/claims"
_SECRETS_PATH = "/var/run/loraplane"
_CACHE_PATH = "/cache"
_TMP_PATH = "/tmp"  # noqa: S108 - an emptyDir of the pod's own
_POD_INDEX = "metadata.labels['apps.kubernetes.io/pod-index']"
#: Engines stop by themselves after --drain-seconds; the kubelet waits a little longer.
DRAIN_SECONDS = 30


@dataclass(frozen=True)
class Site:
    """What the chart decides for all pools."""

    engine_image: str
    model_claim: str
    pod_template_allowed: frozenset[str] = frozenset()  # of pod_template.ALLOWANCES
    image_pull_secrets: tuple[str, ...] = ()  # by name; each is in every namespace with pools


def workload_manifests(
    spec: WorkloadSpec, credentials: EngineCredentials, site: Site
) -> list[tuple[str, dict[str, Any]]]:
    """(API path, manifest), in the order in which they are applied.

    Raises Forbidden (code `pod_template_not_allowed`) or InvalidParameter for a pod template that cannot be used.
    """
    name, namespace = spec.pool.name, spec.pool.namespace
    core, budgets = f"/api/v1/namespaces/{namespace}", f"/apis/policy/v1/namespaces/{namespace}"
    return [
        (f"{core}/secrets/{secret_name(name)}", _secret(spec, credentials)),
        (f"{core}/services/{name}", _service(spec)),
        (f"{budgets}/poddisruptionbudgets/{name}", _budget(spec)),
        (f"/apis/apps/v1/namespaces/{namespace}/statefulsets/{name}", _stateful_set(spec, site)),
    ]


def site_revision(site: Site) -> str:
    """Changes with everything that is no part of a WorkloadSpec: the site, and how this release makes pods."""
    blank = WorkloadSpec(PoolRef("", ""), uid="", replicas=0, engine=(), epoch=0, revision="")
    text = json.dumps(_template(blank, site, ""), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def wished_revision(annotation: str, site: str) -> str:
    """A pod's WorkloadSpec.revision. The annotation as it is, which equals none, where the site was another."""
    return annotation.removesuffix(f".{site}")


def is_pools(metadata: Mapping[str, Any], pool: str) -> bool:
    """Whether the object is controlled by a pool of that name; also by a former one, whose place the next one takes."""
    for owner in metadata.get("ownerReferences") or ():
        if owner.get("controller"):
            group = str(owner.get("apiVersion", "")).partition("/")[0]
            return (group, owner.get("kind"), owner.get("name")) == (GROUP, POOL_KIND, pool)
    return False


def may_take(metadata: Mapping[str, Any], pool: str) -> bool:
    """Whether an object that has a name which the pool needs may be applied over: it is the pool's, or nobody's and
    bears the marks that only this operator gives (its owner was taken off, as by an orphaning deletion)."""
    if any(owner.get("controller") for owner in metadata.get("ownerReferences") or ()):
        return is_pools(metadata, pool)
    labels = metadata.get("labels") or {}
    return (labels.get(LABEL_POOL), labels.get(LABEL_MANAGED_BY)) == (pool, MANAGED_BY)


def secret_name(pool: str) -> str:
    return f"{pool}-engine"


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
        # Not stringData, which is only written: what is applied is what can be read back.
        "data": {"credentials.json": base64.b64encode(encode(credentials)).decode()},
    }


def _service(spec: WorkloadSpec) -> dict[str, Any]:
    """Only for its EndpointSlices: the operator speaks to pods by address, ready or not.

    Not-ready pods are not published: that would make every endpoint `ready`, and readiness is what routing
    reads there. A pod that is not ready is still listed, as one that is not ready.

    It selects by both of our labels: the pool's alone is easily put on something else.
    """
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _service_metadata(spec),
        "spec": {
            "clusterIP": "None",
            "selector": _labels(spec),
            "ports": [{"name": name, "port": port, "targetPort": name} for name, port in PORTS.items()],
        },
    }


class ServiceView(NamedTuple):
    """What of a pool's Service decides whether gateways find its engines."""

    selector: frozenset[tuple[str, str]]
    ports: frozenset[tuple[str, int]]
    epoch: str


def service_view(raw: Mapping[str, Any]) -> ServiceView:
    spec, labels = raw.get("spec") or {}, raw["metadata"].get("labels") or {}
    return ServiceView(
        selector=frozenset((spec.get("selector") or {}).items()),
        ports=frozenset((port.get("name", ""), port["port"]) for port in spec.get("ports") or []),
        epoch=labels.get(ANNOTATION_EPOCH, ""),
    )


def wished_service(spec: WorkloadSpec) -> ServiceView:
    return service_view(_service(spec))


def _service_metadata(spec: WorkloadSpec) -> dict[str, Any]:
    """Its labels, and only they, are copied to the EndpointSlices, where gateways read which epoch to use."""
    metadata = _metadata(spec, spec.pool.name)
    return {**metadata, "labels": {**metadata["labels"], ANNOTATION_EPOCH: str(spec.accepted_epoch)}}


def _budget(spec: WorkloadSpec) -> dict[str, Any]:
    """A drained node takes one replica at a time, also where one is down already for another reason. One that is not
    ready holds no node up: where none is, all nodes would wait for them.
    """
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": _metadata(spec, spec.pool.name),
        "spec": {
            "maxUnavailable": 1,
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
            "selector": {"matchLabels": _labels(spec)},
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
            "template": _template(spec, site, f"{spec.revision}.{site_revision(site)}"),
        },
    }


def _template(spec: WorkloadSpec, site: Site, revision: str) -> dict[str, Any]:
    annotations = {ANNOTATION_REVISION: revision, ANNOTATION_EPOCH: str(spec.epoch)}
    own = {
        "metadata": {"labels": _labels(spec), "annotations": annotations},
        "spec": _pod(spec, site),
    }
    return pod_template.merged(own, spec.pod_template, site.pod_template_allowed)


def _pod(spec: WorkloadSpec, site: Site) -> dict[str, Any]:
    models = {"claimName": _claim(spec) or site.model_claim, "readOnly": True}
    pulling = {"imagePullSecrets": [{"name": name} for name in site.image_pull_secrets]}
    return {
        **(pulling if site.image_pull_secrets else {}),
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": DRAIN_SECONDS + 10,
        "securityContext": {"runAsNonRoot": True, "fsGroup": 65532, "seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [_container(spec, site)],
        "volumes": [
            {"name": "models", "persistentVolumeClaim": models},
            {"name": "credentials", "secret": {"secretName": secret_name(spec.pool.name), "defaultMode": 0o440}},
            {"name": "cache", "emptyDir": {}},
            {"name": "tmp", "emptyDir": {}},
        ],
    }


def _claim(spec: WorkloadSpec) -> str:
    """The claim of the pool's own, when its base lies on one."""
    model = dict(spec.engine).get("model", "")
    return model.removeprefix(f"{CLAIMS_PATH}/").partition("/")[0] if model.startswith(f"{CLAIMS_PATH}/") else ""


def _resources(spec: WorkloadSpec) -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = {}
    for group, name, quantity in spec.resources:
        found.setdefault(group, {})[name] = quantity
    return found


def _container(spec: WorkloadSpec, site: Site) -> dict[str, Any]:
    return {
        "name": "engine",
        "image": spec.image or site.engine_image,
        "command": ["loraplane-engine"],
        "args": _arguments(spec),
        "env": [
            {"name": "POD_INDEX", "valueFrom": {"fieldRef": {"fieldPath": _POD_INDEX}}},
            {"name": "HOME", "value": _TMP_PATH},  # the only writable place beside the cache
        ],
        "ports": [{"name": name, "containerPort": port} for name, port in PORTS.items()],
        "resources": _resources(spec),
        "terminationMessagePolicy": "FallbackToLogsOnError",  # pods.py tells it: there is no right to read logs
        "startupProbe": _probe("/health/live", every=2, failures=300),
        "readinessProbe": _probe("/health/ready", every=1, failures=2),
        "livenessProbe": _probe("/health/live", every=5, failures=6),
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
        },
        "volumeMounts": [
            {"name": "models", "mountPath": _models_path(spec), "readOnly": True},
            {"name": "credentials", "mountPath": _SECRETS_PATH, "readOnly": True},
            {"name": "cache", "mountPath": _CACHE_PATH},
            {"name": "tmp", "mountPath": _TMP_PATH},
        ],
    }


def _models_path(spec: WorkloadSpec) -> str:
    claim = _claim(spec)
    return f"{CLAIMS_PATH}/{claim}" if claim else MODELS_PATH


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
