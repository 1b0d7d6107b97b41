"""The end of the story: what stays of an installation, and that it goes without a trace then."""

from typing import Any

import pytest

from loraplane_core.labels import ADAPTER_KIND, FINALIZER, POOL_KIND
from tests.cluster.kube import ADAPTERS, POOLS
from tests.cluster.node.installation import POOL, POOL_NAMESPACE, RELEASE, TENANTS, Installation, Served
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
    short = adapter("short", tenant="acme", source={"uri": "file:butler"})
    installed.kube.apply(f"{ADAPTERS.format(namespace=installed.team)}/short", short)
    installed.kubectl("wait", "-n", installed.team, "--for=condition=Ready", "lora/short", "--timeout=60s", seconds=70)
    objects = {f"{POOL_KIND} {POOL_NAMESPACE}/{POOL}", f"{ADAPTER_KIND} {installed.team}/short"}
    objects |= {f"{ADAPTER_KIND} {POOL_NAMESPACE}/{name}" for name in TENANTS.values()}
    assert {each for each, raw in declared(installed).items() if held(raw)} == objects
    installed.helm("uninstall")
    assert not installed.installed()
    last = {each: (held(raw), *main_condition(raw)) for each, raw in declared(installed).items()}
    assert last == dict.fromkeys(objects, (False, "False", "Uninstalled"))

    own = {f"Secret {installed.namespace}/{RELEASE}-{name}" for name in ("keys", "postgres")}
    own |= {
        f"PersistentVolumeClaim {installed.namespace}/{RELEASE}-{name}" for name in ("adapters", "store", "postgres")
    }
    stays = {*own, *objects, f"PersistentVolumeClaim {POOL_NAMESPACE}/{RELEASE}-models"}

    def left() -> set[str]:
        """Without the CRDs, and the API that they are."""
        return {each for each in installed.inventory() - installed.before if not each.endswith(f"{RELEASE}.dev")}

    until(lambda: left() == stays, GONE_SECONDS, lambda: f"{left() ^ stays}\n{installed.told()}", every=0.5)

    # Nobody is there to let them go: namespaces before what is in them, the pool before its adapters.
    installed.kubectl("delete", "namespace", installed.namespace, installed.team, "--wait=false")
    installed.kubectl("delete", "bmp", POOL, "-n", POOL_NAMESPACE, "--timeout=20s")
    installed.kubectl("delete", "lora", "--all", "-n", POOL_NAMESPACE, "--timeout=20s")
    for path in (POOLS, ADAPTERS):
        assert kube.items(path.format(namespace=POOL_NAMESPACE)) == []
    for name in (installed.namespace, installed.team):
        until(lambda name=name: kube.get(f"/api/v1/namespaces/{name}") is None, GONE_SECONDS, name)  # type: ignore[misc]


def declared(installed: Installation) -> dict[str, dict[str, Any]]:
    """Pools and adapters, by KIND NAMESPACE/NAME."""
    found = {}
    for namespace in (POOL_NAMESPACE, installed.team):
        for kind, path in ((POOL_KIND, POOLS), (ADAPTER_KIND, ADAPTERS)):
            for raw in installed.kube.items(path.format(namespace=namespace)):
                found[f"{kind} {namespace}/{raw['metadata']['name']}"] = raw
    return found


def held(raw: dict[str, Any]) -> bool:
    return FINALIZER in raw["metadata"].get("finalizers", [])
