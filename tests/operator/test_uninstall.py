"""The pre-delete hook against a small API of its own; the real API server: tests/cluster/test_chart.py."""

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from loraplane_core.errors import Conflict, Forbidden, InvalidRequest, NotFound
from loraplane_core.labels import FINALIZER
from loraplane_operator import uninstall
from loraplane_operator.cluster.kinds import ADAPTER, POOL, STATEFUL_SET
from loraplane_operator.uninstall import Options, leave, parse, run

OPTIONS = Options(("ns", "team"), ("ns",), "ns/lp-operator", "component=operator", 5.0)
DEPLOYMENT = "/apis/apps/v1/namespaces/ns/deployments/lp-operator"
PODS = "/api/v1/namespaces/ns/pods"
OTHERS = "example.com/audit"


class FakeApi:
    """Objects by path. `before` runs ahead of each call, and may change them or raise."""

    def __init__(self) -> None:
        self.objects: dict[str, dict[str, Any]] = {DEPLOYMENT: {}}
        self.operator_polls = 2  # lists in which the stopped operator's pod is still there
        self.missing: set[str] = set()  # kinds without a CRD
        self.calls: list[str] = []
        self.before: Callable[[str], None] = lambda call: None

    def put(self, path: str, finalizers: list[str] | None = None, owner: str = "") -> None:
        metadata: dict[str, Any] = {"name": path.rpartition("/")[2], "finalizers": finalizers or []}
        if owner:
            metadata["ownerReferences"] = [{"kind": owner}]
        self.objects[path] = {"metadata": metadata}

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
            return [{}] * (self.operator_polls > 0), ""
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

    async def delete(self, path: str) -> None:
        self._call(f"DELETE {path}")
        self.objects.pop(path, None)


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> FakeApi:
    monkeypatch.setattr(uninstall, "POLL_SECONDS", 0.001)
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


async def test_pools_and_adapters_stay_and_engines_go(api: FakeApi) -> None:
    mine, foreign = STATEFUL_SET.path("ns", "smol"), STATEFUL_SET.path("ns", "database")
    api.put(POOL.path("ns", "smol"), [FINALIZER])
    api.put(mine, owner="BaseModelPool")
    api.put(foreign, owner="Database")
    assert await run(api, OPTIONS) == 0
    assert set(api.objects) == {DEPLOYMENT, POOL.path("ns", "smol"), foreign}
    assert [call for call in api.calls if call.startswith("DELETE")] == [
        f"DELETE {mine}",
        "DELETE /api/v1/namespaces/ns/services/smol",
        "DELETE /apis/policy/v1/namespaces/ns/poddisruptionbudgets/smol",
        "DELETE /api/v1/namespaces/ns/secrets/smol-engine",
    ]


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
DELETED = {"deletionTimestamp": "2026-01-01T00:00:00Z"}


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
