"""The shipped Role holds what the operator asks for, and nothing else. Real API server, no kubelet."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from loraplane_operator.actions import Note
from loraplane_operator.cluster import recorder
from loraplane_operator.cluster.kinds import KINDS
from tests.cluster.audit import Right, check_audit, rights
from tests.cluster.install import SERVICE_ACCOUNT, manifests, role_rules, user_of
from tests.cluster.port_desk import KubeBench, started
from tests.cluster.system import ClusterAccess
from tests.operator import port_contract as contract
from tests.operator.eventually import eventually
from tests.operator.system import adapter_manifest

LATE = "late"  # not the operator's own account: the suite's audit shall hold no refusal of that


@pytest.fixture
async def bench(cluster: ClusterAccess) -> AsyncIterator[KubeBench]:
    async with started(cluster) as made:
        yield made


async def test_role_is_what_the_port_uses_no_less_and_no_more_o20(
    bench: KubeBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every method of the port, once; the audit log tells what that took."""
    monkeypatch.setattr(recorder, "WRITE_SECONDS", 0.0)
    async with bench.watching():
        pool = await contract.created_pool(bench)
        await bench.cluster.apply(contract.workload(pool), contract.CREDENTIALS)

        async def running() -> bool:
            return [each.revision for each in await contract.replicas(bench) or ()] == ["r1", "r1"]

        await eventually(running)
        await bench.cluster.apply(contract.workload(pool, revision="r2"), contract.CREDENTIALS)
        await bench.cluster.restart(pool.ref, 1)
        seen = await contract.created(bench)
        for obj in (seen, pool):
            behind = bench.fresh()
            await behind.relist()
            foreign = {"metadata": {"finalizers": ["example.com/audit"]}}
            await asyncio.to_thread(bench.kube.merge, bench.path(obj.meta.ref), foreign)
            await behind.set_finalizer(obj.meta.ref, obj.meta.uid, present=True)
        await bench.cluster.patch_status(seen.meta.ref, seen.meta.uid, contract.status())
        await bench.cluster.patch_status(pool.meta.ref, pool.meta.uid, {"replicas": 2})
        for _ in range(2):
            await bench.cluster.emit(Note(seen.meta.ref, seen.meta.uid, "Normal", "Claimed", "told"))
        await bench.cluster.delete(pool.ref)
    assert check_audit(bench.access.audit_log, user_of(bench.namespace), role_rules()) == []


@pytest.mark.parametrize("name", ["operator-rules", "operator-tenant-rules"])
def test_everything_that_is_watched_may_be_listed_and_watched_o20(name: str) -> None:
    """Also where only tenants are: what may not be listed there makes the namespace one that cannot be read."""
    granted = set(rights(role_rules(name)))
    for kind in KINDS.values():
        assert {Right(kind.group, kind.plural, verb) for verb in ("list", "watch")} <= granted


def test_rights_are_of_namespaces_only_o20() -> None:
    shipped = manifests("pools", "release")
    assert {raw["kind"] for raw in shipped} == {"ServiceAccount", "Role", "RoleBinding"}
    assert not any("*" in [*rule["verbs"], *rule["resources"], *rule["apiGroups"]] for rule in role_rules())


@pytest.mark.parametrize(
    ("group", "resource", "verb"),
    [
        *[("", "secrets", verb) for verb in ("get", "list", "watch", "delete")],
        *[("", "pods", verb) for verb in ("create", "patch")],
        ("", "pods/exec", "create"),
        ("", "configmaps", "list"),
        ("", "namespaces", "list"),
        ("apiextensions.k8s.io", "customresourcedefinitions", "list"),
        ("rbac.authorization.k8s.io", "roles", "create"),
        ("loraplane.dev", "loraadapters", "delete"),
    ],
)
async def test_what_is_not_granted_is_refused_by_the_api_server_o25(
    bench: KubeBench, group: str, resource: str, verb: str
) -> None:
    plural, _, below = resource.partition("/")
    asked = {"namespace": bench.namespace, "verb": verb, "group": group, "resource": plural, "subresource": below}
    spec = {"user": user_of(bench.namespace), "resourceAttributes": asked}
    body = {"apiVersion": "authorization.k8s.io/v1", "kind": "SubjectAccessReview", "spec": spec}
    path = "/apis/authorization.k8s.io/v1/subjectaccessreviews"
    answer = await asyncio.to_thread(bench.kube.call, "POST", path, body)
    assert answer["status"]["allowed"] is False


async def test_operator_without_its_role_waits_and_begins_once_it_is_granted_o20(
    bench: KubeBench, caplog: pytest.LogCaptureFixture
) -> None:
    await bench.put(adapter_manifest())
    account = f"/api/v1/namespaces/{bench.namespace}/serviceaccounts/{LATE}"
    await asyncio.to_thread(bench.kube.apply, account, {"apiVersion": "v1", "kind": "ServiceAccount"} | _named(LATE))
    bench.kubeconfig = await asyncio.to_thread(bench.access.service_account_kubeconfig, bench.namespace, LATE)
    bench.cluster = await bench.connected(bench.kubeconfig)
    async with bench.watching(complete=False):

        async def told() -> bool:
            return any("forbidden" in str(getattr(each, "error", "")) for each in caplog.records)

        await eventually(told)
        assert await bench.cluster.observe() is None
        binding = {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "RoleBinding",
            **_named(LATE),
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": SERVICE_ACCOUNT},
            "subjects": [{"kind": "ServiceAccount", "name": LATE, "namespace": bench.namespace}],
        }
        path = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{bench.namespace}/rolebindings/{LATE}"
        await asyncio.to_thread(bench.kube.apply, path, binding)
        await eventually(bench.cluster.observe)
        await contract.created(bench, "later")


def _named(name: str) -> dict[str, Any]:
    return {"metadata": {"name": name}}


# -- the check itself, for a check that finds nothing proves nothing

RULES = [{"apiGroups": [""], "resources": ["pods"], "verbs": ["list", "create", "patch"]}]
USER = user_of("ns")


def line(
    verb: str, resource: str = "pods", code: int = 200, user: str = USER, at: str = "06:00:00", **more: Any
) -> dict[str, Any]:
    ref = {"resource": resource, "namespace": "ns", "apiVersion": "v1"}
    uri = f"/api/v1/namespaces/ns/{resource}"
    made = {"stage": "ResponseComplete", "verb": verb, "user": {"username": user}, "objectRef": ref, "requestURI": uri}
    return {**made, "responseStatus": {"code": code}, "requestReceivedTimestamp": f"2026-01-01T{at}.000000Z", **more}


NODES = line("list", objectRef={"resource": "nodes"}, requestURI="/api/v1/nodes")


def checked(folder: Path, *lines: dict[str, Any]) -> list[str]:
    path = folder / "audit.log"
    path.write_text("".join(json.dumps(each) + "\n" for each in lines))
    return check_audit(path, SERVICE_ACCOUNT, RULES)


def test_audit_of_exactly_the_rights_is_clean(tmp_path: Path) -> None:
    assert checked(tmp_path, line("list"), line("patch", code=201)) == []


def test_rights_of_another_role_may_be_used_and_need_not_be(tmp_path: Path) -> None:
    lines = [line("list"), line("patch", code=201), line("get", resource="namespaces")]
    assert checked(tmp_path, *lines) == ["outside the Role: get namespaces"]
    beside = [{"apiGroups": [""], "resources": ["namespaces"], "verbs": ["get", "list"]}]
    assert check_audit(tmp_path / "audit.log", SERVICE_ACCOUNT, RULES, beside=beside) == []


def test_refusal_by_an_api_server_that_has_just_started_is_none(tmp_path: Path) -> None:
    again = line("list", at="06:00:02")
    assert checked(tmp_path, line("list", code=403), again, line("patch", code=201)) == []


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        ([line("list"), line("patch", code=200)], "never used: create pods"),
        ([line("list"), line("patch", code=201), line("delete")], "outside the Role: delete pods"),
        ([line("list"), line("list", code=403), line("patch", code=201)], f"refused: list pods ({USER})"),
        (
            [line("list", code=403), line("list", at="06:00:11"), line("patch", code=201)],
            f"refused: list pods ({USER})",
        ),
        ([line("list"), line("patch", code=201), NODES], "not of a namespace: list /api/v1/nodes"),
        ([line("patch", code=201), line("list", user="admin")], "never used: list pods"),
    ],
)
def test_audit_tells_each_kind_of_problem(tmp_path: Path, lines: list[dict[str, Any]], problem: str) -> None:
    assert checked(tmp_path, *lines) == [problem]
