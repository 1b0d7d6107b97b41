"""Known failures of systems that do part of this job: what must not happen here, each by its case number.

API server, controller manager, registry, Postgres, data gateway and operator are real; engines are processes
without a model (fake_engine), for it does not matter here what they compute. Cases where it does: test_cases_real.
"""

import itertools
import json
import signal
import time
import zlib
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest

from loraplane_core.identity import ReplicaId
from tests.cluster.models import tiny_adapter
from tests.cluster.services import until
from tests.cluster.system import FAKE_IMAGE, POOL, ClusterAccess, System, running_system

pytestmark = pytest.mark.timeout(180)
REPLICAS = 3
NOTICED_SECONDS = 1.0
READY_SECONDS = 3.0
TOGETHER_SECONDS = 10.0


@pytest.fixture(scope="module")
def fake_engines(cluster: ClusterAccess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    with running_system(cluster, tmp_path_factory.mktemp("cases"), FAKE_IMAGE) as system:
        system.pool(replicas=REPLICAS)
        system.until_available(60)
        yield system


@pytest.fixture
def system(fake_engines: System) -> Iterator[System]:
    """With a running operator and no adapter, before and after."""
    if not fake_engines.operator().running():
        fake_engines.start_operator()
        fake_engines.until_operator_ready()
    yield fake_engines
    fake_engines.clear()


def artifact(system: System, name: str) -> None:
    """A source of its own bytes for every name."""
    tiny_adapter(system.services.adapter_root / name, zlib.crc32(name.encode()) % (1 << 20))


def artifacts(system: System, *names: str) -> None:
    for name in names:
        artifact(system, name)


def message(system: System, name: str, kind: str = "Ready") -> str:
    conditions = system.status(name).get("conditions") or []
    return next((each["message"] for each in conditions if each["type"] == kind), "")


def home(system: System, name: str) -> int:
    (row,) = system.status(name)["replicas"]
    return ReplicaId.parse(row["name"]).ordinal


def stored(system: System, name: str) -> Path:
    """Where the registry keeps the adapter's artifact."""
    digest = str(system.status(name)["digest"])
    return system.services.folder / "store" / digest[:2] / digest


def logged(system: System, action: str, about: str, what: str = "failed") -> list[float]:
    """When that action failed (or was "done"), in Unix seconds, by the operator's log; `about` is in its fields."""
    found = []
    for line in system.operator().log.read_text().splitlines():
        if about in line:
            entry = json.loads(line)
            if (entry.get("message"), entry.get("action")) == (what, action):
                found.append(datetime.fromisoformat(entry["time"]).timestamp())
    return found


# -- failures: bounded, told, and over when something changes


def test_what_fails_is_told_once_and_tried_ever_more_rarely_until_an_edit_o4(system: System) -> None:
    system.adapter("astray", source="not-there")
    raw = system.get("astray")
    assert raw is not None
    uid = raw["metadata"]["uid"]
    times = until(lambda: _at_least(5, logged(system, "Register", uid)), 25, lambda: system.explain("astray"))
    gaps = [after - before for before, after in itertools.pairwise(times)]
    assert gaps[2] > gaps[0] and gaps[3] > 2 * gaps[0], gaps
    assert system.condition("astray", "Ready") == ("False", "SourceNotFound")
    assert [reason for reason, _ in system.events("astray")].count("SourceNotFound") == 1
    artifact(system, "found")
    edited = time.time()  # the next try of what failed is at least four seconds away
    system.adapter("astray", source="found")
    system.until_ready("astray")
    (registered,) = logged(system, "Register", uid, "done")
    assert registered - edited <= NOTICED_SECONDS


def _at_least(count: int, times: list[float]) -> list[float]:
    return times if len(times) >= count else []


def test_a_failed_source_is_still_looked_at_and_taken_once_it_is_there_o4(system: System) -> None:
    """Failed is no end: nobody has to touch the object."""
    system.adapter("waiting")
    until(lambda: system.condition("waiting", "Ready")[1] == "SourceNotFound", 10, lambda: system.explain("waiting"))
    artifact(system, "waiting")
    system.until_ready("waiting", seconds=15)


def test_a_load_that_keeps_failing_is_tried_anew_at_once_on_a_new_engine_o4(system: System) -> None:
    name = "refetched"
    _downloads_fail(system, name, replicas=1)
    until(lambda: _at_least(5, logged(system, "Warm", f"acme/{name}@1")), 25, lambda: system.explain(name))
    where = home(system, name)
    assert system.condition(name, "Ready") == ("False", "ArtifactUnavailable")
    _downloads_work(system, name)
    killed = system.kill_engine(where)
    pod = until(lambda: _started_after(system, where, killed.pid), 30, lambda: system.explain(""))
    until(lambda: system.ready(name), 20, lambda: system.explain(name), every=0.02)
    assert time.time() - pod.ready_at <= READY_SECONDS


def _started_after(system: System, ordinal: int, pid: int):  # type: ignore[no-untyped-def]
    pod = system.pods().get(ordinal)
    return pod if pod is not None and pod.ready and pod.pid not in (0, pid) else None


def _downloads_fail(system: System, name: str, replicas: int) -> None:
    """An adapter that is registered and whose bytes the artifact listener cannot give to anybody."""
    artifact(system, name)
    system.adapter(name, warmReplicas=0)
    system.until_ready(name)
    folder = stored(system, name)
    folder.rename(folder.with_suffix(".away"))
    system.adapter(name, warmReplicas=replicas)


def _downloads_work(system: System, name: str) -> None:
    folder = stored(system, name)
    folder.with_suffix(".away").rename(folder)


def test_a_download_that_fails_is_told_for_each_replica_and_goes_on_by_itself_o61(system: System) -> None:
    name = "downloaded"
    _downloads_fail(system, name, replicas=REPLICAS)
    rows = until(lambda: _all_told(system, name), 20, lambda: system.explain(name))
    assert {row["residency"] for row in rows} <= {"absent", "loading"}  # a next try may be under way
    assert system.condition(name, "Ready") == ("False", "ArtifactUnavailable")
    assert f"{system.namespace}/{POOL}/0" in message(system, name)
    _downloads_work(system, name)
    system.until_ready(name, seconds=20)
    assert all(row["message"] == "" for row in system.status(name)["replicas"])


def _all_told(system: System, name: str) -> list[dict[str, Any]]:
    rows = system.status(name).get("replicas") or []
    return rows if len(rows) == REPLICAS and all(row["message"] for row in rows) else []


def test_an_adapter_that_is_there_before_its_engine_waits_for_it_without_a_failure_o61(system: System) -> None:
    artifact(system, "early")
    system.kubelet.signal(signal.SIGSTOP)  # so that the new pool's pods do not start
    try:
        system.pool("late", replicas=1)
        system.adapter("early", poolRef={"name": "late"})
        pod = f"/api/v1/namespaces/{system.namespace}/pods/late-0"
        until(lambda: system.kube.get(pod), 15, lambda: system.explain("early"))
        until(lambda: message(system, "early"), 10, lambda: system.explain("early"))
        status, reason = system.condition("early", "Ready")
        assert status != "True" and reason in ("Pending", "PendingBase", "ReplicaNotReady"), system.explain("early")
    finally:
        system.kubelet.signal(signal.SIGCONT)
    try:
        system.until_ready("early", seconds=40)
        assert logged(system, "Warm", "acme/early@1") == []
    finally:
        _remove_pool(system, "late", "early")


def _remove_pool(system: System, pool: str, *adapters: str) -> None:
    for name in adapters:
        system.delete(name)
    for name in adapters:
        system.until_gone(name)
    system.kube.delete(system.pool_path(pool))
    until(lambda: system.kube.get(system.pool_path(pool)) is None, 30, pool)


# -- conditions


def test_ready_goes_both_ways_and_its_time_and_reason_go_along_o11(system: System) -> None:
    """While an engine lies about what it holds, its adapter is not Ready; once it is honest, it is."""
    name, ref = "flapping", "acme/flapping@1"
    artifact(system, name)
    system.adapter(name)
    system.until_ready(name)
    where, since = home(system, name), [_moved(system, name)]
    _until_later(since[-1])
    system.misdeeds(where, lie=True, lose=ref)
    until(lambda: system.condition(name, "Ready")[0] == "False", 10, lambda: system.explain(name))
    since.append(_moved(system, name))
    assert system.condition(name, "Ready")[1] == "Drifted"
    assert f"{system.namespace}/{POOL}/{where}" in message(system, name)
    _until_later(since[-1])
    system.misdeeds(where)
    until(lambda: system.ready(name), 15, lambda: system.explain(name))
    since.append(_moved(system, name))
    assert system.condition(name, "Ready") == ("True", "Ready")
    assert since[0] < since[1] < since[2]
    assert system.columns("lora")[name]["REASON"] == "Ready"


def _moved(system: System, name: str) -> str:
    conditions = system.status(name)["conditions"]
    return str(next(each["lastTransitionTime"] for each in conditions if each["type"] == "Ready"))


def _until_later(moment: str) -> None:
    """Conditions tell whole seconds."""
    until(lambda: datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ") > moment, 3, "the clock")


def test_more_warm_replicas_than_the_pool_has_are_told_and_never_pass_for_ready_o10(system: System) -> None:
    artifact(system, "greedy")
    system.adapter("greedy", warmReplicas=REPLICAS + 2)
    until(lambda: system.status("greedy").get("readyReplicas") == REPLICAS, 20, lambda: system.explain("greedy"))
    assert system.condition("greedy", "Ready") == ("False", "NoReplica")
    assert f"warmReplicas is {REPLICAS + 2}, the pool has {REPLICAS} replicas" in message(system, "greedy")
    assert system.columns("lora")["greedy"]["RESIDENT"] == f"{REPLICAS}/{REPLICAS + 2}"
    system.adapter("greedy", warmReplicas=REPLICAS)
    system.until_ready("greedy")


def test_a_rank_above_the_pools_is_refused_before_any_engine_with_a_pool_that_takes_it_o14(system: System) -> None:
    artifact(system, "wide")
    system.pool("narrow", replicas=1, engine={"maxRank": 1, "adapterMemory": "32Mi", "hostCache": "64Mi"})
    try:
        system.until_available(40, "narrow")
        system.adapter("wide", poolRef={"name": "narrow"})
        until(lambda: system.condition("wide", "Ready")[1] == "RankTooHigh", 15, lambda: system.explain("wide"))
        assert f"pool {system.namespace}/{POOL} of the same base takes up to rank 64" in message(
            system, "wide", "Validated"
        )
        assert not system.status("wide").get("replicas")
    finally:
        _remove_pool(system, "narrow", "wide")
    system.adapter("wide")
    system.until_ready("wide")


# -- loaded, published, routed: each is mended by itself


def test_what_was_loaded_and_not_published_is_published_by_the_next_operator_o56(system: System) -> None:
    """Killed between the engine's answer and the status; the engine is not made to load it again."""
    artifact(system, "half")
    system.kill_operator()
    dying = system.start_operator(fault="after/Warm")
    system.adapter("half")
    until(lambda: not dying.running(), 20, dying.tail)
    assert not system.ready("half")
    (where,) = system.holders("acme/half@1")
    before = _loaded_at(system, where, "acme/half@1")
    system.start_operator()
    system.until_operator_ready()
    system.until_ready("half", seconds=10)
    assert system.holders("acme/half@1") == {where}
    assert _loaded_at(system, where, "acme/half@1") == before
    key = system.services.key("acme")
    answer = answered(system, lambda: system.services.ask(key, "half"))
    assert (answer.headers["x-loraplane-residency"], home(system, "half")) == ("hit", where)


def _loaded_at(system: System, ordinal: int, ref: str) -> float:
    rows = system.engine(ordinal, "GET", "/adapters").json()["adapters"]
    return float(next(row["since"] for row in rows if row["ref"] == ref))


def test_a_gateway_that_was_away_while_adapters_were_loaded_routes_to_them_o56(system: System) -> None:
    artifact(system, "unseen")
    key = system.services.key("acme")
    system.services.gateway.kill()
    try:
        system.adapter("unseen")
        system.until_ready("unseen")
    finally:
        system.services.start_gateway()
    answer = answered(system, lambda: system.services.ask(key, "unseen"))
    assert answer.headers["x-loraplane-residency"] == "hit"


def answered(system: System, ask: Callable[[], httpx.Response], seconds: float = NOTICED_SECONDS) -> httpx.Response:
    """The first good answer; there must be one that soon."""
    last: list[httpx.Response] = []

    def good() -> bool:
        last[:] = [ask()]
        return last[0].status_code == 200

    until(good, seconds, lambda: f"{last[0].status_code} {last[0].text}\n{system.services.gateway.tail()}")
    return last[0]


def test_a_gateway_answers_for_a_new_adapter_and_a_new_version_within_a_second_o22(system: System) -> None:
    """Also where it was asked before, and had to say that there is no such thing."""
    names = ("fresh-a", "fresh-b", "fresh-c")
    artifacts(system, *names, "fresh-d")
    key = system.services.key("acme")
    for name in names:
        assert system.services.ask(key, name).status_code == 404
        system.adapter(name)
        system.until_ready(name)
        answer = answered(system, lambda name=name: system.services.ask(key, name))  # type: ignore[misc]
        assert answer.headers["x-loraplane-adapter-id"].startswith(f"acme/{name}@1#")
        assert answer.headers["x-loraplane-residency"] == "hit"
    system.adapter("fresh-a", source="fresh-d")
    until(lambda: system.ready("fresh-a") and system.status("fresh-a")["activeVersion"] == 2, 20, "version 2")
    digest = system.status("fresh-a")["digest"]

    def second() -> bool:
        found = system.services.ask(key, "fresh-a").headers
        return found["x-loraplane-adapter-id"] == f"acme/fresh-a@2#{digest[:12]}"

    until(second, NOTICED_SECONDS, "version 2 at the gateway")


def test_many_adapters_at_once_are_all_served_and_routing_has_no_object_for_each_o19_o65(system: System) -> None:
    names = [f"many-{number}" for number in range(12)]
    artifacts(system, *names)
    before = objects(system)
    for name in names:
        system.adapter(name)
    assert system.until_ready(*names) <= TOGETHER_SECONDS
    key = system.services.key("acme")
    for name in names:
        answer = answered(system, lambda name=name: system.services.ask(key, name))  # type: ignore[misc]
        assert answer.headers["x-loraplane-adapter-id"].startswith(f"acme/{name}@1#")
    assert objects(system) == before


def objects(system: System) -> set[str]:
    """Everything in the namespace but the adapters and the Events about them."""
    found: set[str] = set()
    groups = system.kube.call("GET", "/apis")["groups"]
    roots = ["/api/v1", *(f"/apis/{group['preferredVersion']['groupVersion']}" for group in groups)]
    for root in roots:
        for kind in system.kube.call("GET", root)["resources"]:
            listed = kind["namespaced"] and "list" in kind["verbs"]
            if listed and kind["name"] not in ("events", "loraadapters"):
                path = f"{root}/namespaces/{system.namespace}/{kind['name']}"
                found |= {f"{kind['name']}/{each['metadata']['name']}" for each in system.kube.items(path)}
    return found
