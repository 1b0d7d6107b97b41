"""EndpointSlices, from Kubernetes and from local files."""

import copy
from collections.abc import Callable
from typing import Any

import pytest

from loraplane_core.errors import InvalidName
from loraplane_core.identity import ReplicaId
from loraplane_core.wire.endpoints import Endpoint, from_slice, to_slice

ENDPOINT = Endpoint(
    replica=ReplicaId("default", "smol", 1),
    address="127.0.0.1",
    data_port=1,
    admin_port=2,
    metrics_port=3,
    ready=True,
    terminating=False,
    epoch=4,
)


@pytest.mark.parametrize(("ready", "terminating"), [(True, False), (False, False), (False, True)])
def test_a_local_slice_reads_back(ready: bool, terminating: bool) -> None:
    endpoint = Endpoint(
        replica=ENDPOINT.replica,
        address="10.0.0.7",
        data_port=1,
        admin_port=2,
        metrics_port=3,
        ready=ready,
        terminating=terminating,
        epoch=9,
    )
    assert from_slice(to_slice(endpoint)) == [endpoint]


def test_a_slice_of_several_endpoints_without_an_epoch() -> None:
    manifest = to_slice(ENDPOINT)
    second = copy.deepcopy(manifest["endpoints"][0])
    second["targetRef"]["name"] = "smol-12"
    second["conditions"] = None
    manifest["endpoints"].append(second)
    del manifest["metadata"]["annotations"]
    first, other = from_slice(manifest)
    assert (first.epoch, other.epoch) == (1, 1)
    assert other.replica == ReplicaId("default", "smol", 12)
    assert not other.ready


def test_slices_of_others_and_empty_ones_hold_no_replicas() -> None:
    assert from_slice({"metadata": {"name": "kube-dns", "namespace": "kube-system"}}) == []
    assert from_slice({**to_slice(ENDPOINT), "endpoints": None}) == []


@pytest.mark.parametrize("pod", ["other-1", "smol", "smol-x", "smol-1-debug", "smol-01", "x-smol-1", "smol-9999999"])
def test_a_pod_that_is_none_of_the_pools_is_passed_over_and_spoils_nobody_elses_endpoint(pod: str) -> None:
    """A copy of an engine's pod, made to look into it, has its labels and its ports."""
    manifest = to_slice(ENDPOINT)
    foreign = copy.deepcopy(manifest["endpoints"][0])
    foreign["targetRef"]["name"] = pod
    nobody = {"addresses": ["10.0.0.9"]}
    assert from_slice({**manifest, "endpoints": [foreign, *manifest["endpoints"], nobody]}) == [ENDPOINT]


BREAKS: list[Callable[[dict[str, Any]], object]] = [
    lambda m: m.pop("metadata"),
    lambda m: m.pop("ports"),
    lambda m: m["ports"].pop(),
    lambda m: m["ports"][0].update(port="x"),
    lambda m: m["endpoints"][0].update(addresses=[]),
    lambda m: m.update(endpoints=["x"]),
    lambda m: m["metadata"]["annotations"].update({"loraplane.dev/credential-epoch": "two"}),
    lambda m: m["metadata"].update(namespace="Not-A-Name"),
]


@pytest.mark.parametrize("index", range(len(BREAKS)))
def test_a_malformed_slice_is_one_kind_of_error(index: int) -> None:
    manifest = to_slice(ENDPOINT)
    BREAKS[index](manifest)
    with pytest.raises(InvalidName, match="malformed EndpointSlice"):
        from_slice(manifest)


def test_epoch_is_read_from_a_label_where_there_is_no_annotation() -> None:
    """Kubernetes copies a Service's labels to its slices, but none of its annotations."""
    raw = to_slice(ENDPOINT)
    del raw["metadata"]["annotations"]
    raw["metadata"]["labels"]["loraplane.dev/credential-epoch"] = "3"
    assert [each.epoch for each in from_slice(raw)] == [3]
