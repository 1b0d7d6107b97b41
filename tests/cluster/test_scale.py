"""1,000 adapters over 8 replicas. Engines are processes without a model (fake_engine: the real admin port,
bookkeeping and artifact fetch); API server, operator, registry and Postgres are real, and so is preflight.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from loraplane_core.labels import ADAPTER_KIND, API_VERSION
from tests.cluster.kube import ADAPTERS
from tests.cluster.models import tiny_adapter
from tests.cluster.services import until
from tests.cluster.system import FAKE_IMAGE, POOL, ClusterAccess, System, running_system

pytestmark = [pytest.mark.slow, pytest.mark.timeout(420)]
ADAPTERS_WANTED = 1_000
REPLICAS = 8
READY_SECONDS = 120.0
QUIET_SECONDS = 60.0
REQUESTS_PER_MINUTE = 60
RSS_BYTES = 250 << 20
RESYNC_SECONDS = 30.0
#: An edit writes the adapter's status a few times, and an Event or two.
REQUESTS_PER_EDIT = 12


@dataclass
class Thousand:
    system: System
    seconds: float  # from the end of `kubectl apply` until all were Ready


def manifests(folder: Path, system: System) -> Path:
    """One file with all objects; their artifacts differ in bytes, so in digest."""
    documents = []
    for number in range(ADAPTERS_WANTED):
        name = f"a{number:04}"
        tiny_adapter(system.services.adapter_root / name, number)
        spec = {"tenant": "acme", "poolRef": {"name": POOL}, "source": {"uri": f"file:{name}"}, "warmReplicas": 1}
        metadata = {"name": name, "namespace": system.namespace}
        documents.append({"apiVersion": API_VERSION, "kind": ADAPTER_KIND, "metadata": metadata, "spec": spec})
    file = folder / "adapters.yaml"
    file.write_text(yaml.dump_all(documents, Dumper=yaml.CSafeDumper))
    return file


def not_ready(system: System) -> list[str]:
    found = []
    for raw in system.kube.items(ADAPTERS.format(namespace=system.namespace)):
        conditions = {each["type"]: each for each in (raw.get("status") or {}).get("conditions") or []}
        ready = conditions.get("Ready", {"status": "", "reason": "", "message": ""})
        if ready["status"] != "True":
            found.append(f"{raw['metadata']['name']}: {ready['reason']} {ready['message']}")
    return found


@pytest.fixture(scope="module")
def thousand(
    cluster: ClusterAccess, tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config
) -> Iterator[Thousand]:
    folder = tmp_path_factory.mktemp("scale")
    with running_system(cluster, folder, FAKE_IMAGE) as system:
        system.pool(replicas=REPLICAS)
        system.until_available(60)
        file = manifests(folder, system)
        system.kubectl("apply", "--server-side", "-f", str(file))
        begun = time.monotonic()
        until(lambda: not not_ready(system), 2 * READY_SECONDS, lambda: f"{not_ready(system)[:5]}", every=2)
        took = time.monotonic() - begun
        told = f"{ADAPTERS_WANTED} adapters were Ready {took:.0f} s after they were applied"
        capture = pytestconfig.pluginmanager.getplugin("capturemanager")
        with capture.global_and_fixture_disabled():  # how near the limit a run was that passed
            print(f"\n{told}")
        yield Thousand(system, took)
        system.kill_operator()


def test_all_are_ready_within_two_minutes_and_each_has_one_home(thousand: Thousand) -> None:
    held = [ref for ordinal in range(REPLICAS) for ref in thousand.system.held(ordinal)]
    assert sorted(held) == [f"acme/a{number:04}@1" for number in range(ADAPTERS_WANTED)]
    assert thousand.seconds <= READY_SECONDS
    shown = thousand.system.columns("lora")
    assert {(row["READY"], row["RESIDENT"], row["VERSION"]) for row in shown.values()} == {("True", "1/1", "1")}


def test_the_operator_stays_small(thousand: Thousand) -> None:
    assert thousand.system.operator().rss() <= RSS_BYTES


def test_routing_needs_no_object_per_adapter_o65(thousand: Thousand) -> None:
    kube, namespace = thousand.system.kube, thousand.system.namespace
    counts = {
        path: len(kube.items(f"{path.format(namespace)}"))
        for path in (
            "/api/v1/namespaces/{}/services",
            "/apis/discovery.k8s.io/v1/namespaces/{}/endpointslices",
            "/api/v1/namespaces/{}/configmaps",
        )
    }
    assert max(counts.values()) <= 2, counts
    assert len(kube.items(f"/api/v1/namespaces/{namespace}/secrets")) == 1


def test_quiet_costs_at_most_sixty_requests_a_minute_and_moves_no_resource_version(thousand: Thousand) -> None:
    system = thousand.system
    time.sleep(5)  # what was written last is told to the watches; there is no condition for "nothing more comes"
    before = versions(system)
    since = time.time()
    time.sleep(QUIET_SECONDS)
    assert versions(system) == before
    made = system.requests(since)
    assert len(made) <= REQUESTS_PER_MINUTE, [entry["requestURI"] for entry in made][:20]


def versions(system: System) -> dict[str, str]:
    raw = system.kube.items(ADAPTERS.format(namespace=system.namespace))
    return {each["metadata"]["name"]: each["metadata"]["resourceVersion"] for each in raw}


def test_editing_one_adapter_costs_requests_for_one(thousand: Thousand) -> None:
    system = thousand.system
    before, since = versions(system), time.time()
    system.kube.merge(system.adapter_path("a0500"), {"spec": {"warmReplicas": 3}})
    until(lambda: len(system.holders("acme/a0500@1")) == 3, 20, lambda: system.explain("a0500"))
    until(lambda: system.status("a0500").get("readyReplicas") == 3, 10, lambda: system.explain("a0500"))
    assert len(system.requests(since)) <= REQUESTS_PER_EDIT, [e["requestURI"] for e in system.requests(since)]
    after = versions(system)
    assert {name for name, version in after.items() if version != before[name]} == {"a0500"}


def test_a_restart_has_resynced_within_thirty_seconds_and_loads_none_again(thousand: Thousand) -> None:
    system = thousand.system
    boots = {ordinal: system.engine(ordinal, "GET", "/adapters").json() for ordinal in range(REPLICAS)}
    system.kill_operator()
    begun, since = time.monotonic(), time.time()
    system.start_operator()
    system.until_operator_ready(RESYNC_SECONDS)
    assert not not_ready(system)
    # What proves the resync: a change made after it is honoured.
    system.kube.merge(system.adapter_path("a0501"), {"spec": {"warmReplicas": 2}})
    until(lambda: len(system.holders("acme/a0501@1")) == 2, RESYNC_SECONDS, lambda: system.explain("a0501"))
    assert time.monotonic() - begun <= RESYNC_SECONDS
    for ordinal, before in boots.items():
        now = {each["ref"]: each["since"] for each in system.engine(ordinal, "GET", "/adapters").json()["adapters"]}
        then = {each["ref"]: each["since"] for each in before["adapters"]}
        assert {ref for ref, moment in now.items() if then.get(ref) != moment} <= {"acme/a0501@1"}
    writes = [entry["requestURI"] for entry in system.requests(since) if entry["verb"] in ("patch", "update")]
    assert len(writes) <= 20, writes[:20]
