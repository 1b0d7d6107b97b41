"""The pre-delete hook against a small API of its own; the real API server: tests/cluster/test_chart.py."""

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from loraplane_core.errors import Conflict, Forbidden, InvalidRequest, NotFound
from loraplane_core.labels import API_VERSION, FINALIZER, LABEL_MANAGED_BY, LABEL_POOL, MANAGED_BY
from loraplane_core.resources.adapter import AdapterStatus
from loraplane_core.resources.pool import PoolStatus
from loraplane_operator import uninstall
from loraplane_operator.cluster.kinds import ADAPTER, POOL, STATEFUL_SET
from loraplane_operator.plan.conditions import raw_conditions
from loraplane_operator.plan.last_words import last_words
from loraplane_operator.uninstall import Options, leave, parse, run

DELETED = {"deletionTimestamp": "2026-01-01T00:00:00Z"}
OPTIONS = Options(("ns", "team"), ("ns",), "ns/lp-operator", "component=operator", 5.0)
DEPLOYMENT = "/apis/apps/v1/namespaces/ns/deployments/lp-operator"
PODS = "/api/v1/namespaces/ns/pods"
OTHERS = "example.com/audit"
OWNER = {"apiVersion": API_VERSION, "kind": "BaseModelPool", "name": "smol", "uid": "u1", "controller": True}
#: What the operator makes for pool smol, in the order in which it goes.
SERVICE, BUDGET, SECRET, SET = WORKLOAD = (
    "/api/v1/namespaces/ns/services/smol",
    "/apis/policy/v1/namespaces/ns/poddisruptionbudgets/smol",
    "/api/v1/namespaces/ns/secrets/smol-engine",
    STATEFUL_SET.path("ns", "smol"),
)


class FakeApi:
    """Objects by path. `before` runs ahead of each call, and may change them or raise."""

    def __init__(self) -> None:
        self.objects: dict[str, dict[str, Any]] = {DEPLOYMENT: {}}
        self.operator_polls = 2  # lists in which the stopped operator's pod is still there
        self.evicted = False  # another pod of it, which ended long ago, is still listed
        self.missing: set[str] = set()  # kinds without a CRD
        self.calls: list[str] = []
        self.before: Callable[[str], None] = lambda call: None

    def put(self, path: str, finalizers: list[str] | None = None, **metadata: Any) -> None:
        name = path.rpartition("/")[2]
        given = {"name": name, "namespace": path.split("/namespaces/")[1].partition("/")[0], "uid": f"u-{name}"}
        self.objects[path] = {"metadata": {**given, "finalizers": finalizers or [], **metadata}}

    def put_workload(self, *paths: str, **metadata: Any) -> None:
        for path in paths or WORKLOAD:
            self.put(path, labels={LABEL_POOL: "smol"}, **(metadata or {"ownerReferences": [OWNER]}))

    def finalizers(self, path: str) -> list[str]:
        return list(self.objects[path]["metadata"]["finalizers"])

    def _call(self, call: str) -> None:
        self.calls.append(call)
        self.before(call)

    async def list_items(self, path: str, **query: str) -> tuple[list[dict[str, Any]], str]:
        self._call(f"LIST {path}")
        if path.rpartition("/")[2] in self.missing:
            raise NotFound("no such resource")
        if path == PODS:
            assert query == {"labelSelector": "component=operator"}
            self.operator_polls -= 1
            pods = [{"metadata": {"name": "op-1"}, "status": {"phase": "Running"}}] * (self.operator_polls > 0)
            return pods + [{"metadata": {"name": "op-0"}, "status": {"phase": "Failed"}}] * self.evicted, ""
        return [copy.deepcopy(raw) for key, raw in self.objects.items() if key.rpartition("/")[0] == path], ""

    async def get(self, path: str) -> dict[str, Any]:
        self._call(f"GET {path}")
        if path not in self.objects:
            raise NotFound(path)
        return copy.deepcopy(self.objects[path])

    async def merge(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        self._call(f"PATCH {path}")
        if path not in self.objects:
            raise NotFound(path)
        assert body == {"spec": {"replicas": 0}}
        return {}

    async def change(self, path: str, *operations: Mapping[str, Any]) -> dict[str, Any]:
        self._call(f"CHANGE {path}")
        if path not in self.objects:
            raise NotFound(path)
        tested, replaced = operations
        if self.finalizers(path) != tested["value"]:
            raise Conflict("the test failed")
        self.objects[path]["metadata"]["finalizers"] = list(replaced["value"])
        return {}

    async def apply(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        self._call(f"APPLY {path}")
        found = self.objects[path.removesuffix("/status")]
        assert body["metadata"] == {name: found["metadata"][name] for name in ("name", "namespace", "uid")}
        found["status"] = body["status"]
        return found

    async def delete(self, path: str, uid: str = "") -> None:
        self._call(f"DELETE {path}")
        assert uid
        if path in self.objects and self.objects[path]["metadata"]["uid"] != uid:
            raise Conflict("another one")
        self.objects.pop(path, None)


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> FakeApi:
    monkeypatch.setattr(uninstall, "POLL_SECONDS", 0.001)
    monkeypatch.setattr(uninstall, "REFUSED_SECONDS", 0.05)
    return FakeApi()


async def test_operator_is_gone_before_a_finalizer_comes_off(api: FakeApi) -> None:
    adapter, pool, elsewhere = ADAPTER.path("ns", "a"), POOL.path("ns", "smol"), ADAPTER.path("team", "b")
    api.put(adapter, [FINALIZER])
    api.put(pool, [OTHERS, FINALIZER])
    api.put(elsewhere, [FINALIZER])
    assert await run(api, OPTIONS) == 0
    assert (api.finalizers(adapter), api.finalizers(pool), api.finalizers(elsewhere)) == ([], [OTHERS], [])
    last_poll = max(number for number, call in enumerate(api.calls) if call == f"LIST {PODS}")
    first_change = min(number for number, call in enumerate(api.calls) if call.startswith("CHANGE"))
    assert api.calls[0] == f"PATCH {DEPLOYMENT}"
    assert last_poll < first_change
    assert api.operator_polls == 0


async def test_pods_of_the_operator_that_ended_long_ago_are_not_waited_for(api: FakeApi) -> None:
    """One that was evicted is listed as long as its Deployment is there."""
    api.evicted = True
    assert await run(api, OPTIONS) == 0


async def test_pools_and_adapters_stay_and_engines_go(api: FakeApi) -> None:
    foreign = STATEFUL_SET.path("ns", "database")
    api.put(POOL.path("ns", "smol"), [FINALIZER])
    api.put_workload()
    api.put(foreign, ownerReferences=[{**OWNER, "kind": "Database"}])
    assert await run(api, OPTIONS) == 0
    assert set(api.objects) == {DEPLOYMENT, POOL.path("ns", "smol"), foreign}
    deleted = [call for call in api.calls if call.startswith("DELETE")]
    assert deleted == [f"DELETE {path}" for path in WORKLOAD]


@pytest.mark.parametrize(
    "metadata",
    [
        {"ownerReferences": []},
        {"ownerReferences": [{**OWNER, "kind": "Service"}]},
        {"ownerReferences": [{**OWNER, "name": "another"}]},
        {"ownerReferences": [{**OWNER, "apiVersion": "example.com/v1"}]},
        {"ownerReferences": [{**OWNER, "controller": False}]},
    ],
    ids=["nobody", "another kind", "another pool", "another group", "not its controller"],
)
async def test_what_only_has_the_name_that_a_pool_needs_is_left_alone(api: FakeApi, metadata: dict[str, Any]) -> None:
    """As the operator does, which says NameTaken then."""
    api.put(POOL.path("ns", "smol"), [FINALIZER])
    api.put_workload(**metadata)
    assert await run(api, OPTIONS) == 0
    assert set(api.objects) >= set(WORKLOAD)


async def test_what_lost_its_owner_goes_by_its_marks(api: FakeApi) -> None:
    api.put_workload()
    for path in WORKLOAD:
        api.put(path, labels={LABEL_POOL: "smol", LABEL_MANAGED_BY: MANAGED_BY})
    assert await run(api, OPTIONS) == 0
    assert set(api.objects) == {DEPLOYMENT}


@pytest.mark.parametrize("after", range(len(WORKLOAD)))
async def test_one_that_was_interrupted_between_two_deletions_leaves_nothing_to_the_next(
    api: FakeApi, after: int
) -> None:
    """Also where the pool is gone, and only what is left tells of it."""
    api.put_workload()

    def killed(call: str) -> None:
        if sum(each.startswith("DELETE") for each in api.calls) == after + 1:
            raise InvalidRequest("killed here")

    api.before = killed
    assert await run(api, OPTIONS) == 1
    assert len(set(api.objects) & set(WORKLOAD)) == len(WORKLOAD) - after
    api.before = lambda call: None
    assert await run(api, OPTIONS) == 0
    assert set(api.objects) == {DEPLOYMENT}


@pytest.mark.parametrize("path", [SERVICE, SECRET], ids=["service", "secret"])
async def test_what_a_pool_has_without_a_statefulset_goes_too(api: FakeApi, path: str) -> None:
    """A quota that refused the StatefulSet, for example."""
    api.put(POOL.path("ns", "smol"), [FINALIZER])
    api.put_workload(path)
    assert await run(api, OPTIONS) == 0
    assert path not in api.objects


async def test_what_takes_the_name_meanwhile_stays(api: FakeApi) -> None:
    api.put_workload()

    def replaced(call: str) -> None:
        if call == f"DELETE {SERVICE}":
            api.put(SERVICE, uid="another")

    api.before = replaced
    assert await run(api, OPTIONS) == 0
    assert set(api.objects) == {DEPLOYMENT, SERVICE}


@pytest.mark.parametrize("gone", ["ns", "team"])
async def test_a_namespace_that_may_not_be_read_holds_up_no_other(api: FakeApi, gone: str) -> None:
    """It was deleted, and its Role with it; the values still name it."""
    home = Options(("ns", "team", "home"), ("ns", "home"), "home/lp-operator", "component=operator", 5.0)
    left = ADAPTER.path("team" if gone == "ns" else "ns", "a")
    api.put(left, [FINALIZER])
    api.put(POOL.path("home", "smol"), [FINALIZER])

    def refused(call: str) -> None:
        if f"/namespaces/{gone}/" in call:
            raise Forbidden("there is no Role")

    api.before = refused
    assert await run(api, home) == 0
    assert api.finalizers(left) == api.finalizers(POOL.path("home", "smol")) == []


async def test_the_releases_own_namespace_is_not_passed_over(api: FakeApi, caplog: pytest.LogCaptureFixture) -> None:
    def refused(call: str) -> None:
        if call == f"LIST {ADAPTER.path('ns')}":
            raise Forbidden("no Role yet")

    api.before = refused
    assert await run(api, dataclasses.replace(OPTIONS, deadline=0.3)) == 1
    assert any(getattr(each, "error", "") == "no Role yet" for each in caplog.records)


# -- what objects say then

TRUE = {"status": "True", "reason": "Fine", "message": "", "lastTransitionTime": "2026-01-01T00:00:00Z"}
ADAPTER_STATUS = {
    "conditions": [{"type": name, **TRUE} for name in ("Claimed", "Ingested", "Validated", "Placed", "Ready")],
    "observedGeneration": 1,
    "activeVersion": 2,
    "replicas": [{"name": "ns/smol/0", "residency": "device"}],
    "readyReplicas": 1,
    "warmReplicas": 1,
    "resident": "1/1",
}
POOL_STATUS = {
    "conditions": [{"type": "Available", **TRUE}],
    "replicas": 2,
    "readyReplicas": 2,
    "capacity": {"slots": 4},
    "adapters": {"registered": 3, "ready": 3, "resident": 2},
    "baseDigest": "b" * 64,
}


async def test_objects_say_that_nobody_serves_them_before_their_finalizer_goes(api: FakeApi) -> None:
    adapter, pool, going = ADAPTER.path("ns", "a"), POOL.path("ns", "smol"), ADAPTER.path("ns", "b")
    for path, status in ((adapter, ADAPTER_STATUS), (pool, POOL_STATUS), (going, ADAPTER_STATUS)):
        api.put(path, [FINALIZER], generation=3)
        api.objects[path]["status"] = status
    api.objects[going]["metadata"] |= DELETED
    assert await run(api, OPTIONS) == 0
    told = {path: raw_conditions(api.objects[path]["status"]) for path in (adapter, pool)}
    assert {each["type"]: each["reason"] for each in told[adapter].values()} == {
        **dict.fromkeys(("Claimed", "Ingested", "Validated"), "Fine"),
        **dict.fromkeys(("Placed", "Ready"), "Uninstalled"),
    }
    assert {each["reason"] for each in told[pool].values()} == {"Uninstalled"}
    assert {told[adapter]["Ready"]["status"], told[pool]["Available"]["status"]} == {"False"}
    for path in (adapter, pool):
        assert api.calls.index(f"APPLY {path}/status") < api.calls.index(f"CHANGE {path}")
    assert f"APPLY {going}/status" not in api.calls


def test_last_words_keep_what_the_registry_keeps_and_are_a_status() -> None:
    adapter = last_words("LoRAAdapter", ADAPTER_STATUS, 3, 0.0)
    read = AdapterStatus.model_validate(adapter)
    assert (read.active_version, read.resident, read.ready_replicas, read.replicas) == (2, "0/1", 0, [])
    pool = PoolStatus.model_validate(last_words("BaseModelPool", POOL_STATUS, 3, 0.0))
    assert (pool.base_digest, pool.adapters.registered, pool.adapters.ready) == ("b" * 64, 3, 0)
    assert (pool.replicas, pool.ready_replicas, pool.capacity.slots) == (0, 0, 0)
    assert (read.observed_generation, pool.observed_generation) == (3, 3)
    for kind in ("LoRAAdapter", "BaseModelPool"):  # whose operator had not come to it
        assert last_words(kind, {}, 1, 0.0)["conditions"]


async def test_a_status_that_is_refused_holds_no_finalizer(api: FakeApi) -> None:
    adapter = ADAPTER.path("ns", "a")
    api.put(adapter, [FINALIZER])

    def refused(call: str) -> None:
        if call.startswith("APPLY"):
            raise Forbidden("an older Role")

    api.before = refused
    assert await run(api, OPTIONS) == 0
    assert api.finalizers(adapter) == []


async def test_without_operator_or_crds_there_is_nothing_to_do(api: FakeApi) -> None:
    api.objects.clear()
    api.missing = {POOL.plural, ADAPTER.plural}
    assert await run(api, OPTIONS) == 0


async def test_a_finalizer_that_changes_meanwhile_is_read_again(api: FakeApi) -> None:
    adapter = ADAPTER.path("ns", "a")
    api.put(adapter, [FINALIZER])

    def added(call: str) -> None:
        if call == f"CHANGE {adapter}" and api.calls.count(call) == 1:
            api.put(adapter, [FINALIZER, OTHERS])

    api.before = added
    assert await run(api, OPTIONS) == 0
    assert api.finalizers(adapter) == [OTHERS]


async def test_refusals_of_a_role_made_a_moment_ago_pass(api: FakeApi) -> None:
    def early(call: str) -> None:
        if len(api.calls) < 4:
            raise Forbidden("not yet")

    api.before = early
    assert await run(api, OPTIONS) == 0


async def test_a_finalizer_that_always_comes_back_ends_with_its_reason(
    api: FakeApi, caplog: pytest.LogCaptureFixture
) -> None:
    adapter = ADAPTER.path("ns", "a")

    def back(call: str) -> None:
        api.put(adapter, [FINALIZER])

    api.before = back
    options = dataclasses.replace(OPTIONS, deadline=0.05)
    assert await run(api, options) == 1
    assert any("another operator" in str(getattr(each, "error", "")) for each in caplog.records)


async def test_an_operator_that_does_not_stop_ends_at_the_deadline(
    api: FakeApi, caplog: pytest.LogCaptureFixture
) -> None:
    api.operator_polls = 1 << 30
    options = dataclasses.replace(OPTIONS, deadline=0.05)
    assert await run(api, options) == 1
    assert [getattr(each, "error", "") for each in caplog.records][-1] == "past the deadline"


async def test_what_is_refused_for_good_is_not_tried_again(api: FakeApi) -> None:
    def broken(call: str) -> None:
        raise InvalidRequest("never")

    api.before = broken
    assert await run(api, OPTIONS) == 1
    assert len(api.calls) == 1


# -- an operator that stops

HOME = "/api/v1/namespaces/home"


async def test_an_operator_whose_namespace_is_deleted_leaves_no_finalizer(api: FakeApi) -> None:
    adapter, pool, elsewhere = ADAPTER.path("home", "a"), POOL.path("home", "smol"), ADAPTER.path("team", "b")
    for path in (adapter, pool, elsewhere):
        api.put(path, [FINALIZER, OTHERS])
    api.objects[HOME] = {"metadata": DELETED}

    def gone(call: str) -> None:
        if "/namespaces/gone/" in call:
            raise Forbidden("its Role is gone")

    api.before = gone
    await leave(api, "home", ("gone", "home", "team"))
    assert [api.finalizers(path) for path in (adapter, pool, elsewhere)] == [[OTHERS]] * 3


async def test_an_operator_that_is_only_replaced_takes_nothing_off(api: FakeApi) -> None:
    adapter = ADAPTER.path("home", "a")
    api.put(adapter, [FINALIZER])
    api.objects[HOME] = {"metadata": {}}
    await leave(api, "home", ("home",))
    assert api.finalizers(adapter) == [FINALIZER]
    assert api.calls == [f"GET {HOME}"]


async def test_one_that_may_not_ask_stops_as_before(api: FakeApi) -> None:
    await leave(api, "home", ("home",))
    assert api.calls == [f"GET {HOME}"]


def test_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    base = ["--operator=ns/op", "--operator-selector=a=b"]
    parsed = parse(["--namespace=one", "--namespace=two", *base])
    assert parsed.namespaces == parsed.pool_namespaces == ("one", "two")
    assert parse(["--namespace=one", "--namespace=two", "--pool-namespace=one", *base]).pool_namespaces == ("one",)
    with pytest.raises(SystemExit):
        parse(["--namespace=one", "--operator=op", "--operator-selector=a=b"])
    assert "NAMESPACE/NAME" in capsys.readouterr().err
