"""The release's own parts come and go under a steady load: the operator, each gateway, all gateways by an upgrade."""

import json
import time

import pytest

from tests.cluster.node.installation import POOL_NAMESPACE, RELEASE, Installation, Served
from tests.cluster.node.load import Answer, steady
from tests.cluster.node.processes import kill, restarts
from tests.cluster.services import until

pytestmark = pytest.mark.timeout(400)
#: From nothing to Ready, with a load beside it.
START_SECONDS = 60.0
#: Until kube-proxy sends nothing more to a container that is gone: the kubelet notices it within a second or two.
NOTICED_SECONDS = 8.0
#: Until the kernel has closed what a killed process listened on; who connects meanwhile is cut off.
DYING_SECONDS = 0.3


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


def test_a_gateway_that_is_deleted_fails_nothing(served: Served) -> None:
    installed = served.installed
    name = min(installed.pods("gateway"))
    with steady(served) as load:
        streams = [load.stream_on(1) for _ in range(2)]
        installed.kubectl("delete", "pod", name, "-n", installed.namespace, "--wait=false")
        until(lambda: all(each.ended for each in streams), START_SECONDS, str(load))
        until_gateways(installed)
        load.until_answered(12)
    assert load.failed() == []


@pytest.mark.parametrize("number", [0, 1])
def test_a_gateway_that_is_killed_costs_what_was_on_its_connections(served: Served, number: int) -> None:
    installed = served.installed
    name, pod = sorted(installed.pods("gateway").items())[number]
    with steady(served) as load:
        running = load.running()
        kill(installed.cluster, pod, "loraplane_gateway")
        killed = time.monotonic() + DYING_SECONDS
        until(lambda: restarts(installed.pods("gateway")[name]) > restarts(pod), START_SECONDS, installed.told)
        until_gateways(installed)
        load.until_answered(12)
    failed = load.failed()
    assert all(each.began < killed + NOTICED_SECONDS for each in failed), failed
    assert [each for each in failed if not connection_ended(each)] == []
    assert [each for each in failed if each.began > killed and not each.unsent and not each.pooled] == []
    assert len([each for each in failed if each.began <= killed]) <= len(running) + 2  # begun meanwhile


def connection_ended(answer: Answer) -> bool:
    return any(name in answer.trouble for name in ("APIConnectionError", "RemoteProtocolError", "ReadError"))


def test_a_rolling_upgrade_fails_nothing(served: Served) -> None:
    """A value changes, so that every gateway is replaced: by a new one that is Ready first."""
    installed = served.installed
    before = set(installed.pods("gateway"))
    with steady(served) as load:
        streams = [load.stream_on(1) for _ in range(2)]
        began = time.monotonic()
        installed.upgrade(gateway__settings={"max_in_flight": 512})
        until_gateways(installed)
        took = time.monotonic() - began
        load.until_answered(12)
        asked = len([each for each in load.answers if each.began >= began])
    assert load.failed() == []
    assert all(each.ended for each in streams)
    assert asked >= 2 * took, f"{asked} requests in {took:.0f} s are no 3 a second"
    assert not before & set(installed.pods("gateway"))
