"""Running the operator: quiet, stops, breaks, health, logs, metrics, and where pools are honoured.

Engines are real `loraplane-engine` processes with the real model, but for the queue's age: for that an engine must
hang in its calls and be alive otherwise, which only a fake one does.
"""

import json
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from loraplane_core import credentials
from loraplane_core.labels import API_VERSION, POOL_KIND
from loraplane_operator.health import STALLED_SECONDS
from loraplane_operator.reconcile import GRACE_SECONDS
from tests.cluster.churn import settled
from tests.cluster.fixtures import REAL_REPLICAS
from tests.cluster.install import install
from tests.cluster.kube import ADAPTERS, POOLS
from tests.cluster.models import tiny_adapter
from tests.cluster.services import until
from tests.cluster.system import System

pytestmark = pytest.mark.timeout(240)
QUIET_SECONDS = 60.0
REQUESTS_PER_MINUTE = 60
_KEPT = (
    ADAPTERS,
    POOLS,
    "/apis/apps/v1/namespaces/{namespace}/statefulsets",
    "/apis/policy/v1/namespaces/{namespace}/poddisruptionbudgets",
    "/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices",
    *(f"/api/v1/namespaces/{{namespace}}/{plural}" for plural in ("pods", "services", "secrets", "events")),
)


def versions(system: System) -> dict[str, str]:
    """resourceVersion of everything that the operator, or a controller in its wake, writes."""
    found = {}
    for path in _KEPT:
        for raw in system.kube.items(path.format(namespace=system.namespace)):
            found[f"{path.rpartition('/')[2]}/{raw['metadata']['name']}"] = raw["metadata"]["resourceVersion"]
    return found


def lines(system: System, since: int = 0) -> list[dict[str, Any]]:
    """The operator's log from that byte on. Raises ValueError for a line that is no JSON."""
    text = system.operator().log.read_bytes()[since:].decode()
    return [json.loads(line) for line in text.splitlines()]


def size(system: System) -> int:
    return system.operator().log.stat().st_size


# -- quiet


@pytest.mark.slow
def test_a_quiet_minute_moves_no_object_and_costs_at_most_sixty_requests(system: System) -> None:
    for name, warm in (("pirate", 3), ("html", 2), ("json", 1), ("butler", 1)):
        system.adapter(name, warmReplicas=warm)
    system.until_ready("pirate", "html", "json", "butler")
    until(lambda: _capacity_is_told(system), 40, lambda: system.explain(""), every=0.5)
    before, since = versions(system), time.time()
    assert {name.partition("/")[0] for name in before} >= {"loraadapters", "basemodelpools", "pods", "secrets"}
    time.sleep(QUIET_SECONDS)
    assert versions(system) == before
    made = [f"{entry['verb']} {entry['requestURI']}" for entry in system.requests(since)]
    assert 0 < len(made) <= REQUESTS_PER_MINUTE, made


def _capacity_is_told(system: System) -> bool:
    """What moves all the time is written with a delay; it is there when it equals what the engines say."""
    rows = [system.engine(ordinal, "GET", "/adapters").json()["capacity"] for ordinal in system.pods()]
    status = system.kube.call("GET", system.pool_path())["status"]
    told = status["capacity"]
    used, hosts = (sum(row[name] for row in rows) for name in ("used_bytes", "host_bytes"))
    ready, resident = (status["adapters"][name] for name in ("ready", "resident"))
    # What a test before left in an engine's cache is resident, too.
    return (told["usedBytes"], told["hostBytes"]) == (used, hosts) and ready == 4 and resident >= 4


# -- its end


def test_sigterm_in_the_middle_of_work_finishes_what_was_begun_and_exits_with_zero(system: System) -> None:
    names = [f"stop{number}" for number in range(6)]
    begun = size(system)
    for name in names:
        system.adapter(name, source="pirate", warmReplicas=REAL_REPLICAS, deletionPolicy="Delete")
    until(lambda: _done(system, begun, "Warm"), 20, lambda: system.explain(names[0]), every=0.005)
    system.operator().signal(signal.SIGTERM)
    assert system.operator().wait(GRACE_SECONDS + 5) == 0
    told = lines(system, begun)
    assert [line["message"] for line in told if line["logger"] == "loraplane_operator"] == [
        "stopping",
        "operator stopped",
    ]
    stop = next(number for number, line in enumerate(told) if line["message"] == "stopping")
    assert [line for line in told[stop:] if line["level"] not in ("info", "debug")] == []
    warmed = {(line["replica"], line["adapter"].partition("#")[0]) for line in _done(system, begun, "Warm")}
    assert warmed and warmed == _held(system, names), "an engine holds what no action was finished for, or the reverse"
    claimed = {line["object"].rpartition("/")[2] for line in _done(system, begun, "ClaimAdapter")}
    rows = system.services.rows("SELECT name FROM adapters WHERE claim_uid IS NOT NULL AND name LIKE 'stop%%'")
    assert claimed == {name for (name,) in rows}
    system.start_operator()
    settled(system, dict.fromkeys(names, REAL_REPLICAS))


def _done(system: System, since: int, action: str) -> list[dict[str, Any]]:
    return [line for line in lines(system, since) if line["message"] == "done" and line["action"] == action]


def _held(system: System, names: list[str]) -> set[tuple[str, str]]:
    return {
        (f"{system.namespace}/smol/{ordinal}", ref)
        for ordinal in system.pods()
        for ref in system.warm(ordinal)
        if ref.partition("@")[0].removeprefix("acme/") in names
    }


@pytest.mark.parametrize("watcher", ["cluster", "feed", "kopf"])
def test_a_watcher_that_breaks_ends_the_process_with_its_cause_and_the_next_start_is_clean(
    system: System, watcher: str
) -> None:
    name = f"watched-{watcher}"
    system.adapter(name, warmReplicas=2, source="pirate", deletionPolicy="Delete")
    system.until_ready(name)
    key = system.services.key("acme")
    assert system.operator().stop() == 0
    begun = size(system)
    broken = system.start_operator(module="tests.cluster.breaking_operator", extra=[watcher])
    try:
        system.until_operator_ready()
        broken.signal(signal.SIGUSR1)
        assert broken.wait(GRACE_SECONDS + 5) == 1
    finally:
        broken.kill()
    critical = [line for line in lines(system, begun) if line["level"] == "critical"]
    assert [line["message"] for line in critical] == ["a watcher stopped", "the operator broke"]
    assert critical[0]["watcher"] == watcher
    assert "a defect made by the test" in critical[0]["exception"]
    assert system.services.ask(key, name).status_code == 200
    system.start_operator()
    system.adapter("html")
    system.until_ready("html", name)
    settled(system, {name: 2, "html": 1})


# -- what it tells of itself


def test_it_is_alive_but_not_ready_until_it_has_seen_the_cluster(system: System) -> None:
    name = "alive"
    system.adapter(name, source="pirate", deletionPolicy="Delete")
    system.until_ready(name)
    assert system.operator().stop() == 0
    assert system.operator_health("live") == 0
    system.cluster.stop_api_server()
    try:
        begun = size(system)
        system.start_operator()
        until(lambda: _said(system, begun, "the cluster could not be read"), 30, system.operator().tail)
        assert (system.operator_health("live"), system.operator_health("ready")) == (200, 503)
        assert system.services.ask(system.services.key("acme"), name).status_code == 200
    finally:
        system.cluster.start_api_server()
    system.until_operator_ready()
    assert system.operator_health("live") == 200
    assert metric(system, "loraplane_operator_objects", kind="LoRAAdapter") == 1
    system.until_ready(name)


def _said(system: System, since: int, message: str) -> bool:
    return any(line["message"] == message for line in lines(system, since))


def test_a_process_that_does_not_turn_answers_no_probe(system: System) -> None:
    """Stopped as a whole; a loop that turns no more while its health port answers is 503 after STALLED_SECONDS."""
    assert STALLED_SECONDS > 2 * 30
    system.operator().signal(signal.SIGSTOP)
    try:
        assert system.operator_health("live") == 0
    finally:
        system.operator().signal(signal.SIGCONT)
    until(lambda: system.operator_health("live") == 200, 10, system.operator().tail)


def test_every_line_of_the_log_is_json_and_every_action_tells_its_phase_and_object(system: System) -> None:
    begun, name = size(system), "logged"
    system.adapter(name, warmReplicas=2, source="pirate", deletionPolicy="Delete")
    system.until_ready(name)
    system.adapter(name, warmReplicas=2, source="pirate-v2", deletionPolicy="Delete")
    until(
        lambda: system.status(name).get("activeVersion") == 2 and system.ready(name), 30, lambda: system.explain(name)
    )
    system.delete(name)
    system.until_gone(name)
    told = lines(system, begun)
    assert all({"time", "level", "logger", "message"} <= line.keys() for line in told)
    actions = [line for line in told if "action" in line]
    wanted = {"SetFinalizer", "ClaimAdapter", "Register", "Warm", "SetStatus", "Withdraw", "ReleaseClaim"}
    assert wanted <= {line["action"] for line in actions}
    prefixes = (f"LoRAAdapter/{system.namespace}/{name}", f"{POOL_KIND}/{system.namespace}/smol")
    for line in actions:
        assert line["phase"] == "execute" and line["why"], line
        assert line["object"] in prefixes, line
    master = credentials.read_key(system.services.material.master_file)
    text = system.operator().log.read_text()
    assert credentials.operator_credential(master) not in text and master.hex() not in text


def metric(system: System, name: str, **labels: str) -> float:
    """0 for a series that has not begun."""
    for family in text_string_to_metric_families(system.operator_metrics()):
        for sample in family.samples:
            if sample.name == name and sample.labels == labels:
                return float(sample.value)
    return 0.0


def test_metrics_count_phases_drift_and_age_as_they_were(system: System) -> None:
    name, names = "metered", ("loraplane_operator_drift_found_total", "loraplane_operator_drift_healed_total")
    system.adapter(name, warmReplicas=REAL_REPLICAS, source="pirate", deletionPolicy="Delete")
    system.until_ready(name)
    before = [metric(system, name) for name in names]
    digest = system.status(name)["digest"]
    where = "/adapters/acme/metered/1?drain_s=0"
    assert system.engine(1, "DELETE", where, headers={"x-loraplane-digest": digest}).is_success
    until(lambda: metric(system, names[1]) > before[1], 10, lambda: str(before))
    assert [metric(system, name) for name in names] == [before[0] + 1, before[1] + 1]
    phase = "loraplane_operator_phase_seconds"
    for step in ("observe", "plan", "submit", "ClaimAdapter", "Register", "Warm", "SetStatus"):
        count, total = metric(system, f"{phase}_count", phase=step), metric(system, f"{phase}_sum", phase=step)
        assert count > 0 and 0 < total / count < (0.25 if step in ("observe", "plan", "submit") else 5), (step, total)
    system.until_ready(name)
    assert metric(system, "loraplane_operator_engines_alive") == REAL_REPLICAS
    assert metric(system, "loraplane_operator_objects", kind=POOL_KIND) == 1
    for queue in ("news", "actions"):
        assert metric(system, "loraplane_operator_queue_age_seconds", queue=queue) < 1
    assert "acme" not in system.operator_metrics() and name not in system.operator_metrics()


def test_what_waits_for_a_hung_engine_ages_in_the_metrics_until_it_is_carried_out(fake_system: System) -> None:
    system, age = fake_system, "loraplane_operator_queue_age_seconds"
    names = [f"w{number}" for number in range(12)]  # more than are asked of one engine at a time
    for number, name in enumerate(names):
        tiny_adapter(system.services.adapter_root / name, number)
    system.pool(replicas=1)
    system.until_available(30)
    system.misdeeds(0, hang=True)
    for name in names:
        system.adapter(name)
    until(lambda: metric(system, age, queue="actions") > 2, 20, system.operator_metrics)
    assert metric(system, age, queue="news") < 2
    system.kill_engine(0)
    system.until_ready(*names, seconds=40)
    until(lambda: metric(system, age, queue="actions") < 1, 5, system.operator_metrics)


# -- where pools are honoured


@pytest.fixture
def elsewhere(system: System) -> Iterator[str]:
    """A second namespace that the operator observes, and where it honours no pools."""
    namespace = f"{system.namespace}-b"
    system.kube.call("POST", "/api/v1/namespaces", {"metadata": {"name": namespace}})
    install(system.kube, [namespace], release=system.namespace)
    assert system.operator().stop() == 0
    system.start_operator(extra=["--namespace", namespace, "--pool-namespace", system.namespace])
    system.until_operator_ready()
    yield namespace
    system.operator().stop()
    system.kube.delete(f"/api/v1/namespaces/{namespace}")
    system.start_operator()


def test_a_pool_outside_of_the_pool_namespaces_gets_no_engines_and_says_why(system: System, elsewhere: str) -> None:
    spec = system.kube.call("GET", system.pool_path())["spec"]
    path = f"{POOLS.format(namespace=elsewhere)}/private"
    body = {"apiVersion": API_VERSION, "kind": POOL_KIND, "metadata": {"name": "private"}, "spec": spec}
    system.kube.apply(path, body)
    reason = "PoolNamespaceNotHonoured"

    def told() -> dict[str, tuple[str, str]]:
        conditions = (system.kube.call("GET", path).get("status") or {}).get("conditions") or []
        return {each["type"]: (each["status"], each["reason"]) for each in conditions}

    found = until(told, 10, system.operator().tail)
    assert found == {"Available": ("False", reason), "Progressing": ("False", reason), "Degraded": ("True", reason)}
    message = system.kube.call("GET", path)["status"]["conditions"][0]["message"]
    assert elsewhere in message
    raw = system.kube.call("GET", path)
    assert "finalizers" not in raw["metadata"]
    for plural in ("apps/v1/namespaces/{}/statefulsets", "policy/v1/namespaces/{}/poddisruptionbudgets"):
        assert system.kube.items(f"/apis/{plural.format(elsewhere)}") == []
    assert system.kube.items(f"/api/v1/namespaces/{elsewhere}/secrets") == []
    # The one that is honoured goes on, and adapters may come from anywhere that is observed.
    system.adapter("here", warmReplicas=2, source="pirate", deletionPolicy="Delete")
    system.until_ready("here")
    system.kube.delete(path)
    until(lambda: system.kube.get(path) is None, 10, "nothing holds it")
