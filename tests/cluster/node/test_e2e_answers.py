"""From `helm install` to answers, with real pods of the shipped images under `restricted`: the examples' files, the
real commands, the official client. Ends with what is refused, and with versions.
"""

import json
import time
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from examples.styles import DEMO_QUESTION, MAX_TOKENS, STYLES
from loraplane_core.labels import API_VERSION
from tests.cluster.kube import ADAPTERS, POOLS
from tests.cluster.node.installation import POOL, POOL_NAMESPACE, TENANTS, Installation, Served
from tests.cluster.node.restricted import local_volume
from tests.cluster.services import ROOT, until
from tests.cluster.tool.controlplane import NODE_NAME

pytestmark = pytest.mark.timeout(400)
REFUSED_SECONDS = 30.0
#: A change of version is in every gateway's snapshot by then.
FLIP_SECONDS = 10.0
#: From the first piece of a streamed answer to its last, at least: a step of the model takes longer than a millisecond.
STREAMED_SECONDS = 0.02
QUESTION: list[ChatCompletionMessageParam] = [{"role": "user", "content": DEMO_QUESTION}]


def adapter(name: str, **spec: Any) -> dict[str, Any]:
    body = {"poolRef": {"name": POOL, "namespace": POOL_NAMESPACE}, "warmReplicas": 1, **spec}
    return {"apiVersion": API_VERSION, "kind": "LoRAAdapter", "metadata": {"name": name}, "spec": body}


@pytest.fixture
def added(served: Served) -> Iterator["Added"]:
    made = Added(served.installed)
    yield made
    made.remove()


class Added:
    """Adapter objects of one test."""

    def __init__(self, installed: Installation) -> None:
        self._installed = installed
        self._paths: list[str] = []

    def __call__(self, name: str, namespace: str, **spec: Any) -> None:
        path = f"{ADAPTERS.format(namespace=namespace)}/{name}"
        self._paths.append(path)
        self._installed.kube.apply(path, adapter(name, **spec))

    def remove(self) -> None:
        for path in self._paths:
            self._installed.kube.delete(path)
        for path in self._paths:
            until(lambda path=path: self._installed.kube.get(path) is None, REFUSED_SECONDS, path)  # type: ignore[misc]


# -- answers


def test_helm_test_passes_and_both_gateways_and_engines_are_ready(served: Served) -> None:
    served.installed.helm("test")
    assert len(served.installed.pods("gateway")) == 2
    columns = served.installed.kubectl("get", "bmp", POOL, "-n", POOL_NAMESPACE, "--no-headers").split()
    assert columns[:4] == [POOL, "smollm2-135m-instruct", "2", "2"], columns


@pytest.mark.parametrize("tenant", TENANTS)
def test_each_tenant_gets_its_style_streamed_and_whole(served: Served, tenant: str) -> None:
    name = TENANTS[tenant]
    fields: dict[str, Any] = {"model": name, "messages": QUESTION, "max_tokens": MAX_TOKENS, "temperature": 0}
    with served.client(tenant) as client:
        raw = client.chat.completions.with_raw_response.create(**fields)
        whole = raw.parse().choices[0].message.content or ""
        stream = client.chat.completions.create(stream=True, **fields)
        pieces = [(time.monotonic(), choice.delta.content or "") for event in stream for choice in event.choices]
        listed = {model.id for model in client.models.list()}
    assert STYLES[name].mark(whole), whole
    assert "".join(text for _, text in pieces) == whole
    assert pieces[-1][0] - pieces[0][0] > STREAMED_SECONDS, "it came all at once"
    assert raw.headers["x-loraplane-adapter-id"].startswith(f"{tenant}/{name}@1#")
    assert {model for model in listed if model in STYLES} == {name}


def test_a_foreign_adapter_and_an_unknown_one_are_the_same_404(served: Served) -> None:
    texts = []
    with served.client("globex") as client:
        for model in ("acme/pirate", "acme/no-such", "pirate", "no-such"):
            with pytest.raises(openai.NotFoundError) as refused:
                client.chat.completions.create(model=model, messages=QUESTION, max_tokens=1)
            texts.append(json.dumps(refused.value.body).replace(model, "X"))
    assert len(set(texts)) == 1, texts


def test_a_pool_takes_its_base_from_a_claim_of_its_own(served: Served, added: Added) -> None:
    """`pvc://CLAIM/PATH`: the claim is in the pool's namespace, and only that pool mounts it."""
    installed, volume = served.installed, f"{served.installed.namespace}-bases"
    local_volume(installed.kube, volume, ROOT / ".loraplane" / "models", NODE_NAME)
    claim = f"/api/v1/namespaces/{POOL_NAMESPACE}/persistentvolumeclaims/bases"
    size = {"requests": {"storage": "1Gi"}}
    spec = {"accessModes": ["ReadWriteOnce"], "storageClassName": "none", "volumeName": volume, "resources": size}
    named = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "bases"}}
    installed.kube.apply(claim, {**named, "spec": spec})
    pool = f"{POOLS.format(namespace=POOL_NAMESPACE)}/claimed"
    base = {"name": "claimed-base", "aliases": ["HuggingFaceTB/SmolLM2-135M-Instruct"]}
    engine = {"maxModelLen": 256, "maxSequences": 4, "adapterMemory": "32Mi", "hostCache": "64Mi", "threads": 1}
    wished = {"baseModel": {**base, "uri": "pvc://bases/smollm2-135m-instruct"}, "replicas": 1, "engine": engine}
    try:
        named = {"apiVersion": API_VERSION, "kind": "BaseModelPool", "metadata": {"name": "claimed"}}
        installed.kube.apply(pool, {**named, "spec": wished})
        added("butler", POOL_NAMESPACE, tenant="globex", source={"uri": "file:butler"}, poolRef={"name": "claimed"})
        installed.wait("butler")
        with served.client("globex") as client:
            raw = client.chat.completions.with_raw_response.create(
                model="claimed-base:butler", messages=QUESTION, max_tokens=MAX_TOKENS, temperature=0
            )
        assert raw.headers["x-loraplane-replica"] == f"{POOL_NAMESPACE}/claimed/0"
        assert STYLES["butler"].mark(raw.parse().choices[0].message.content or "")
    finally:
        added.remove()
        installed.kube.delete(pool)
        until(lambda: installed.kube.get(pool) is None, 90, lambda: str(installed.kube.get(pool)))
        installed.kube.delete(claim)
        installed.kube.delete(f"/api/v1/persistentvolumes/{volume}")


# -- refusals


def test_an_adapter_of_another_base_is_refused(served: Served, added: Added) -> None:
    added("stranger", POOL_NAMESPACE, tenant="acme", source={"uri": "file:other-base"})
    told = until_refused(served.installed, "stranger", POOL_NAMESPACE, "Validated")
    assert told["reason"] == "BaseModelMismatch"
    assert "example-org/other-base-1b" in told["message"] and "smollm2-135m-instruct" in told["message"]
    with served.client("acme") as client, pytest.raises(openai.NotFoundError):
        client.completions.create(model="stranger", prompt="Hello", max_tokens=1)
    with served.client("acme") as client, pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model="llama-3.1-8b:pirate", prompt="Hello", max_tokens=1)
    assert refused.value.code == "base_model_mismatch"


def test_a_tenant_that_does_not_list_the_namespace_is_refused_until_it_does(served: Served, added: Added) -> None:
    installed = served.installed
    installed.cli("tenant", "create", "hooli")
    added("suited", installed.team, tenant="hooli", source={"uri": "file:butler"})
    told = until_refused(installed, "suited", installed.team, "Claimed")
    assert told["reason"] == "TenantNotBound"
    assert "'hooli'" in told["message"] and installed.team in told["message"]
    installed.cli("tenant", "create", "hooli", "--namespace", installed.team)
    installed.kubectl("wait", "-n", installed.team, "--for=condition=Ready", "lora/suited", "--timeout=60s", seconds=70)


def test_the_second_object_that_claims_an_adapter_is_refused(served: Served, added: Added) -> None:
    installed = served.installed
    added("mine", installed.team, tenant="acme", adapter="pirate", source={"uri": "file:pirate-v2"})
    told = until_refused(installed, "mine", installed.team, "Claimed")
    assert told["reason"] == "ClaimedByOther"
    assert f"{POOL_NAMESPACE}/pirate" in told["message"]
    assert serving(served).startswith("acme/pirate@1#")


def until_refused(installed: Installation, name: str, namespace: str, kind: str) -> dict[str, Any]:
    """The condition of that kind, once it is False; the adapter is not Ready for the same reason."""
    found = until(
        lambda: (told := installed.condition(name, kind, namespace))["status"] == "False" and told,
        REFUSED_SECONDS,
        lambda: str(installed.adapter(name, namespace)),
    )
    assert found
    ready = installed.condition(name, "Ready", namespace)
    assert (ready["status"], ready["reason"]) == ("False", found["reason"])
    return found


# -- versions


def serving(served: Served) -> str:
    """Which weights answer for acme's pirate."""
    with served.client("acme") as client:
        raw = client.completions.with_raw_response.create(model="pirate", prompt="Hello", max_tokens=1)
    return str(raw.headers["x-loraplane-adapter-id"])


def until_serves(served: Served, prefix: str) -> str:
    """In both gateways: several requests in a row, each on a connection of its own."""
    seen: list[str] = []

    def in_a_row() -> bool:
        seen.append(serving(served))
        return len(seen) >= 6 and all(each.startswith(prefix) for each in seen[-6:])

    until(in_a_row, FLIP_SECONDS, lambda: f"{prefix}, not {seen[-6:]}")
    return seen[-1]


def test_versions_by_object_roll_back_by_object_and_by_one_command_o68(served: Served) -> None:
    installed = served.installed

    def edit(**spec: Any) -> None:
        patch = json.dumps({"spec": spec})
        installed.kubectl("patch", "lora", "pirate", "-n", POOL_NAMESPACE, "--type=merge", "-p", patch)

    first = until_serves(served, "acme/pirate@1#")
    edit(source={"uri": "file:pirate-v2"})
    installed.kubectl(
        "wait", "-n", POOL_NAMESPACE, "lora/pirate", "--for=jsonpath={.status.version}=2", "--timeout=30s"
    )
    second = until_serves(served, "acme/pirate@2#")
    assert second.partition("#")[2] != first.partition("#")[2]
    installed.wait("pirate")

    edit(activeVersion=1)  # the object owns it now, so nobody else may
    assert until_serves(served, "acme/pirate@1#") == first
    with pytest.raises(AssertionError, match="activation_owned"):
        installed.cli("adapter", "activate", "acme/pirate@2")
    edit(activeVersion=None)
    until(lambda: _owner(installed) == "registry", FLIP_SECONDS, "the object lets go")
    assert until_serves(served, "acme/pirate@1#") == first

    installed.cli("adapter", "activate", "acme/pirate@2", "--wait", "warm")
    assert until_serves(served, "acme/pirate@2#") == second
    installed.cli("rollback", "acme/pirate")
    assert until_serves(served, "acme/pirate@1#") == first
    installed.admin("POST", "/admin/tenants/acme/adapters/pirate/activate", {"version": 2})
    assert until_serves(served, "acme/pirate@2#") == second
    installed.admin("POST", "/admin/tenants/acme/adapters/pirate/rollback", {})
    assert until_serves(served, "acme/pirate@1#") == first

    edit(source={"uri": "file:pirate"})  # as the file says it, for whoever comes next
    assert until_serves(served, "acme/pirate@1#") == first
    installed.wait("pirate")


def _owner(installed: Installation) -> str:
    found = json.loads(installed.cli("adapter", "show", "acme/pirate", "--json"))
    return str(found["activation_owner"])
