"""A namespace that is deleted with pools and adapters in it: theirs are gone, the namespace is, and nothing else stops.

The namespace loses its Roles with everything else, in no order: what takes the finalizers off then is the one right
that the operator has cluster-wide. Engines are fake; the kubelet stand-in runs none in the second namespace.
"""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from loraplane_core.labels import ADAPTER_KIND, API_VERSION, FINALIZER, POOL_KIND
from tests.cluster.install import manifests, role_rules
from tests.cluster.kube import ADAPTERS, POOLS, Kube
from tests.cluster.models import TINY_BASE, tiny_adapter
from tests.cluster.services import ROOT, until
from tests.cluster.system import System
from tests.docs.blocks import read
from tests.docs.shell import run

#: Not the account of the other tests: the audit of the whole run holds no refusal of that one's.
ACCOUNT = "leaving-operator"
GONE_SECONDS = 90.0  # an adapter's finalizer waits for its engines, a pool's for its pods, 60 s each at the most
RBAC = "/apis/rbac.authorization.k8s.io/v1"
_HOLD = "example.com/hold"


@dataclass
class Leaving:
    """The operator's namespace, with a pool; `team`, which it honours as well, has another one and an adapter."""

    system: System
    team: str

    @property
    def kube(self) -> Kube:
        return self.system.kube

    def apply(self, path: str, kind: str, name: str, spec: dict[str, Any]) -> str:
        body = {"apiVersion": API_VERSION, "kind": kind, "metadata": {"name": name}, "spec": spec}
        self.kube.apply(f"{path.format(namespace=self.team)}/{name}", body)
        return f"{path.format(namespace=self.team)}/{name}"

    def held(self, namespace: str) -> dict[str, list[str]]:
        """Finalizers of our objects there."""
        found = [raw for path in (ADAPTERS, POOLS) for raw in self.kube.items(path.format(namespace=namespace))]
        return {f"{raw['kind']}/{raw['metadata']['name']}": raw["metadata"].get("finalizers", []) for raw in found}

    def delete(self, namespace: str) -> None:
        self.kube.delete(f"/api/v1/namespaces/{namespace}")

    def is_gone(self, namespace: str) -> bool:
        return self.kube.get(f"/api/v1/namespaces/{namespace}") is None

    def told(self) -> str:
        raw = self.kube.get(f"/api/v1/namespaces/{self.team}") or {}
        return f"{raw.get('status')}\n{self.held(self.team)}\n{self.system.operator().tail()}"

    def claims(self, tenant: str) -> list[str]:
        return [str(row[0]) for row in self.system.services.rows(
            "SELECT claim_ref FROM adapters WHERE tenant_id = %s AND claim_uid <> ''", tenant
        )]  # fmt: skip


def grant(kube: Kube, name: str, wanted: list[dict[str, Any]], account: str, home: str, namespace: str = "") -> None:
    """A Role and its binding, in `namespace` or cluster-wide."""
    prefix = "" if namespace else "Cluster"
    where = f"{RBAC}/namespaces/{namespace}" if namespace else RBAC
    base = {"apiVersion": "rbac.authorization.k8s.io/v1", "metadata": {"name": name}}
    kube.apply(f"{where}/{prefix.lower()}roles/{name}", {**base, "kind": f"{prefix}Role", "rules": wanted})
    reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": f"{prefix}Role", "name": name}
    subjects = [{"kind": "ServiceAccount", "name": account, "namespace": home}]
    binding = {**base, "kind": f"{prefix}RoleBinding", "roleRef": reference, "subjects": subjects}
    kube.apply(f"{where}/{prefix.lower()}rolebindings/{name}", binding)


@pytest.fixture
def leaving(fake_system: System) -> Iterator[Leaving]:
    system, home = fake_system, fake_system.namespace
    made = Leaving(system, f"{home}-team")
    system.kube.call("POST", "/api/v1/namespaces", {"metadata": {"name": made.team}})
    account = manifests(home, home)[0] | {"metadata": {"name": ACCOUNT, "namespace": home}}
    system.kube.apply(f"/api/v1/namespaces/{home}/serviceaccounts/{ACCOUNT}", account)
    for namespace in (home, made.team):
        grant(system.kube, ACCOUNT, role_rules("operator-rules"), ACCOUNT, home, namespace)
    grant(system.kube, f"{ACCOUNT}-home", role_rules("operator-home-rules"), ACCOUNT, home, home)
    grant(system.kube, home, role_rules("operator-cluster-rules"), ACCOUNT, home)
    assert system.operator().stop() == 0
    system.account = ACCOUNT
    restart(made)
    system.services.tenant("umbrella", made.team)
    tiny_adapter(system.services.adapter_root / "tiny")
    try:
        yield made
    finally:
        for plural in ("clusterroles", "clusterrolebindings"):
            system.kube.delete(f"{RBAC}/{plural}/{home}")
        with contextlib.suppress(Exception):
            for path in (ADAPTERS, POOLS):
                for raw in system.kube.items(path.format(namespace=made.team)):
                    name = raw["metadata"]["name"]
                    system.kube.merge(f"{path.format(namespace=made.team)}/{name}", {"metadata": {"finalizers": None}})
            made.delete(made.team)


def restart(made: Leaving) -> None:
    made.system.operator().stop()
    made.system.start_operator(extra=["--namespace", made.team, "--home", made.system.namespace])
    made.system.until_operator_ready()


def serve(made: Leaving) -> None:
    """A pool in both namespaces, and an adapter in `team` that the first one serves."""
    made.system.pool(replicas=1)
    made.system.until_available()
    made.apply(POOLS, POOL_KIND, "own", {"baseModel": TINY_BASE | {"name": "own-base"}, "replicas": 1})
    spec = {
        "tenant": "umbrella",
        "poolRef": {"name": "smol", "namespace": made.system.namespace},
        "source": {"uri": "file:tiny"},
    }
    path = made.apply(ADAPTERS, ADAPTER_KIND, "pirate", spec)
    until(lambda: _ready(made.kube, path), 30, lambda: f"{made.kube.get(path)}\n{made.system.operator().tail()}")
    statefulset = f"/apis/apps/v1/namespaces/{made.team}/statefulsets/own"
    until(lambda: made.kube.get(statefulset), 20, made.told)
    assert made.held(made.team) == {"LoRAAdapter/pirate": [FINALIZER], "BaseModelPool/own": [FINALIZER]}
    assert made.claims("umbrella") == [f"{made.team}/pirate"]


def _ready(kube: Kube, path: str) -> bool:
    conditions = ((kube.get(path) or {}).get("status") or {}).get("conditions") or []
    return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)


@pytest.mark.timeout(300)
def test_a_deleted_namespace_goes_with_its_pools_and_adapters_and_holds_up_no_other(leaving: Leaving) -> None:
    system = leaving.system
    serve(leaving)
    begun = time.monotonic()
    leaving.delete(leaving.team)
    until(lambda: leaving.is_gone(leaving.team), GONE_SECONDS, leaving.told)
    print(f"gone after {time.monotonic() - begun:.1f} s")
    assert leaving.claims("umbrella") == [], "released in order, so that another object may claim it"
    assert system.holders("umbrella/pirate@1") == set()
    # The others go on, also under an operator that starts with the namespace in its list.
    system.adapter("during", source="tiny")
    system.until_ready("during")
    restart(leaving)
    system.adapter("after", source="tiny")
    system.until_ready("after", "during", seconds=40)


@pytest.mark.timeout(300)
def test_the_release_may_be_deleted_with_its_own_namespace(leaving: Leaving) -> None:
    """A namespace's pods go first. One that is held stands for the operator's, which gets the signal that a kubelet
    gives it; the Roles are still there then."""
    serve(leaving)
    home = leaving.system.namespace
    leaving.system.adapter("pirate", source="tiny")
    leaving.system.until_ready("pirate")
    pods = f"/api/v1/namespaces/{home}/pods"
    spec = {"containers": [{"name": "operator", "image": "none"}]}
    leaving.kube.call("POST", pods, {"metadata": {"name": "operator", "finalizers": [_HOLD]}, "spec": spec})
    leaving.delete(home)
    deleted = f"{pods}/operator"
    until(lambda: "deletionTimestamp" in leaving.kube.call("GET", deleted)["metadata"], 20, "its pods go first")
    assert leaving.system.operator().stop() == 0
    assert set(map(tuple, {**leaving.held(home), **leaving.held(leaving.team)}.values())) == {()}
    leaving.kube.merge(deleted, {"metadata": {"finalizers": None}})
    until(lambda: leaving.is_gone(home), GONE_SECONDS, lambda: str(leaving.kube.get(f"/api/v1/namespaces/{home}")))
    leaving.delete(leaving.team)
    until(lambda: leaving.is_gone(leaving.team), GONE_SECONDS, leaving.told)


@pytest.mark.timeout(300)
def test_without_its_one_wide_right_a_namespace_hangs_until_a_person_types_what_the_page_says(
    leaving: Leaving, tmp_path: Path
) -> None:
    """The right is what does it, and docs/install.md says what to do without it."""
    (block,) = [each for each in read(ROOT / "docs" / "install.md") if '"finalizers": null' in each.text]
    serve(leaving)
    leaving.kube.delete(f"{RBAC}/clusterrolebindings/{leaving.system.namespace}")
    leaving.delete(leaving.team)
    binding = f"{RBAC}/namespaces/{leaving.team}/rolebindings/{ACCOUNT}"
    until(lambda: leaving.kube.get(binding) is None, 60, leaving.told)
    until(lambda: "SetFinalizer" in leaving.system.operator().tail(20000), 90, "it tries, and is refused")
    assert leaving.held(leaving.team)
    env = {"KUBECONFIG": str(leaving.system.cluster.kubeconfig)}
    printed = run([block], tmp_path, tmp_path / "out", env, 60, {})
    assert "loraadapter.loraplane.dev/pirate patched" in printed[block]
    until(lambda: leaving.is_gone(leaving.team), 30, leaving.told)
