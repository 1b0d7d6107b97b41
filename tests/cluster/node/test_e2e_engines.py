"""Engines come and go under a steady load through the gateway's Service: no request fails that has had nothing yet."""

import json
import time
from typing import Any

import httpx
import openai
import pytest

from loraplane_core import credentials
from loraplane_core.identity import PoolRef
from loraplane_core.labels import ANNOTATION_EPOCH, FINALIZER
from loraplane_core.wire.engine import WARM
from loraplane_operator.cluster.manifests import PORTS
from tests.cluster.kube import ADAPTERS
from tests.cluster.node.installation import POOL, POOL_NAMESPACE, TENANTS, Installation, Served
from tests.cluster.node.load import ASKED, BASE, LONG, Answer, Load, steady
from tests.cluster.node.processes import kill, restarts
from tests.cluster.services import until

pytestmark = pytest.mark.timeout(400)
#: Requests a second: what two engines on two cores answer at ease while a third one starts beside them.
RATE = 1.5
#: An engine on two cores that others keep busy, from nothing to Ready.
START_SECONDS = 120.0
GONE_SECONDS = 90.0
#: A Ready engine holds its adapters again, and their status says since when: volatile parts of it wait for 30 s.
WARM_SECONDS = 45.0
#: So long an engine that shall go, or shall let an adapter go, is seen to answer on. It would end at once otherwise.
DRAIN_SECONDS = 3.0
#: The home of all three adapters of the examples, with two replicas and with three.
HOME = 1
HOME_NAME = f"{POOL_NAMESPACE}/{POOL}/{HOME}"
#: Its tenant asks for nothing while engines are lost, so that nobody but the operator can bring it back.
QUIET_TENANT, QUIET = "initech", "html"
BUSY = [each for each in ASKED if each[1] != QUIET]


def ready(pod: dict[str, Any] | None) -> bool:
    conditions = (pod or {}).get("status", {}).get("conditions", [])
    return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)


def until_engines(installed: Installation, count: int, seconds: float = START_SECONDS) -> None:
    """So many, all Ready, and none that is still going."""

    def there() -> bool:
        path = f"/api/v1/namespaces/{POOL_NAMESPACE}/pods?labelSelector=loraplane.dev/pool={POOL}"
        pods = installed.kube.items(path)
        return len(pods) == count and all(ready(pod) and "deletionTimestamp" not in pod["metadata"] for pod in pods)

    until(there, seconds, installed.told, every=0.3)


def until_home_again(served: Served, load: Load, since: float) -> None:
    """After a loss at that time its adapters are Ready there, and answer from there; one that nobody asked for, too."""
    installed = served.installed
    until(lambda: _held_since(installed, since), WARM_SECONDS, lambda: str(installed.adapter(QUIET)), every=0.2)
    installed.wait(*TENANTS.values())
    names = {model for _, model in BUSY} & set(TENANTS.values())
    begun = len(load.answers)

    def answered() -> set[str]:
        return {each.model for each in load.answers[begun:] if each.replica == HOME_NAME and not each.trouble} & names

    until(lambda: answered() == names, START_SECONDS, lambda: f"{answered()}: {load}", every=0.1)
    first = load.ask(Answer(QUIET_TENANT, QUIET, streamed=False, pooled=True))
    until(lambda: first.ended, START_SECONDS, lambda: str(first))
    assert (first.trouble, first.replica, first.residency) == ("", HOME_NAME, "hit")


def _held_since(installed: Installation, since: float) -> bool:
    """By the status: loaded there after that time, to the second."""
    rows = installed.adapter(QUIET)["status"]["replicas"]
    told = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(since))
    return [row["name"] for row in rows if row["residency"] in WARM and row["since"] > told] == [HOME_NAME]


def test_an_engine_that_is_deleted_ends_its_streams_and_its_adapters_come_back(served: Served) -> None:
    installed, name = served.installed, f"{POOL}-{HOME}"
    before = installed.engines()[name]["metadata"]["uid"]
    with steady(served, rate=RATE, asked=BUSY) as load:
        stream = load.flow(HOME)
        lost = time.time()
        installed.kubectl("delete", "pod", name, "-n", POOL_NAMESPACE, "--wait=false")
        stream.flows_until(time.monotonic() + DRAIN_SECONDS)
        stream.leave()

        def back() -> bool:
            pod = installed.engines().get(name)
            return pod is not None and pod["metadata"]["uid"] != before and ready(pod)

        until(back, GONE_SECONDS + START_SECONDS, installed.told, every=0.3)
        until_home_again(served, load, lost)
    assert load.failed() == []


def test_an_engine_that_is_killed_costs_only_streams_that_had_begun(served: Served) -> None:
    installed, name = served.installed, f"{POOL}-{HOME}"
    pod = installed.engines()[name]
    with steady(served, rate=RATE, asked=BUSY) as load:
        asked = [load.ask(Answer(tenant, model, streamed=False, pooled=True), LONG) for tenant, model in BUSY]
        stream = load.flow(HOME)
        lost, killed = time.time(), time.monotonic()
        unanswered = [each for each in asked if not each.ended]
        kill(installed.cluster, pod, "loraplane_engine")
        until(lambda: stream.ended, 10, str(load))
        until(lambda: restarts(installed.engines()[name]) > restarts(pod), GONE_SECONDS, installed.told, every=0.3)
        until_engines(installed, 2)
        until_home_again(served, load, lost)
    assert "replica_lost" in stream.trouble or "failed while it answered" in stream.trouble, stream
    assert [each for each in load.failed() if not each.first_byte] == []
    assert {each.replica for each in load.failed()} == {HOME_NAME}
    assert all(each.streamed and each.first_byte < killed + 1 for each in load.failed())
    assert any(each.model != BASE and each.replica != HOME_NAME for each in unanswered), asked


def test_a_pool_grows_and_shrinks_and_nothing_fails(served: Served) -> None:
    """Its adapters' home leaves while a stream flows from it; they are warm on the other before, so none is cold."""
    installed = served.installed
    with steady(served, rate=RATE) as load:
        scale(installed, 3)
        until_engines(installed, 3)
        stream = load.flow(HOME)
        shrinks = time.monotonic()
        scale(installed, 1)
        until(lambda: _going(installed, HOME), GONE_SECONDS, installed.told, every=0.1)
        stream.flows_until(time.monotonic() + DRAIN_SECONDS)
        stream.leave()
        until_engines(installed, 1, GONE_SECONDS)
        load.until_answered(2 * len(TENANTS))
        cold = [each for each in load.answers if each.began > shrinks and each.residency == "cold"]
        grows = time.time()
        scale(installed, 2)
        until_engines(installed, 2)
        until_home_again(served, load, grows)
    assert load.failed() == []
    assert cold == []


def _going(installed: Installation, ordinal: int) -> bool:
    pod = installed.kube.get(f"/api/v1/namespaces/{POOL_NAMESPACE}/pods/{POOL}-{ordinal}")
    return pod is None or "deletionTimestamp" in pod["metadata"]


def scale(installed: Installation, replicas: int) -> None:
    """By the scale subresource."""
    installed.kubectl("scale", f"bmp/{POOL}", "-n", POOL_NAMESPACE, f"--replicas={replicas}")


def test_an_adapter_that_is_deleted_lets_its_streams_end_and_is_unknown_and_unloaded_then(served: Served) -> None:
    installed = served.installed
    try:
        with steady(served, rate=RATE) as load:
            stream = load.flow(HOME)
            name = stream.model
            path = f"{ADAPTERS.format(namespace=POOL_NAMESPACE)}/{name}"
            assert name in TENANTS.values() and name in holds(installed, HOME)
            installed.kubectl("delete", "lora", name, "-n", POOL_NAMESPACE, "--wait=false")
            stream.flows_until(time.monotonic() + DRAIN_SECONDS)
            assert FINALIZER in installed.kube.call("GET", path)["metadata"]["finalizers"]
            assert installed.condition(name, "Deleting")["status"] == "True"
            stream.leave()
            until(lambda: installed.kube.get(path) is None, GONE_SECONDS, lambda: str(installed.kube.get(path)))
            assert [ordinal for ordinal in (0, 1) if name in holds(installed, ordinal)] == []
            with served.client(stream.tenant) as client, pytest.raises(openai.NotFoundError):
                client.completions.create(model=name, prompt="Hello", max_tokens=1)
            others = {model for model in TENANTS.values() if model != name}
            since = time.monotonic()
            until(lambda: others <= {each.model for each in load.done(since)}, 60, str(load))
        assert {(each.model, "404" in each.trouble) for each in load.failed()} == {(name, True)}
        left = json.loads(installed.cli("adapter", "list", stream.tenant, "--json"))["items"]
        assert [each["claim_ref"] for each in left if each["adapter"] == name] == [""]
    finally:
        installed.kubectl("apply", "-f", "examples/lora")
        installed.wait()


def holds(installed: Installation, ordinal: int) -> set[str]:
    """Names of the adapters that an engine says it holds, in whatever tier."""
    pod = installed.engines()[f"{POOL}-{ordinal}"]
    admin = credentials.role_key(installed.master_key(), "admin")
    epoch = int(pod["metadata"]["annotations"][ANNOTATION_EPOCH])
    token = credentials.engine_credential(admin, PoolRef(POOL_NAMESPACE, POOL), epoch)
    url = f"http://{pod['status']['podIP']}:{PORTS['admin']}/adapters"
    answer = httpx.get(url, headers={"authorization": f"Bearer {token}"}, trust_env=False, timeout=10)
    held = [each for each in answer.raise_for_status().json()["adapters"] if each["residency"] != "absent"]
    return {each["ref"].partition("@")[0].partition("/")[2] for each in held}
