"""Engines come and go under a steady load through the gateway's Service: no request fails that has had nothing yet."""

import json
import time
from typing import Any

import openai
import pytest

from tests.cluster.node.installation import POOL, POOL_NAMESPACE, TENANTS, Installation, Served
from tests.cluster.node.load import Load, steady
from tests.cluster.node.processes import kill, restarts
from tests.cluster.services import until

pytestmark = pytest.mark.timeout(400)
#: An engine on two cores that others keep busy, from nothing to Ready.
START_SECONDS = 120.0
GONE_SECONDS = 90.0
#: The home of all three adapters of the examples, with two replicas and with three.
HOME = 1


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


def until_home_again(installed: Installation, load: Load, seconds: float = START_SECONDS) -> None:
    """Its adapters are Ready there, and answer from there."""
    replica = f"{POOL_NAMESPACE}/{POOL}/{HOME}"
    installed.wait(*TENANTS.values())
    names = set(TENANTS.values())
    since = len(load.answers)

    def answered() -> set[str]:
        return {each.model for each in load.answers[since:] if each.replica == replica and not each.trouble} & names

    until(lambda: answered() == names, seconds, lambda: f"{answered()}: {load}", every=0.1)


def test_an_engine_that_is_deleted_ends_its_streams_and_its_adapters_come_back(served: Served) -> None:
    installed, name = served.installed, f"{POOL}-{HOME}"
    before = installed.engines()[name]["metadata"]["uid"]
    with steady(served) as load:
        stream = load.stream_on(HOME)
        installed.kubectl("delete", "pod", name, "-n", POOL_NAMESPACE, "--wait=false")
        until(lambda: stream.ended, GONE_SECONDS, str(load))

        def back() -> bool:
            pod = installed.engines().get(name)
            return pod is not None and pod["metadata"]["uid"] != before and ready(pod)

        until(back, GONE_SECONDS + START_SECONDS, installed.told, every=0.3)
        until_home_again(installed, load)
    assert load.failed() == []


def test_an_engine_that_is_killed_costs_only_streams_that_had_begun(served: Served) -> None:
    installed, name = served.installed, f"{POOL}-{HOME}"
    pod = installed.engines()[name]
    with steady(served) as load:
        stream = load.stream_on(HOME)
        kill(installed.cluster, pod, "loraplane_engine")
        until(lambda: stream.ended, 10, str(load))
        until(lambda: restarts(installed.engines()[name]) > restarts(pod), GONE_SECONDS, installed.told, every=0.3)
        until_engines(installed, 2)
        until_home_again(installed, load)
    assert "replica_lost" in stream.trouble or "failed while it answered" in stream.trouble, stream
    assert [each for each in load.failed() if not each.first_byte] == []
    assert {each.replica for each in load.failed()} == {f"{POOL_NAMESPACE}/{POOL}/{HOME}"}
    assert all(each.streamed for each in load.failed())


def test_a_pool_grows_and_shrinks_and_nothing_fails(served: Served) -> None:
    installed = served.installed
    with steady(served) as load:
        scale(installed, 3)
        until_engines(installed, 3)
        scale(installed, 1)
        until_engines(installed, 1, GONE_SECONDS)
        load.until_answered(2 * len(TENANTS))
        scale(installed, 2)
        until_engines(installed, 2)
        until_home_again(installed, load)
    assert load.failed() == []


def scale(installed: Installation, replicas: int) -> None:
    """By the scale subresource."""
    installed.kubectl("scale", f"bmp/{POOL}", "-n", POOL_NAMESPACE, f"--replicas={replicas}")


def test_an_adapter_that_is_deleted_ends_its_streams_and_is_unknown_then(served: Served) -> None:
    installed = served.installed
    try:
        with steady(served) as load:
            stream = load.stream_on(HOME)
            name = stream.model
            installed.kubectl("delete", "lora", name, "-n", POOL_NAMESPACE, "--timeout=60s", seconds=70)
            assert stream.ended, "the finalizer went before the stream"
            with served.client(stream.tenant) as client, pytest.raises(openai.NotFoundError):
                client.completions.create(model=name, prompt="Hello", max_tokens=1)
            others = {model for model in TENANTS.values() if model != name}
            since = time.monotonic()
            until(lambda: others <= {each.model for each in load.done(since)}, 60, str(load))
        assert stream.trouble == ""
        assert {(each.model, "404" in each.trouble) for each in load.failed()} <= {(name, True)}
        left = json.loads(installed.cli("adapter", "list", stream.tenant, "--json"))["items"]
        assert [each["claim_ref"] for each in left if each["adapter"] == name] == [""]
    finally:
        installed.kubectl("apply", "-f", "examples/lora")
        installed.wait()
