"""What a pool is on Kubernetes, as plain data."""

import base64
import json
from dataclasses import replace
from typing import Any

import pytest

from loraplane_core.credentials import engine_credential, role_key
from loraplane_core.errors import InvalidParameter
from loraplane_core.identity import PoolRef, is_name
from loraplane_core.labels import API_VERSION, LABEL_POOL
from loraplane_core.resources.documents import parse_document
from loraplane_core.wire.supervisor import EngineCredentials
from loraplane_operator.actions import WorkloadSpec
from loraplane_operator.cluster.manifests import Site, may_take, site_revision, wished_revision, workload_manifests
from tests.core.resource_table import adapter, pool

SPEC = WorkloadSpec(
    pool=PoolRef("prod", "llama"),
    uid="u1",
    replicas=3,
    engine=(("max-rank", "64"), ("model", "/models/llama")),
    epoch=1,
    revision="r1",
)
CREDENTIALS = EngineCredentials(epoch=1, data=["d"], state=["s"], admin=["a"], fetch="f")


def made(**changes: Any) -> dict[str, dict[str, Any]]:
    manifests = workload_manifests(replace(SPEC, **changes), CREDENTIALS, Site("engine:1", "models"))
    return {manifest["kind"]: manifest for _, manifest in manifests}


def container(**changes: Any) -> dict[str, Any]:
    found: dict[str, Any] = made(**changes)["StatefulSet"]["spec"]["template"]["spec"]["containers"][0]
    return found


def pod_spec(**changes: Any) -> dict[str, Any]:
    found: dict[str, Any] = made(**changes)["StatefulSet"]["spec"]["template"]["spec"]
    return found


def test_secret_comes_before_what_mounts_it() -> None:
    paths = [path for path, _ in workload_manifests(SPEC, CREDENTIALS, Site("engine:1", "models"))]
    assert paths == [
        "/api/v1/namespaces/prod/secrets/llama-engine",
        "/api/v1/namespaces/prod/services/llama",
        "/apis/policy/v1/namespaces/prod/poddisruptionbudgets/llama",
        "/apis/apps/v1/namespaces/prod/statefulsets/llama",
    ]


def test_all_of_it_is_owned_by_the_pool() -> None:
    for manifest in made().values():
        (owner,) = manifest["metadata"]["ownerReferences"]
        assert (owner["kind"], owner["name"], owner["uid"]) == ("BaseModelPool", "llama", "u1")


def test_replicas_start_in_parallel_and_are_replaced_by_the_operator_only() -> None:
    spec = made()["StatefulSet"]["spec"]
    assert (spec["replicas"], spec["podManagementPolicy"]) == (3, "Parallel")
    assert spec["updateStrategy"] == {"type": "OnDelete"}


def test_engine_gets_its_options_and_its_own_id() -> None:
    arguments = container()["args"]
    assert "--max-rank=64" in arguments
    assert "--model=/models/llama" in arguments
    assert "--replica=prod/llama/$(POD_INDEX)" in arguments


def test_credentials_are_only_in_the_secret() -> None:
    found = made()
    secret = found.pop("Secret")
    held = json.loads(base64.b64decode(secret["data"]["credentials.json"]))
    assert (held["epoch"], held["fetch"]) == (1, "f")
    assert "data" not in found["Service"] and "credentials.json" not in str(found["Service"])
    assert secret["data"]["credentials.json"] not in str(found)


def test_engine_pod_is_locked_down() -> None:
    pod = pod_spec()
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert container()["securityContext"]["allowPrivilegeEscalation"] is False
    assert container()["securityContext"]["readOnlyRootFilesystem"] is True


def test_ports_are_named_as_the_endpoint_slices_of_routing_need_them() -> None:
    service = made()["Service"]["spec"]
    assert service["clusterIP"] == "None"
    assert {port["name"] for port in service["ports"]} == {"data", "admin", "metrics"}


def test_endpoints_are_ready_only_when_their_pods_are() -> None:
    """With publishNotReadyAddresses the EndpointSlice would call every endpoint ready."""
    assert not made()["Service"]["spec"].get("publishNotReadyAddresses")


def test_a_drained_node_takes_one_replica_at_a_time() -> None:
    """And one that is not ready at any time: else a pool that cannot start would hold up every drain."""
    spec = made()["PodDisruptionBudget"]["spec"]
    assert spec["maxUnavailable"] == 1
    assert spec["unhealthyPodEvictionPolicy"] == "AlwaysAllow"
    assert spec["selector"]["matchLabels"] == made()["StatefulSet"]["spec"]["template"]["metadata"]["labels"]


def test_a_pod_that_bears_only_the_pools_label_gets_no_requests() -> None:
    selector = made()["Service"]["spec"]["selector"]
    assert selector.items() > {LABEL_POOL: SPEC.pool.name}.items()
    assert selector == made()["StatefulSet"]["spec"]["template"]["metadata"]["labels"]


OWNER = {"apiVersion": API_VERSION, "kind": "BaseModelPool", "name": "pool", "uid": "u", "controller": True}
OURS = {LABEL_POOL: "pool", "app.kubernetes.io/managed-by": "loraplane-operator"}


@pytest.mark.parametrize(
    ("metadata", "taken"),
    [
        ({"ownerReferences": [OWNER]}, True),
        ({"ownerReferences": [{**OWNER, "uid": "a former pool's"}]}, True),
        ({"ownerReferences": [{**OWNER, "name": "other"}], "labels": OURS}, False),
        ({"ownerReferences": [{**OWNER, "apiVersion": "example.com/v1"}], "labels": OURS}, False),
        ({"ownerReferences": [{**OWNER, "kind": "Deployment"}], "labels": OURS}, False),
        ({"ownerReferences": [{**OWNER, "controller": False, "kind": "Team"}], "labels": OURS}, True),
        ({"labels": OURS}, True),  # orphaned
        ({"labels": {LABEL_POOL: "pool"}}, False),
        ({"labels": {**OURS, LABEL_POOL: "other"}}, False),
        ({}, False),
    ],
)
def test_only_what_was_a_pools_of_that_name_is_applied_over(metadata: dict[str, Any], taken: bool) -> None:
    assert may_take(metadata, "pool") is taken


def test_kubelet_waits_longer_than_the_engine_drains() -> None:
    (drain,) = [each for each in container()["args"] if each.startswith("--drain-seconds=")]
    assert pod_spec()["terminationGracePeriodSeconds"] > float(drain.partition("=")[2])


def test_how_an_engine_ended_stands_in_its_pod() -> None:
    """The operator tells it from there: it may read no logs."""
    assert container()["terminationMessagePolicy"] == "FallbackToLogsOnError"


def test_images_are_pulled_with_the_secrets_of_the_site() -> None:
    site = Site("engine:1", "models", image_pull_secrets=("mirror", "backup"))
    manifests = {manifest["kind"]: manifest for _, manifest in workload_manifests(SPEC, CREDENTIALS, site)}
    found = manifests["StatefulSet"]["spec"]["template"]["spec"]["imagePullSecrets"]
    assert found == [{"name": "mirror"}, {"name": "backup"}]
    assert "imagePullSecrets" not in pod_spec()


def test_pool_may_choose_image_and_resources() -> None:
    found = container(image="mine:2", resources=(("limits", "memory", "4Gi"), ("requests", "cpu", "2")))
    assert found["image"] == "mine:2"
    assert found["resources"] == {"limits": {"memory": "4Gi"}, "requests": {"cpu": "2"}}
    assert container()["image"] == "engine:1"


def test_base_on_a_claim_of_its_own_is_mounted_from_there_read_only() -> None:
    engine = (("model", "/claims/bases/llama"),)
    (volume,) = [each for each in pod_spec(engine=engine)["volumes"] if each["name"] == "models"]
    (mount,) = [each for each in container(engine=engine)["volumeMounts"] if each["name"] == "models"]
    assert volume["persistentVolumeClaim"] == {"claimName": "bases", "readOnly": True}
    assert (mount["mountPath"], mount["readOnly"]) == ("/claims/bases", True)


def test_pools_of_one_name_in_two_namespaces_share_nothing_o70() -> None:
    """A name is one within its namespace, and no object's name is made of anything but DNS-safe ones."""
    engine = (("model", "/models/llama-3.1-8b"), ("served-name", "meta-llama/Llama-3.1-8B.Instruct"))
    found = []
    for namespace in ("prod", "team-b"):
        spec = replace(SPEC, pool=PoolRef(namespace, "llama"), engine=engine)
        manifests = workload_manifests(spec, CREDENTIALS, Site("engine:1", "models"))
        found.append({path for path, _ in manifests})
        for _, manifest in manifests:
            assert manifest["metadata"]["namespace"] == namespace
            assert is_name(manifest["metadata"]["name"])
    assert found[0].isdisjoint(found[1])
    one, other = (replace(SPEC, pool=PoolRef(namespace, "llama")) for namespace in ("prod", "team-b"))
    assert "--replica=prod/llama/$(POD_INDEX)" in container(pool=one.pool)["args"]
    assert "--replica=team-b/llama/$(POD_INDEX)" in container(pool=other.pool)["args"]
    key = role_key(b"m" * 32, "admin")
    assert engine_credential(key, one.pool, 1) != engine_credential(key, other.pool, 1)


@pytest.mark.parametrize("kind", ["BaseModelPool", "LoRAAdapter"])
@pytest.mark.parametrize("name", ["llama-3.1", "llama_3", "Llama", "-llama", "llama."])
def test_a_name_that_would_make_no_service_or_label_is_refused_o70(kind: str, name: str) -> None:
    made = pool() if kind == "BaseModelPool" else adapter()
    with pytest.raises(InvalidParameter, match="must be a DNS label"):
        parse_document({**made, "metadata": {**made["metadata"], "name": name}}, where="object")


def test_pods_of_another_site_or_release_are_of_another_revision() -> None:
    here, there = Site("engine:1", "models"), Site("engine:2", "models")
    annotations = made()["StatefulSet"]["spec"]["template"]["metadata"]["annotations"]
    annotation = annotations["loraplane.dev/revision"]
    assert wished_revision(annotation, site_revision(here)) == SPEC.revision
    assert wished_revision(annotation, site_revision(there)) != SPEC.revision


def test_epochs_are_where_their_readers_look() -> None:
    """EndpointSlices get the Service's labels; the operator reads a pod's own annotation."""
    found = made(epoch=3, accepted_epoch=2)
    assert found["Service"]["metadata"]["labels"]["loraplane.dev/credential-epoch"] == "2"
    template = found["StatefulSet"]["spec"]["template"]["metadata"]
    assert template["annotations"]["loraplane.dev/credential-epoch"] == "3"
