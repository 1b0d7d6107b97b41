"""What a pool may make of its pods, and what not, whichever way it is asked for."""

import json
from typing import Any

import pytest

from loraplane_core.errors import Forbidden, InvalidParameter, LoraplaneError
from loraplane_core.identity import PoolRef
from loraplane_core.resources.reasons import Reason
from loraplane_core.wire.supervisor import EngineCredentials
from loraplane_operator.actions import WorkloadSpec
from loraplane_operator.cluster.manifests import Site, workload_manifests
from loraplane_operator.cluster.pod_template import ALLOWANCES

CREDENTIALS = EngineCredentials(epoch=1, data=["d"], state=["s"], admin=["a"], fetch="f")


def template(patch: Any, *allowed: str) -> dict[str, Any]:
    spec = WorkloadSpec(PoolRef("prod", "llama"), "u1", 1, (), 1, "r1", pod_template=json.dumps(patch))
    site = Site("engine:1", "models", frozenset(allowed))
    made = {raw["kind"]: raw for _, raw in workload_manifests(spec, CREDENTIALS, site)}
    found: dict[str, Any] = made["StatefulSet"]["spec"]["template"]
    return found


def pod(**fields: Any) -> dict[str, Any]:
    return {"spec": fields}


def engine(**fields: Any) -> dict[str, Any]:
    return pod(containers=[{"name": "engine", **fields}])


def security(**fields: Any) -> dict[str, Any]:
    return engine(securityContext=fields)


def volume(**source: Any) -> dict[str, Any]:
    return pod(volumes=[{"name": "extra", **source}])


def test_placement_and_metadata_may_be_set() -> None:
    patch = {
        "metadata": {"labels": {"team": "ml"}, "annotations": {"example.com/scrape": "yes"}},
        "spec": {
            "nodeSelector": {"gpu": "h200"},
            "tolerations": [{"key": "gpu", "operator": "Exists"}],
            "priorityClassName": "serving",
            "runtimeClassName": "nvidia",
        },
    }
    found = template(patch)
    assert found["spec"]["nodeSelector"] == {"gpu": "h200"}
    assert found["spec"]["tolerations"] == [{"key": "gpu", "operator": "Exists"}]
    assert found["metadata"]["labels"]["team"] == "ml"
    assert found["metadata"]["labels"]["loraplane.dev/pool"] == "llama"


def test_named_lists_are_merged_by_their_name() -> None:
    patch = engine(env=[{"name": "HF_HOME", "value": "/tmp"}], volumeMounts=[{"name": "extra", "mountPath": "/extra"}])
    patch["spec"]["volumes"] = [{"name": "extra", "emptyDir": {}}]
    found = template(patch)["spec"]
    (container,) = found["containers"]
    assert container["args"]
    assert {each["name"] for each in container["env"]} == {"POD_INDEX", "HOME", "HF_HOME"}
    assert {each["mountPath"] for each in container["volumeMounts"]} >= {"/models", "/cache", "/extra"}
    assert {each["name"] for each in found["volumes"]} == {"models", "credentials", "cache", "tmp", "extra"}


def test_operators_labels_and_revision_cannot_be_changed() -> None:
    patch = {"metadata": {"labels": {"loraplane.dev/pool": "other"}, "annotations": {"loraplane.dev/revision": "x"}}}
    found = template(patch)["metadata"]
    assert found["labels"]["loraplane.dev/pool"] == "llama"
    assert found["annotations"]["loraplane.dev/revision"].startswith("r1.")


SIDECAR = {
    "name": "sidecar",
    "image": "x:1",
    "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
}


def test_sidecar_that_keeps_the_rules_may_be_added() -> None:
    names = [each["name"] for each in template(pod(containers=[SIDECAR]))["spec"]["containers"]]
    assert names == ["engine", "sidecar"]


REFUSED = [
    ("service-account", pod(serviceAccountName="admin")),
    ("service-account", pod(serviceAccount="admin")),
    ("service-account", pod(automountServiceAccountToken=True)),
    ("service-account", pod(automountServiceAccountToken=None)),
    ("service-account", volume(projected={"sources": [{"serviceAccountToken": {"path": "token"}}]})),
    ("host-path", volume(hostPath={"path": "/"})),
    ("host-path", volume(nfs={"server": "s", "path": "/"})),
    ("host-path", engine(volumeDevices=[{"name": "d", "devicePath": "/dev/sda"}])),
    ("host-namespaces", pod(hostNetwork=True)),
    ("host-namespaces", pod(hostPID=True)),
    ("host-namespaces", pod(hostIPC=True)),
    ("host-namespaces", engine(ports=[{"name": "data", "containerPort": 8000, "hostPort": 80}])),
    ("privilege", security(privileged=True)),
    ("privilege", security(allowPrivilegeEscalation=True)),
    ("privilege", security(allowPrivilegeEscalation=None)),
    ("privilege", security(capabilities={"add": ["SYS_ADMIN"], "drop": ["ALL"]})),
    ("privilege", security(capabilities=None)),
    ("privilege", security(runAsNonRoot=False)),
    ("privilege", security(runAsUser=0)),
    ("privilege", security(procMount="Unmasked")),
    ("privilege", security(seccompProfile={"type": "Unconfined"})),
    ("privilege", pod(securityContext={"runAsNonRoot": False})),
    ("privilege", pod(securityContext=None)),
    ("privilege", pod(securityContext={"seccompProfile": None})),
    ("privilege", pod(securityContext={"seccompProfile": {"type": None}})),
    ("privilege", security(readOnlyRootFilesystem=False)),
    (
        "privilege",
        {"metadata": {"annotations": {"container.apparmor.security.beta.kubernetes.io/engine": "unconfined"}}},
    ),
    ("privilege", security(readOnlyRootFilesystem=None)),
    ("host-namespaces", engine(readinessProbe={"httpGet": {"host": "10.0.0.1"}})),
    ("host-namespaces", engine(lifecycle={"preStop": {"tcpSocket": {"host": "10.0.0.1", "port": 22}}})),
    ("host-namespaces", pod(containers=[{**SIDECAR, "livenessProbe": {"tcpSocket": {"host": "db", "port": 5432}}}])),
    ("privilege", pod(securityContext={"sysctls": [{"name": "a", "value": "b"}]})),
    ("privilege", pod(initContainers=[{"name": "init", "image": "x", "securityContext": {"privileged": True}}])),
    ("privilege", pod(containers=[{"name": "sidecar", "image": "x:1"}])),
    ("secrets", volume(secret={"secretName": "release"})),
    ("secrets", volume(projected={"sources": [{"secret": {"name": "release"}}]})),
    ("secrets", engine(envFrom=[{"secretRef": {"name": "release"}}])),
    ("secrets", engine(env=[{"name": "K", "valueFrom": {"secretKeyRef": {"name": "release", "key": "k"}}}])),
]


@pytest.mark.parametrize(("allowance", "patch"), REFUSED, ids=lambda value: value if isinstance(value, str) else None)
def test_what_needs_an_allowance_is_refused_without_it(allowance: str, patch: dict[str, Any]) -> None:
    with pytest.raises(Forbidden) as refused:
        template(patch)
    assert refused.value.reason == Reason.POD_TEMPLATE_NOT_ALLOWED
    assert refused.value.message.startswith("spec.podTemplate: ")
    others = [each for each in ALLOWANCES if each != allowance]
    with pytest.raises(Forbidden):
        template(patch, *others)
    template(patch, *ALLOWANCES)


@pytest.mark.parametrize(
    "patch",
    [
        {"spec": {"volumes": [{"name": "credentials", "emptyDir": {}}]}},
        {"spec": {"containers": None}},
        {"kind": "Pod"},
        {"metadata": {"ownerReferences": []}},
        {"metadata": {"labels": {"app.kubernetes.io/component": "gateway"}}},
        [],
        {"spec": []},
        {"metadata": []},
        {"spec": {"containers": ["engine"]}},
    ],
    ids=str,
)
def test_what_would_break_the_engine_is_refused_whatever_is_allowed(patch: Any) -> None:
    with pytest.raises((Forbidden, InvalidParameter)):
        template(patch, *ALLOWANCES)


HOSTILE = [
    {"spec": {"securityContext": "x"}},
    {"spec": {"securityContext": []}},
    {"spec": {"volumes": {"name": "x"}}},
    {"spec": {"volumes": "x"}},
    {"spec": {"volumes": [{"name": "x", "projected": "x"}]}},
    {"spec": {"volumes": [{"name": "x", "projected": {"sources": ["x"]}}]}},
    {"spec": {"volumes": [{"name": "x", "projected": {"sources": 3}}]}},
    {"spec": {"initContainers": "x"}},
    {"spec": {"initContainers": ["x"]}},
    {"spec": {"containers": {"name": "engine"}}},
    {"spec": {"containers": [{"name": ["engine"]}]}},
    engine(ports="x"),
    engine(ports=["x"]),
    engine(env=[3]),
    engine(env=3),
    engine(envFrom=[3]),
    engine(securityContext=7),
    engine(securityContext={"capabilities": "ALL"}),
    engine(securityContext={"seccompProfile": "Unconfined"}),
    engine(securityContext={"capabilities": {"drop": 3}}),
    {"spec": 3},
    {"metadata": {"labels": "x"}},
    3,
]


@pytest.mark.parametrize("patch", HOSTILE, ids=str)
def test_patch_of_wrong_types_is_refused_with_a_reason(patch: Any) -> None:
    with pytest.raises(LoraplaneError) as refused:
        template(patch)
    assert refused.value.status < 500
