"""The chart against the real API server: every rendering is taken, what is made once stays, the hook frees objects.

No pods run here: what the chart starts is tested in tests/cluster/node.
"""

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from loraplane_core.labels import FINALIZER, LABEL_POOL
from loraplane_gateway.data.routing.endpoints import Endpoints
from loraplane_gateway.data.routing.slices import EndpointSlices
from tests.charts.helm import CHART, NAMESPACE, RELEASE, SETS, HelmFailed, helm, objects, pod_templates, template
from tests.cluster.install import restricted_namespaces
from tests.cluster.kube import ADAPTERS, POOLS, Kube, Refused, settings_of
from tests.cluster.services import until
from tests.cluster.system import ClusterAccess
from tests.operator.eventually import eventually

#: The sets of values name these; `restricted` is enforced in all of them.
NAMESPACES = (NAMESPACE, "lp-chart-gpu", "lp-chart-cpu", "lp-chart-acme", "lp-chart-globex")
HOME = "lp-chart-release"  # of what is really installed
OTHERS = "example.com/audit"
DRY = "?dryRun=All&fieldValidation=Strict&fieldManager=tests&force=true"
_PLURALS = {"NetworkPolicy": "networkpolicies"}


@pytest.fixture(scope="module")
def kube(cluster: ClusterAccess) -> Iterator[Kube]:
    with restricted_namespaces(cluster.kubeconfig, [*NAMESPACES, HOME]) as made:
        yield made


def path_of(raw: dict[str, Any]) -> str:
    root = "/api/v1" if raw["apiVersion"] == "v1" else f"/apis/{raw['apiVersion']}"
    plural = _PLURALS.get(raw["kind"], f"{raw['kind'].lower()}s")
    if raw["kind"].startswith("Cluster"):
        return f"{root}/{plural}/{raw['metadata']['name']}"
    return f"{root}/namespaces/{raw['metadata'].get('namespace', NAMESPACE)}/{plural}/{raw['metadata']['name']}"


# -- renderings


@pytest.mark.parametrize("name", SETS)
def test_every_object_of_a_rendering_is_taken_by_the_api_server(kube: Kube, name: str) -> None:
    refused = {}
    for raw in objects(template(SETS[name])):
        try:
            kube.call("PATCH", path_of(raw) + DRY, raw, kind="application/apply-patch+yaml")
        except Refused as error:
            if "error looking up service account" not in str(error):  # of a pod: the account was not really made
                refused[f"{raw['kind']}/{raw['metadata']['name']}"] = str(error)
    assert refused == {}


@pytest.mark.parametrize("name", SETS)
def test_every_pod_is_admitted_where_restricted_is_enforced(kube: Kube, name: str) -> None:
    for where, made in pod_templates(objects(template(SETS[name]))).items():
        kube.call("POST", f"/api/v1/namespaces/{NAMESPACE}/pods?dryRun=All&fieldValidation=Strict", pod(made, where))


def test_a_pod_that_is_not_restricted_is_refused_there(kube: Kube) -> None:
    """The check itself: one that admits everything would prove nothing."""
    where, made = next(iter(pod_templates(objects(template(SETS["defaults"]))).items()))
    made["spec"]["containers"][0]["securityContext"]["allowPrivilegeEscalation"] = True
    with pytest.raises(Refused, match="allowPrivilegeEscalation"):
        kube.call("POST", f"/api/v1/namespaces/{NAMESPACE}/pods?dryRun=All", pod(made, where))


def pod(made: dict[str, Any], where: str) -> dict[str, Any]:
    """As its controller would make it, but under the account that every namespace has."""
    spec = {**made["spec"], "serviceAccountName": "default"}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"generateName": "dry-", **_meta(made)}, "spec": spec}


def _meta(made: dict[str, Any]) -> dict[str, Any]:
    return {name: made["metadata"][name] for name in ("labels", "annotations") if name in made["metadata"]}


# -- the release


@pytest.fixture
def released(cluster: ClusterAccess, kube: Kube) -> Iterator[dict[str, str]]:
    """helm's environment for a release that is installed; its hooks need a kubelet, so they are left out."""
    env = {"KUBECONFIG": str(cluster.kubeconfig)}
    helm("install", RELEASE, str(CHART), "--namespace", HOME, env=env)
    try:
        yield env
    finally:
        with contextlib.suppress(Exception):
            helm("uninstall", RELEASE, "--namespace", HOME, "--no-hooks", env=env)


def secrets_of(kube: Kube) -> dict[str, dict[str, str]]:
    found = kube.items(f"/api/v1/namespaces/{HOME}/secrets")
    return {raw["metadata"]["name"]: raw["data"] for raw in found if raw["type"] == "Opaque"}


def test_what_is_made_once_outlives_an_upgrade_and_an_uninstall(kube: Kube, released: dict[str, str]) -> None:
    before = secrets_of(kube)
    assert set(before) == {f"{RELEASE}-keys", f"{RELEASE}-postgres", f"{RELEASE}-valkey"}
    helm("upgrade", RELEASE, str(CHART), "--namespace", HOME, "--set", "gateway.replicas=3", env=released)
    assert secrets_of(kube) == before
    helm("uninstall", RELEASE, "--namespace", HOME, "--no-hooks", env=released)
    kept = secrets_of(kube)
    assert kept == {name: before[name] for name in (f"{RELEASE}-keys", f"{RELEASE}-postgres")}
    claims = {raw["metadata"]["name"] for raw in kube.items(f"/api/v1/namespaces/{HOME}/persistentvolumeclaims")}
    assert claims == {"loraplane-models", "loraplane-adapters", f"{RELEASE}-store", f"{RELEASE}-postgres"}
    for kind in (
        "apps/v1/{}/deployments",
        "networking.k8s.io/v1/{}/networkpolicies",
        "policy/v1/{}/poddisruptionbudgets",
    ):
        assert kube.items(f"/apis/{kind.format(f'namespaces/{HOME}')}") == []
    helm("install", RELEASE, str(CHART), "--namespace", HOME, env=released)
    after = secrets_of(kube)
    assert {name: after[name] for name in kept} == kept


def test_notes_name_the_next_three_commands(cluster: ClusterAccess, kube: Kube, released: dict[str, str]) -> None:
    notes = helm("get", "notes", RELEASE, "--namespace", HOME, env=released)
    for command in (
        "loraplane tenant create",
        "kubectl apply -f",
        "kubectl wait -n",
        f"svc/{RELEASE}-gateway 8000",
    ):
        assert command in notes
    keys = secrets_of(kube)[f"{RELEASE}-keys"]
    assert not any(value in notes for value in keys.values())


# -- where engines are


async def test_a_data_gateway_sees_endpoints_with_its_own_rights_alone(
    cluster: ClusterAccess, kube: Kube, released: dict[str, str]
) -> None:
    config = await asyncio.to_thread(cluster.service_account_kubeconfig, HOME, f"{RELEASE}-gateway")
    path = f"/apis/discovery.k8s.io/v1/namespaces/{HOME}/endpointslices/smol-x"
    told: list[Endpoints] = []

    async def until_seen(*ordinals: int) -> None:
        async def seen() -> bool:
            return bool(told) and {replica.ordinal for replica in told[-1]} == set(ordinals)

        await eventually(seen)

    async with httpx.AsyncClient(**settings_of(config)) as client:
        watcher = EndpointSlices(client, dict, [HOME], told.append)
        task = asyncio.create_task(watcher.watch())
        try:
            await until_seen()
            await asyncio.to_thread(kube.apply, path, slice_of(0))
            await until_seen(0)
            await asyncio.to_thread(kube.apply, path, slice_of(0, 1))
            await until_seen(0, 1)
            await asyncio.to_thread(kube.delete, path)
            await until_seen()
            for refused in (path, f"/api/v1/namespaces/{HOME}/secrets", f"/api/v1/namespaces/{HOME}/pods"):
                assert (await client.get(refused)).status_code == 403
        finally:
            task.cancel()
            await asyncio.wait({task})


def slice_of(*ordinals: int) -> dict[str, Any]:
    pods = [
        {
            "addresses": [f"10.9.0.{ordinal + 1}"],
            "conditions": {"ready": True},
            "targetRef": {"kind": "Pod", "namespace": HOME, "name": f"smol-{ordinal}"},
        }
        for ordinal in ordinals
    ]
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {"name": "smol-x", "labels": {LABEL_POOL: "smol"}},
        "addressType": "IPv4",
        "endpoints": pods,
        "ports": [{"name": name, "port": 8000 + number} for number, name in enumerate(("data", "admin", "metrics"))],
    }


# -- what an install and an upgrade find


def test_what_is_there_already_is_looked_at(kube: Kube, released: dict[str, str]) -> None:
    """In one test, for each release takes seconds: an autoscaler leaves the gateways that run, an existing Secret has
    its entries, a namespace has one release."""
    gateway = f"/apis/apps/v1/namespaces/{HOME}/deployments/{RELEASE}-gateway"
    kube.merge(gateway, {"spec": {"replicas": 4}})
    upgrade = ["upgrade", RELEASE, str(CHART), "--namespace", HOME, "--set", "gateway.autoscaling.enabled=true"]
    helm(*upgrade, env=released)
    # Without a number it would be one, until the autoscaler has counted.
    assert kube.call("GET", gateway)["spec"]["replicas"] == 4

    path = f"/api/v1/namespaces/{HOME}/secrets/own-keys"
    own = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "own-keys"}}
    kube.apply(path, own | {"stringData": {"master.key": "a", "pepper.key": "b"}})
    dry = ["--set", "keys.existingSecret=own-keys", "--dry-run=server"]
    # Pods would wait for it for ever, and say so only to those who describe them.
    with pytest.raises(HelmFailed, match=r"keys.existingSecret: the Secret own-keys has no entry admin.key"):
        helm(*upgrade, *dry, env=released)
    kube.apply(path, own | {"stringData": {"master.key": "a", "pepper.key": "b", "admin.key": "c"}})
    helm(*upgrade, *dry, env=released)
    kube.delete(path)

    # Two operators would give engines their own credentials in turn.
    other = ["install", "second", str(CHART), "--namespace", NAMESPACE, "--set", f"tenants.namespaces={{{HOME}}}"]
    with pytest.raises(HelmFailed, match=f'Role "loraplane-operator" in namespace "{HOME}" exists'):
        helm(*other, "--dry-run=server", env=released)


# -- uninstalling


def test_the_hook_frees_objects_and_ends_engines_with_its_own_rights_alone(
    cluster: ClusterAccess, kube: Kube, released: dict[str, str], tmp_path: Path
) -> None:
    """The hook's process under its account and the Roles that the release has; the operator has no pod here."""
    rendered = objects(helm("get", "hooks", RELEASE, "--namespace", HOME, env=released))
    hooks = [raw for raw in rendered if raw["metadata"]["annotations"]["helm.sh/hook"] == "pre-delete"]
    job = next(raw for raw in hooks if raw["kind"] == "Job")
    for raw in hooks:
        if raw["kind"] == "ServiceAccount":
            kube.apply(path_of(raw), raw)
    smol, adapter = f"{POOLS.format(namespace=HOME)}/smol", f"{ADAPTERS.format(namespace=HOME)}/pirate"
    pool = kube.apply(smol, _object("BaseModelPool", "smol", _POOL))
    kube.apply(adapter, _object("LoRAAdapter", "pirate", _ADAPTER, OTHERS))
    workload(kube, pool)
    going = f"{ADAPTERS.format(namespace=HOME)}/going"
    kube.apply(going, _object("LoRAAdapter", "going", {**_ADAPTER, "adapter": "going"}))
    kube.delete(going)
    assert kube.get(going) is not None, "its finalizer holds it"

    account = job["spec"]["template"]["spec"]["serviceAccountName"]
    config = cluster.service_account_kubeconfig(HOME, account)
    arguments = job["spec"]["template"]["spec"]["containers"][0]["args"]
    done = subprocess.run(
        [sys.executable, "-m", "loraplane_operator.uninstall", *arguments, "--deadline=30"],
        env={"PATH": os.environ["PATH"], "KUBECONFIG": str(config), "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert finalizers(kube, adapter) == [OTHERS]
    assert finalizers(kube, smol) == []
    assert (condition(kube, adapter, "Ready"), condition(kube, smol, "Available")) == (("False", "Uninstalled"),) * 2
    until(lambda: kube.get(going) is None, 10, "the object that was being deleted")
    assert all(kube.get(path) is None for path in workload_paths())
    operator = kube.get(f"/apis/apps/v1/namespaces/{HOME}/deployments/{RELEASE}-operator")
    assert operator is not None
    assert operator["spec"]["replicas"] == 0
    kube.merge(adapter, {"metadata": {"finalizers": None}})
    for path in (adapter, smol):
        kube.delete(path)
        until(lambda path=path: kube.get(path) is None, 10, path)  # type: ignore[misc]


_POOL = {"baseModel": {"name": "tiny", "uri": "file:tiny"}, "replicas": 1, "engine": {"maxModelLen": 256}}
_ADAPTER = {"tenant": "acme", "poolRef": {"name": "smol"}, "source": {"uri": "file:pirate"}}


def _object(kind: str, name: str, spec: dict[str, Any], *others: str) -> dict[str, Any]:
    metadata = {"name": name, "finalizers": [FINALIZER, *others]}
    return {"apiVersion": "loraplane.dev/v1alpha1", "kind": kind, "metadata": metadata, "spec": spec}


def workload_paths() -> list[str]:
    return [
        f"/apis/apps/v1/namespaces/{HOME}/statefulsets/smol",
        f"/api/v1/namespaces/{HOME}/services/smol",
        f"/apis/policy/v1/namespaces/{HOME}/poddisruptionbudgets/smol",
        f"/api/v1/namespaces/{HOME}/secrets/smol-engine",
    ]


def workload(kube: Kube, pool: dict[str, Any]) -> None:
    """What the operator makes for a pool, as far as the hook looks at it."""
    owner = {"apiVersion": "loraplane.dev/v1alpha1", "kind": "BaseModelPool", "name": "smol"}
    labels = {LABEL_POOL: "smol"}
    template = {"metadata": {"labels": labels}, "spec": {"containers": [{"name": "engine", "image": "none"}]}}
    specs: list[tuple[str, str, dict[str, Any]]] = [
        ("apps/v1", "StatefulSet", {"replicas": 0, "serviceName": "smol", "selector": {"matchLabels": labels}}),
        ("v1", "Service", {"clusterIP": "None", "selector": labels, "ports": [{"port": 8000}]}),
        ("policy/v1", "PodDisruptionBudget", {"maxUnavailable": 1, "selector": {"matchLabels": labels}}),
        ("v1", "Secret", {}),
    ]
    specs[0][2]["template"] = template
    for (version, kind, spec), path in zip(specs, workload_paths(), strict=True):
        metadata = {
            "name": path.rpartition("/")[2],
            "labels": labels,
            "ownerReferences": [{**owner, "uid": pool["metadata"]["uid"], "controller": True}],
        }
        body = {"apiVersion": version, "kind": kind, "metadata": metadata}
        kube.apply(path, body | ({"spec": spec} if spec else {}))


def condition(kube: Kube, path: str, wanted: str) -> tuple[str, str]:
    """(status, reason)"""
    conditions = (kube.call("GET", path).get("status") or {}).get("conditions") or []
    return next(((each["status"], each["reason"]) for each in conditions if each["type"] == wanted), ("", ""))


def finalizers(kube: Kube, path: str) -> list[str]:
    found = kube.get(path)
    assert found is not None, path
    return list(found["metadata"].get("finalizers") or [])
