"""The release's own parts come and go under a steady load: the operator, each gateway, all gateways by an upgrade."""

import json
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.cluster.node.installation import INSTALL_SECONDS, POOL_NAMESPACE, RELEASE, Installation, Served
from tests.cluster.node.load import ASKED, RATE, Answer, steady
from tests.cluster.node.processes import kill, restarts
from tests.cluster.services import until

pytestmark = pytest.mark.timeout(400)
#: From nothing to Ready, with a load beside it.
START_SECONDS = 60.0
#: Until kube-proxy sends nothing more to a container that is gone: the kubelet notices it within a second or two.
NOTICED_SECONDS = 8.0
#: Until the kernel has closed what a killed process listened on; who connects meanwhile is cut off.
DYING_SECONDS = 0.3
#: From a gateway's stop on, Services may still send to it for some time: less than it lingers, which is 5 s.
LATE_SECONDS = 3.0
#: And more than it lingers: only the drain keeps a stream that flows by then.
DRAIN_SECONDS = 7.0


def until_gateways(installed: Installation, seconds: float = START_SECONDS) -> None:
    """Two that are available, and none that is still going."""

    def there() -> bool:
        path = f"/apis/apps/v1/namespaces/{installed.namespace}/deployments/{RELEASE}-gateway"
        status = installed.kube.call("GET", path)["status"]
        every = installed.kube.items(f"/api/v1/namespaces/{installed.namespace}/pods?labelSelector={SELECTOR}")
        return (status.get("availableReplicas"), status.get("updatedReplicas"), len(every)) == (2, 2, 2)

    until(there, seconds, installed.told, every=0.3)


SELECTOR = "app.kubernetes.io/component=gateway"


def test_without_the_operator_requests_go_on_and_it_takes_up_what_waits(served: Served) -> None:
    installed = served.installed
    pod = next(iter(installed.pods("operator").values()))
    with steady(served) as load:
        kill(installed.cluster, pod, "loraplane_operator")
        patch = json.dumps({"spec": {"warmReplicas": 2}})
        installed.kubectl("patch", "lora", "html", "-n", POOL_NAMESPACE, "--type=merge", "-p", patch)
        command = ("wait", "-n", POOL_NAMESPACE, "lora/html", "--for=jsonpath={.status.readyReplicas}=2")
        installed.kubectl(*command, "--timeout=60s", seconds=70)
        assert restarts(installed.pods("operator")[pod["metadata"]["name"]]) == 1
        load.until_answered(6)
    assert load.failed() == []
    installed.kubectl("apply", "-f", "examples/lora")
    installed.wait()


def address(pod: Mapping[str, Any]) -> str:
    """Of one gateway."""
    return f"http://{pod['status']['podIP']}:8000"


def test_a_gateway_that_is_deleted_fails_nothing(served: Served) -> None:
    """Its streams flow on, longer than it lingers; and it takes what Services still send to it, on new connections and
    on kept ones, whose clients it tells to go.
    """
    installed = served.installed
    name, pod = min(installed.pods("gateway").items())
    with steady(served) as load, served.client("acme", at=address(pod)) as kept:
        stream = load.flow(at=address(pod))
        kept.models.list()
        installed.kubectl("delete", "pod", name, "-n", installed.namespace, "--wait=false")
        until(lambda: _told_to_stop(pod), START_SECONDS, str(load))
        stopped = time.monotonic()
        assert kept.models.with_raw_response.list().headers["connection"] == "close"
        until(lambda: _takes_requests(served, pod) and time.monotonic() > stopped + LATE_SECONDS, 30, every=0.2)
        stream.flows_until(stopped + DRAIN_SECONDS)
        stream.leave()
        until_gateways(installed)
        load.until_answered(2 * len(ASKED))
    assert load.failed() == []


def _told_to_stop(pod: Mapping[str, Any]) -> bool:
    """Not ready any more, but there."""
    return httpx.get(f"{address(pod)}/health/ready", trust_env=False, timeout=5).status_code == 503


def _takes_requests(served: Served, pod: Mapping[str, Any]) -> bool:
    with served.client("globex", at=address(pod)) as late:
        return [model.id for model in late.models.list()] != []


@pytest.mark.parametrize("number", [0, 1])
def test_a_gateway_that_is_killed_costs_what_was_on_its_connections(served: Served, number: int) -> None:
    installed = served.installed
    name, pod = sorted(installed.pods("gateway").items())[number]
    (other,) = (each for each in installed.pods("gateway").values() if each["metadata"]["name"] != name)
    with steady(served) as load:
        cut, whole = load.flow(at=address(pod)), load.flow(at=address(other))
        running = load.running()
        kill(installed.cluster, pod, "loraplane_gateway")
        killed = time.monotonic() + DYING_SECONDS
        until(
            lambda: restarts(installed.pods("gateway")[name]) > restarts(pod), START_SECONDS, installed.told, every=0.1
        )
        whole.flows_until(time.monotonic())
        whole.leave()
        until_gateways(installed)
        load.until_answered(2 * len(ASKED))
    failed = load.failed()
    assert cut in failed and cut.ended < killed + 2
    assert all(each.began < killed + NOTICED_SECONDS for each in failed), failed
    assert [each for each in failed if not connection_ended(each)] == []
    assert [each for each in failed if each.began > killed and not each.unsent and not each.pooled] == []
    assert len([each for each in failed if each.began <= killed]) <= len(running) + 2  # begun meanwhile


def connection_ended(answer: Answer) -> bool:
    return any(name in answer.trouble for name in ("APIConnectionError", "RemoteProtocolError", "ReadError"))


def test_a_rolling_upgrade_fails_nothing(served: Served) -> None:
    """A value changes, so that every gateway is replaced, by a new one that is Ready first. By each of the old ones
    there is a stream that flows on while it drains."""
    installed = served.installed
    before = installed.pods("gateway")
    with steady(served) as load, ThreadPoolExecutor(len(before)) as pool:
        streams = {name: load.flow(at=address(pod)) for name, pod in before.items()}
        began = time.monotonic()
        drained = [pool.submit(_flows_while_it_drains, installed, name, stream) for name, stream in streams.items()]
        installed.upgrade(gateway__settings={"max_in_flight": 512})
        for each in drained:
            each.result()
        until_gateways(installed)
        took = time.monotonic() - began
        asked = len([each for each in load.answers if each.began >= began])
        load.until_answered(2 * len(ASKED))
    assert load.failed() == []
    assert asked >= RATE * took - 1, f"{asked} requests in {took:.0f} s are no {RATE:g} a second"
    assert not before.keys() & installed.pods("gateway").keys()


def _flows_while_it_drains(installed: Installation, gateway: str, stream: Answer) -> None:
    until(lambda: gateway not in installed.pods("gateway"), INSTALL_SECONDS, lambda: f"{gateway} stays", every=0.1)
    stream.flows_until(time.monotonic() + DRAIN_SECONDS)
    stream.leave()
