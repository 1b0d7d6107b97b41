"""The CRDs on the real API server: it agrees with the table of tests/core, and stores what was meant."""

import asyncio
import re
import secrets
from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

import pytest

from loraplane_core.identity import PoolRef
from loraplane_core.labels import ADAPTER_KIND, FIELD_MANAGER, FINALIZER
from loraplane_core.resources.adapter import LoRAAdapter
from loraplane_core.resources.documents import parse_document
from loraplane_core.wire.supervisor import EngineCredentials
from loraplane_operator.actions import WorkloadSpec
from loraplane_operator.cluster.manifests import Site, workload_manifests
from loraplane_operator.words import AdapterObject, PoolObject
from tests.cluster.desk import Desk, open_desk
from tests.cluster.install import crds
from tests.cluster.kube import Kube, Refused
from tests.cluster.port_desk import KubeBench
from tests.cluster.services import until
from tests.cluster.tool import Cluster
from tests.core.resource_table import IMMUTABLE, ROWS, UPDATES, Row, adapter, pool

STRICT = "dryRun=All&fieldValidation=Strict"
CREDENTIALS = EngineCredentials(epoch=1, data=["d"], state=["s"], admin=["a"], fetch="f")


@pytest.fixture(scope="module")
def desk(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Desk]:
    with open_desk(cluster.kubeconfig, tmp_path_factory.mktemp("home")) as found:
        yield found


# --- the table ---


def _agrees(refusal: Refused | None, row: Row) -> None:
    if not row.field:
        assert refusal is None
        return
    assert refusal is not None, "accepted"
    assert refusal.status in (400, 422)  # 400: an unknown field
    assert row.field in re.sub(r"\[([a-z]+)\]", r".\1", refusal.message)  # it writes limits[cpu]
    assert (row.server or row.says).casefold() in refusal.message.casefold()


@pytest.mark.parametrize("case", ROWS)
def test_the_api_server_agrees_with_the_table_on_create(case: str, desk: Desk) -> None:
    row = ROWS[case]
    document = desk.here(row.document)
    try:
        stored = desk.kube.call("POST", f"{desk.list_path(document)}?{STRICT}", document)
    except Refused as error:
        _agrees(error, row)
        return
    _agrees(None, row)
    # What the server made of it means the same as what the person wrote.
    assert parse_document(stored).spec == parse_document(document).spec


@pytest.fixture(scope="module")
def good(desk: Desk) -> Iterator[None]:
    """One object of each kind, which the rows would like to become."""
    with desk.with_object(adapter(name="good")), desk.with_object(pool(name="good")):
        yield


#: An update keeps the name.
_BAD_EDITS = {case: row for case, row in ROWS.items() if row.field not in ("", "metadata.name")}


@pytest.mark.usefixtures("good")
@pytest.mark.parametrize("case", _BAD_EDITS)
def test_the_api_server_agrees_with_the_table_on_update(case: str, desk: Desk) -> None:
    row = _BAD_EDITS[case]
    document = desk.here(row.document, name="good")
    version = desk.stored(document)["metadata"]["resourceVersion"]
    with pytest.raises(Refused) as caught:
        desk.kube.call("PUT", f"{desk.path(document)}?{STRICT}", desk.here(document, resourceVersion=version))
    _agrees(caught.value, row)


@pytest.mark.parametrize("case", UPDATES)
def test_the_api_server_agrees_with_the_table_of_updates(case: str, desk: Desk) -> None:
    update = UPDATES[case]
    with desk.with_object(update.before) as before:
        after = desk.here(update.after, resourceVersion=before["metadata"]["resourceVersion"])
        path = f"{desk.path(update.before)}?{STRICT}"
        if not update.field:
            desk.kube.call("PUT", path, after)
            return
        with pytest.raises(Refused, match=f"{update.field}: .*{update.field} {IMMUTABLE}"):
            desk.kube.call("PUT", path, after)


@pytest.mark.parametrize(
    "document",
    [
        adapter({"warmReplicas": 65}),
        pool({"replicas": 65}),
        pool({"autoscaling": {"min": 1, "max": 2, "targetInFlight": 1}}),
    ],
    ids=["warm replicas", "replicas", "autoscaling"],
)
def test_a_count_that_cannot_be_honoured_is_refused_and_never_cut_down_o10(
    document: dict[str, Any], desk: Desk
) -> None:
    with pytest.raises(Refused, match=r"less than or equal to 64|not honoured yet"):
        desk.create(document)
    assert desk.kube.get(desk.path(document)) is None


# --- what is stored ---


def test_defaults_are_stored(desk: Desk) -> None:
    given = {"tenant": "acme", "poolRef": {"name": "smol"}, "source": {"uri": "file:acme/style"}}
    with desk.with_object(adapter(name="defaults")) as stored:
        assert stored["spec"] == {**given, "warmReplicas": 1, "pinned": False, "deletionPolicy": "Retain"}
        assert "status" not in stored
    with desk.with_object(pool(name="defaults")) as stored:
        assert stored["spec"] == {
            "baseModel": {"name": "smollm2", "uri": "file:smollm2", "aliases": []},
            "runtime": "Native",
            "replicas": 1,
            "engine": {"dtype": "auto", "maxRank": 64},
            "resources": {"limits": {}, "requests": {}},
        }
        assert "status" not in stored


def _condition(**more: Any) -> dict[str, Any]:
    found = {"type": "Ready", "status": "True", "reason": "Ready", "message": "", "observedGeneration": 1}
    return {**found, "lastTransitionTime": "2026-11-30T06:00:00Z", **more}


def test_status_is_written_through_its_own_door_only(desk: Desk) -> None:
    document = {**adapter(name="doors"), "status": {"rank": 7}}
    with desk.with_object(document) as made:
        assert "status" not in made
        path = desk.path(document)
        desk.kube.merge(f"{path}/status", {"status": {"rank": 8}, "spec": {"warmReplicas": 5}})
        found = desk.kube.merge(path, {"status": {"rank": 9}})
        assert (found["status"], found["spec"]["warmReplicas"]) == ({"rank": 8}, 1)
        assert found["metadata"]["generation"] == made["metadata"]["generation"]


def test_a_message_is_measured_in_characters(desk: Desk) -> None:
    document = adapter(name="long")
    longest = "\u00e9" * 32768
    with desk.with_object(document):
        path = f"{desk.path(document)}/status"
        desk.kube.merge(path, {"status": {"conditions": [_condition(message=longest)]}})
        parsed = parse_document(desk.stored(document))
        assert isinstance(parsed, LoRAAdapter)
        assert parsed.status.conditions[0].message == longest
        with pytest.raises(Refused, match="message: Too long"):
            desk.kube.merge(path, {"status": {"conditions": [_condition(message=longest + "x")]}})
        with pytest.raises(Refused, match="reason"):
            desk.kube.merge(path, {"status": {"conditions": [_condition(reason="not a word")]}})


def _traffic(first: int, second: int, *, version: int = 2) -> dict[str, Any]:
    return adapter({"traffic": [{"version": 1, "weight": first}, {"version": version, "weight": second}]}, name="once")


def test_one_name_is_taken_once_and_one_version_has_one_weight_o64(desk: Desk) -> None:
    document = _traffic(90, 10)
    path = desk.path(document)
    desk.kube.apply(path, desk.here(document))
    with pytest.raises(Refused, match="already exists"):
        desk.create(document)
    with pytest.raises(Refused, match="duplicate entries"):
        desk.kube.apply(path, desk.here(_traffic(50, 50, version=1)))
    # Another manager who names the same versions sets their weights, instead of adding second ones.
    found = desk.kube.apply(path, desk.here(_traffic(40, 60)), manager="other")
    assert found["spec"]["traffic"] == _traffic(40, 60)["spec"]["traffic"]
    desk.kube.delete(path)


@pytest.mark.parametrize("name", ["a" * 52, "0" * 52, "7b"])
def test_what_a_pool_becomes_has_legal_names(name: str, desk: Desk) -> None:
    ref = PoolRef(desk.namespace, name)
    with desk.with_object(pool(name=name)) as made:
        spec = WorkloadSpec(ref, made["metadata"]["uid"], replicas=1, engine=(), epoch=1, revision="r")
        for path, manifest in workload_manifests(spec, CREDENTIALS, Site("example.test/engine:1", "models")):
            desk.kube.apply(path, manifest)
        pod = f"/api/v1/namespaces/{desk.namespace}/pods/{name}-0"
        until(lambda: desk.kube.get(pod), 20, "the controller makes the pod")


# --- objects of an older release ---


def _variant(group: str, *, lax: bool) -> dict[str, Any]:
    """The adapters' CRD in a group of its own, as it is or as a release that checked nothing."""
    raw = deepcopy(next(raw for raw in crds() if raw["spec"]["names"]["kind"] == ADAPTER_KIND))
    names = raw["spec"]["names"]
    names |= {"shortNames": [], "categories": []}
    raw["metadata"]["name"], raw["spec"]["group"] = f"{names['plural']}.{group}", group
    if lax:
        loose = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
        root = {"type": "object", "properties": {"spec": loose, "status": loose}}
        raw["spec"]["versions"][0]["schema"]["openAPIV3Schema"] = root
    return raw


@pytest.fixture
def older_release(desk: Desk) -> Iterator[tuple[str, Callable[[], object]]]:
    """(API group, a function that brings it to the present schema)."""
    group = f"older-{secrets.token_hex(3)}.example.com"
    crd = _variant(group, lax=True)
    path = f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{crd['metadata']['name']}"
    desk.kube.apply(path, crd)
    yield group, lambda: desk.kube.apply(path, _variant(group, lax=False))
    desk.kube.delete(path)


def _tried(kube: Kube, path: str, document: dict[str, Any]) -> bool:
    try:
        kube.call("POST", path, document)
    except Refused:
        return False
    return True


def test_an_object_that_is_valid_no_more_can_still_report_and_go(
    older_release: tuple[str, Callable[[], object]], desk: Desk
) -> None:
    group, upgrade = older_release
    plural = f"/apis/{group}/v1alpha1/namespaces/{desk.namespace}/loraadapters"
    edits = {"source.uri": "s3://old/x", "adapter": "Old_Name", "traffic": [{"version": 1, "weight": 5}], "gone": 1}
    document = desk.here(adapter(edits), name="old.name", finalizers=[FINALIZER])
    document["apiVersion"] = f"{group}/v1alpha1"
    until(lambda: _tried(desk.kube, plural, document), 10, "the older schema is served")
    upgrade()
    fresh = {**document, "metadata": {**document["metadata"], "name": "new.name"}}
    until(lambda: not _tried(desk.kube, f"{plural}?dryRun=All", fresh), 20, "the present schema is in force")

    path = f"{plural}/old.name"
    desk.kube.merge(f"{path}/status", {"status": {"conditions": [_condition(status="False", reason="InvalidSpec")]}})
    desk.kube.delete(path)
    assert desk.kube.call("GET", path)["metadata"]["deletionTimestamp"]
    desk.kube.merge(path, {"metadata": {"finalizers": None}})
    assert desk.kube.get(path) is None


# --- the operator's reading ---

_WHOLE = ("least adapter", "full adapter", "traffic whole", "least pool", "full pool")


async def test_the_operator_reads_what_the_api_server_stores(cluster: Cluster, desk: Desk) -> None:
    bench = KubeBench(cluster)
    try:
        await bench.start()
        for number, case in enumerate(_WHOLE):
            await asyncio.to_thread(_store, desk, bench.namespace, f"o{number}", ROWS[case].document)
        await bench.cluster.relist()
        seen = await bench.cluster.observe()
    finally:
        await bench.close()
    assert seen is not None
    found: list[PoolObject | AdapterObject] = [*seen.pools.values(), *seen.adapters]
    assert {each.meta.ref.name for each in found} == {f"o{number}" for number in range(len(_WHOLE))}
    for each in found:
        assert each.meta.uid
        assert each.meta.finalized
        assert each.meta.created_at
        assert each.status == {"conditions": [_condition()], "observedGeneration": 1}


def _store(desk: Desk, namespace: str, name: str, document: dict[str, Any]) -> None:
    """As kubectl and the operator write it, with finalizers of two owners."""
    metadata = {"name": name, "namespace": namespace}
    path = desk.list_path(document).replace(desk.namespace, namespace) + f"/{name}"
    desk.kube.apply(path, {**document, "metadata": {**metadata, "finalizers": [FINALIZER, "example.com/other"]}})
    kind = {field: document[field] for field in ("apiVersion", "kind")}
    status = {"conditions": [_condition()], "observedGeneration": 1}
    desk.kube.apply(f"{path}/status", {**kind, "metadata": metadata, "status": status}, FIELD_MANAGER)
