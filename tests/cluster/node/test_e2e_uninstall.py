"""The end of the story: what stays of an installation, and that it goes without a trace then."""

from typing import Any

import pytest

from loraplane_core.labels import FINALIZER
from tests.cluster.kube import ADAPTERS, POOLS
from tests.cluster.node.installation import POOL, POOL_NAMESPACE, RELEASE, Served
from tests.cluster.node.test_e2e_answers import adapter
from tests.cluster.services import until

pytestmark = pytest.mark.timeout(300)
GONE_SECONDS = 60.0


def main_condition(raw: dict[str, Any]) -> tuple[str, str]:
    """Of a pool or an adapter: whether it serves."""
    found = next(each for each in raw["status"]["conditions"] if each["type"] in ("Available", "Ready"))
    return found["status"], found["reason"]


def test_uninstall_leaves_what_the_notes_say_and_that_can_be_deleted_in_any_order(served: Served) -> None:
    installed, kube = served.installed, served.installed.kube
    core = f"/api/v1/namespaces/{installed.namespace}"
    short = adapter("short", tenant="acme", source={"uri": "file:butler"})
    installed.kube.apply(f"{ADAPTERS.format(namespace=installed.team)}/short", short)
    installed.kubectl("wait", "-n", installed.team, "--for=condition=Ready", "lora/short", "--timeout=60s", seconds=70)
    installed.helm("uninstall")
    assert not installed.installed()

    secrets = {raw["metadata"]["name"] for raw in kube.items(f"{core}/secrets")}
    assert secrets == {f"{RELEASE}-keys", f"{RELEASE}-postgres"}
    claims = {raw["metadata"]["name"] for raw in kube.items(f"{core}/persistentvolumeclaims")}
    assert claims == {f"{RELEASE}-adapters", f"{RELEASE}-store", f"{RELEASE}-postgres"}
    for kind in ("services", "configmaps", "serviceaccounts"):
        left = {raw["metadata"]["name"] for raw in kube.items(f"{core}/{kind}")}
        assert left <= {"default", "kube-root-ca.crt"}, (kind, left)
    assert FINALIZER not in str(kube.items(ADAPTERS.format(namespace=installed.team)))
    pools, adapters = (path.format(namespace=POOL_NAMESPACE) for path in (POOLS, ADAPTERS))
    objects = [*kube.items(pools), *kube.items(adapters)]
    assert len(objects) == 4
    assert not [raw for raw in objects if FINALIZER in raw["metadata"].get("finalizers", [])]
    told = {raw["metadata"]["name"]: main_condition(raw) for raw in objects}
    assert set(told.values()) == {("False", "Uninstalled")}, told
    for namespace in (installed.namespace, POOL_NAMESPACE):
        pods = f"/api/v1/namespaces/{namespace}/pods"
        until(lambda pods=pods: kube.items(pods) == [], GONE_SECONDS, installed.told)  # type: ignore[misc]

    # Nobody is there to let them go: namespaces before what is in them, the pool before its adapters.
    installed.kubectl("delete", "namespace", installed.namespace, installed.team, "--wait=false")
    installed.kubectl("delete", "bmp", POOL, "-n", POOL_NAMESPACE, "--timeout=20s")
    installed.kubectl("delete", "lora", "--all", "-n", POOL_NAMESPACE, "--timeout=20s")
    for path in (pools, adapters):
        assert kube.items(path) == []
    for name in (installed.namespace, installed.team):
        until(lambda name=name: kube.get(f"/api/v1/namespaces/{name}") is None, GONE_SECONDS, name)  # type: ignore[misc]
