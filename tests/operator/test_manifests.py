"""What a pool is on Kubernetes, as plain data."""

from typing import Any

from loraplane_core.identity import PoolRef
from loraplane_core.wire.supervisor import EngineCredentials
from loraplane_operator.actions import WorkloadSpec
from loraplane_operator.cluster.manifests import Site, workload_manifests

SPEC = WorkloadSpec(
    pool=PoolRef("prod", "llama"),
    uid="u1",
    replicas=3,
    engine=(("max-rank", "64"), ("model", "/models/llama")),
    epoch=1,
    revision="r1",
)
CREDENTIALS = EngineCredentials(epoch=1, data=["d"], state=["s"], admin=["a"], fetch="f")


def made() -> dict[str, dict[str, Any]]:
    manifests = workload_manifests(SPEC, CREDENTIALS, Site("engine:1", "models"))
    return {manifest["kind"]: manifest for _, manifest in manifests}


def container() -> dict[str, Any]:
    found: dict[str, Any] = made()["StatefulSet"]["spec"]["template"]["spec"]["containers"][0]
    return found


def test_secret_comes_before_what_mounts_it() -> None:
    paths = [path for path, _ in workload_manifests(SPEC, CREDENTIALS, Site("engine:1", "models"))]
    assert paths == [
        "/api/v1/namespaces/prod/secrets/llama-engine",
        "/api/v1/namespaces/prod/services/llama",
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
    assert '"fetch":"f"' in secret["stringData"]["credentials.json"]
    assert "stringData" not in str(found)


def test_engine_pod_is_locked_down() -> None:
    pod = made()["StatefulSet"]["spec"]["template"]["spec"]
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert container()["securityContext"]["allowPrivilegeEscalation"] is False
    assert container()["securityContext"]["readOnlyRootFilesystem"] is True


def test_ports_are_named_as_the_endpoint_slices_of_routing_need_them() -> None:
    service = made()["Service"]["spec"]
    assert service["clusterIP"] == "None"
    assert {port["name"] for port in service["ports"]} == {"data", "admin", "metrics"}
