"""Replicas as StatefulSets and pods tell them."""

from typing import Any

import pytest

from loraplane_core.identity import PoolRef
from loraplane_core.labels import ANNOTATION_EPOCH, API_VERSION, LABEL_POOL, POOL_KIND
from loraplane_operator.cluster.pods import LAST_LINE_MAX, PodView, SetView, pod_view, set_view, workloads
from loraplane_operator.words import Replica

SITE = "s1"
UNSCHEDULABLE = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "no GPU"}
READY = [{"type": "Ready", "status": "True"}]


def pod(name: str = "llama-0", owner: str = "set-uid", pool: str = "llama", **changes: Any) -> dict[str, Any]:
    metadata = {
        "name": name,
        "namespace": "prod",
        "labels": {LABEL_POOL: pool},
        "annotations": {"loraplane.dev/revision": f"r1.{SITE}"},
        "ownerReferences": [{"kind": "StatefulSet", "name": pool, "uid": owner, "controller": True}],
    }
    status = {"phase": "Running", "podIP": "10.0.0.1", "conditions": READY, **changes.pop("status", {})}
    return {"metadata": {**metadata, **changes}, "status": status}


def stateful_set(replicas: int = 2, name: str = "llama", uid: str = "set-uid") -> dict[str, Any]:
    metadata = {"name": name, "namespace": "prod", "uid": uid, "labels": {LABEL_POOL: name}}
    owner = {"apiVersion": API_VERSION, "kind": POOL_KIND, "name": name, "uid": "pool-uid", "controller": True}
    return {"metadata": {**metadata, "ownerReferences": [owner]}, "spec": {"replicas": replicas}}


def seen(raw: dict[str, Any]) -> PodView:
    found = pod_view(raw, SITE)
    assert found is not None
    return found


def replicas(*pods: dict[str, Any], **changes: Any) -> tuple[Replica, ...]:
    owner = set_view(stateful_set(**changes))
    assert owner is not None
    return workloads([owner], [seen(each) for each in pods])[PoolRef("prod", "llama")]


def test_each_wished_ordinal_is_a_replica_also_before_its_pod() -> None:
    first, second = replicas(pod())
    assert (first.ready, first.running, first.address, first.revision) == (True, True, "10.0.0.1", "r1")
    assert (second.ready, second.running, second.revision) == (False, False, "")


def test_terminating_pod_is_not_ready_but_still_speaks() -> None:
    first, second = replicas(pod(deletionTimestamp="2026-01-01T00:00:00Z"), pod("llama-1"))
    assert (first.terminating, first.ready, first.running, first.address) == (True, False, True, "10.0.0.1")
    assert not second.terminating


@pytest.mark.parametrize(("annotation", "epoch"), [({"loraplane.dev/credential-epoch": "3"}, 3), ({}, 1)])
def test_epoch_is_the_one_the_pod_was_made_with(annotation: dict[str, str], epoch: int) -> None:
    first, _ = replicas(pod(annotations={"loraplane.dev/revision": f"r1.{SITE}", **annotation}))
    assert (first.epoch, first.revision) == (epoch, "r1")


def test_pod_that_is_scaled_away_is_no_replica() -> None:
    assert [each.id.ordinal for each in replicas(pod(), pod("llama-1"), replicas=1)] == [0]


@pytest.mark.parametrize("owners", [[], [{"kind": "ReplicaSet", "name": "x", "uid": "set-uid", "controller": True}]])
def test_pod_of_nobody_or_of_another_controller_is_not_taken(owners: list[dict[str, Any]]) -> None:
    first, _ = replicas(pod(ownerReferences=owners))
    assert not first.running


def test_pod_of_a_former_set_of_that_name_is_not_taken() -> None:
    first, _ = replicas(pod(owner="former-uid"))
    assert not first.running


def test_pools_whose_names_begin_alike_keep_their_pods_apart() -> None:
    """`a-1-0` is replica 0 of pool `a-1`, never a replica of pool `a`."""
    sets = [SetView(PoolRef("prod", name), uid, 1) for name, uid in (("a", "ua"), ("a-1", "ub"))]
    found = workloads(sets, [seen(pod("a-1-0", owner="ub", pool="a-1"))])
    assert not found[PoolRef("prod", "a")][0].running
    assert found[PoolRef("prod", "a-1")][0].running


@pytest.mark.parametrize("name", ["llama", "llama-x", "llama-0-0", "other-0"])
def test_pod_whose_name_is_no_ordinal_is_passed_over(name: str) -> None:
    assert pod_view(pod(name), SITE) is None


def test_restarts_are_counted() -> None:
    first, _ = replicas(pod(status={"containerStatuses": [{"restartCount": 3, "state": {"running": {}}}]}))
    assert first.restarts == 3


def waiting(reason: str, message: str = "", **last: Any) -> dict[str, Any]:
    state = {"waiting": {"reason": reason, "message": message}}
    return {"containerStatuses": [{"restartCount": 1, "state": state, "lastState": last}]}


def running_after(code: int, *, ready: bool) -> dict[str, Any]:
    last = {"terminated": {"exitCode": code, "message": "no model"}}
    return {"containerStatuses": [{"restartCount": 1, "ready": ready, "state": {"running": {}}, "lastState": last}]}


@pytest.mark.parametrize(
    ("status", "told"),
    [
        (waiting("ContainerCreating"), ""),
        (waiting("PodInitializing"), ""),
        (waiting("ImagePullBackOff", "no such image"), "ImagePullBackOff: no such image"),
        (
            waiting("CreateContainerConfigError", 'secret "x" not found'),
            'CreateContainerConfigError: secret "x" not found',
        ),
        (
            waiting("CrashLoopBackOff", "back-off 10s", terminated={"reason": "OOMKilled", "exitCode": 137}),
            "CrashLoopBackOff: back-off 10s (last: OOMKilled, exit code 137)",
        ),
        (
            waiting("CrashLoopBackOff", "back-off 10s", terminated={"exitCode": 2, "message": "usage\ne: no model\n"}),
            "CrashLoopBackOff: back-off 10s (last: Error, exit code 2, e: no model)",
        ),
        (
            {"containerStatuses": [{"restartCount": 0, "state": {"terminated": {"reason": "Error", "exitCode": 2}}}]},
            "Error: exit code 2",
        ),
        (running_after(2, ready=False), "started again after Error: exit code 2, no model"),
        (running_after(2, ready=True), ""),
        (running_after(0, ready=False), ""),
        (
            {"containerStatuses": [{"state": {"terminated": {"exitCode": 1, "message": "x" * 5000}}}]},
            f"Error: exit code 1, {'x' * LAST_LINE_MAX}",
        ),
        (
            {
                "conditions": [
                    {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "no GPU"}
                ]
            },
            "Unschedulable: no GPU",
        ),
        ({"initContainerStatuses": waiting("ErrImagePull", "denied")["containerStatuses"]}, "ErrImagePull: denied"),
    ],
)
def test_trouble_is_told_and_a_start_is_none(status: dict[str, Any], told: str) -> None:
    first, _ = replicas(pod(status=status))
    assert first.message == told


def test_revision_of_another_site_equals_no_wished_one() -> None:
    first, _ = replicas(pod(annotations={"loraplane.dev/revision": "r1.other"}))
    assert first.revision != "r1"


def test_stateful_set_of_another_name_than_its_label_is_no_pool() -> None:
    raw = stateful_set()
    raw["metadata"]["labels"] = {LABEL_POOL: "other"}
    assert set_view(raw) is None


FOREIGN = {"apiVersion": "apps/v1", "kind": "Deployment", "name": "llama", "uid": "u", "controller": True}


@pytest.mark.parametrize("owners", [[], [FOREIGN], [{**FOREIGN, "kind": POOL_KIND}]])
def test_stateful_set_that_no_pool_owns_is_none_of_ours_whatever_its_label_says(owners: list[dict[str, Any]]) -> None:
    """Else it would be deleted as the leftover of a pool that does not exist."""
    raw = stateful_set()
    raw["metadata"]["ownerReferences"] = owners
    assert set_view(raw) is None


@pytest.mark.parametrize("text", ["9" * 5000, "0", "-1", "\u0663", "x", ""])
def test_epoch_that_is_no_number_is_the_first(text: str) -> None:
    """Anybody may make a pod with our label; Python refuses to read a number of more than 4300 digits."""
    first, _ = replicas(pod(annotations={"loraplane.dev/revision": f"r1.{SITE}", ANNOTATION_EPOCH: text}))
    assert first.epoch == 1


def test_replica_without_a_pod_has_the_epoch_with_which_it_will_start() -> None:
    raw = stateful_set()
    raw["spec"]["template"] = {"metadata": {"annotations": {ANNOTATION_EPOCH: "4"}}}
    owner = set_view(raw)
    assert owner is not None
    assert [each.epoch for each in workloads([owner], [seen(pod())])[PoolRef("prod", "llama")]] == [1, 4]
