"""What breaks around the operator, and the operator itself. Engines are real `loraplane-engine` processes with the
real model, but for the one that lies, which is a fake: a real one does not."""

import os
import random
import signal
import subprocess

import pytest

from loraplane_core import placement
from loraplane_core.identity import ReplicaId
from tests.cluster.churn import Churn, forever_alive, settled, storm
from tests.cluster.fixtures import REAL_REPLICAS
from tests.cluster.models import tiny_adapter
from tests.cluster.services import until
from tests.cluster.system import POOL, System

pytestmark = pytest.mark.timeout(300)


def kills(system: System, times: int, seed: int) -> None:
    """kill -9 at random moments under churn, each followed by a start."""
    churn = Churn(system, random.Random(seed))
    for _ in range(times):
        for _ in range(churn.random.randint(1, 3)):
            churn.step()
        _until_after(churn.random.uniform(0, 2.5), system)
        system.kill_operator()
        system.start_operator()
    churn.settled()


def _until_after(seconds: float, system: System) -> None:
    """Let the operator work for that long; it must not end by itself."""
    try:
        code = system.operator().wait(seconds)
    except subprocess.TimeoutExpired:
        return
    pytest.fail(f"the operator ended with {code}:\n{system.operator().tail()}")


def test_ten_kills_at_random_moments_end_in_the_same_state(system: System) -> None:
    kills(system, 10, seed=4)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_hundred_kills_at_random_moments_end_in_the_same_state(system: System) -> None:
    kills(system, 100, seed=5)


def test_two_operators_at_once_do_no_harm(system: System) -> None:
    churn = Churn(system, random.Random(6))
    system.start_operator("second")
    try:
        for _ in range(12):
            churn.step()
            _until_after(0.3, system)
        churn.settled()
    finally:
        system.kill_operator("second")
    churn.settled()


def api_server_away(system: System, seconds: float) -> None:
    system.adapter("pirate", warmReplicas=2)
    system.until_ready("pirate")
    key = system.services.key("acme")

    def outage() -> None:
        system.cluster.stop_api_server()
        try:
            _until_after(seconds, system)
            assert system.services.ask(key, "pirate").status_code == 200
        finally:
            system.cluster.start_api_server()
        system.adapter("html")
        system.until_ready("html", "pirate", seconds=45)

    forever_alive(system, outage)
    settled(system, {"pirate": 2, "html": 1})


def test_the_api_server_away_for_fifteen_seconds(system: System) -> None:
    api_server_away(system, 15)


@pytest.mark.slow
def test_the_api_server_away_for_a_minute(system: System) -> None:
    api_server_away(system, 60)


def test_watches_that_expired_begin_anew(system: System) -> None:
    """The API server comes back without the history that the watches would go on from: 410."""
    system.adapter("pirate")
    system.until_ready("pirate")

    def expire() -> None:
        system.cluster.stop_api_server()
        try:
            system.cluster.compact_etcd()
        finally:
            system.cluster.start_api_server()
        system.adapter("html")
        system.delete("pirate")
        system.until_ready("html", seconds=45)
        system.until_gone("pirate", 45)

    forever_alive(system, expire)
    settled(system, {"html": 1})


def test_a_storm_of_conflicts_keeps_nothing_from_ready_and_from_its_end(system: System) -> None:
    names = ["pirate", "html"]
    for name in names:
        system.adapter(name, warmReplicas=2)
    with storm(system, names):
        system.until_ready(*names, seconds=20)
        system.delete("html")
        system.until_gone("html", 20)
    raw = system.get("pirate")
    assert raw is not None and int(raw["metadata"]["annotations"]["storm"]) > 50
    settled(system, {"pirate": 2})


def test_the_registry_away_takes_nothing_from_what_serves(system: System) -> None:
    system.adapter("pirate", warmReplicas=2)
    system.until_ready("pirate")
    key = system.services.key("acme")
    assert system.services.ask(key, "pirate").status_code == 200
    before = system.status("pirate")
    system.services.registry.kill()
    try:
        system.adapter("html")
        until(lambda: system.condition("html", "Ready")[0] == "False", 15, lambda: system.explain("html"))
        assert system.services.ask(key, "pirate").status_code == 200
        assert system.ready("pirate")
        assert system.status("pirate")["replicas"] == before["replicas"]
    finally:
        system.services.start_registry()
    system.until_ready("html", seconds=20)
    settled(system, {"pirate": 2, "html": 1})


def test_a_hung_engine_delays_no_adapter_of_the_others_and_is_named_o5(system: System) -> None:
    """It accepts and never answers: stopped, not dead."""
    hung = system.pods()[0]
    elsewhere, here = _names_by_home(system, ordinal=0)
    os.kill(hung.pid, signal.SIGSTOP)
    try:
        for name in (here, *elsewhere):
            system.adapter(name, source="pirate", deletionPolicy="Delete")  # later tests count what is registered
        assert system.until_ready(*elsewhere, seconds=20) <= 10
        until(lambda: f"{system.namespace}/{POOL}/0" in _told(system, here), 20, lambda: system.explain(here))
    finally:
        os.kill(hung.pid, signal.SIGCONT)
    until(lambda: system.pods()[0].ready, 30, lambda: system.explain(""))
    system.until_ready(here)
    settled(system, dict.fromkeys([here, *elsewhere], 1))


def _names_by_home(system: System, ordinal: int) -> tuple[list[str], str]:
    """(three names that belong on other replicas, one that belongs on this one); the order depends on the namespace."""
    ids = [ReplicaId(system.namespace, POOL, each) for each in range(REAL_REPLICAS)]
    homes = {name: placement.order("acme", name, ids)[0].ordinal for name in (f"h{number}" for number in range(50))}
    others = [name for name, home in homes.items() if home != ordinal]
    return others[:3], next(name for name, home in homes.items() if home == ordinal)


def _told(system: System, name: str) -> str:
    conditions = system.status(name).get("conditions") or []
    return " ".join(each["message"] for each in conditions if each["type"] == "Ready" and each["status"] == "False")


def test_an_engine_that_says_loaded_and_is_not_never_counts_as_ready(fake_system: System) -> None:
    system = fake_system
    tiny_adapter(system.services.adapter_root / "small", 1)
    system.pool(replicas=2)
    system.until_available(30)
    system.misdeeds(0, lie=True)
    system.adapter("small", warmReplicas=2)
    until(lambda: system.status("small").get("readyReplicas") == 1, 20, lambda: system.explain("small"))
    _until_after(3, system)
    assert not system.ready("small")
    rows = {row["name"]: row["residency"] for row in system.status("small")["replicas"]}
    assert rows[f"{system.namespace}/smol/0"] not in ("device", "host")
    system.misdeeds(0)
    system.until_ready("small", seconds=40)


def test_an_engine_whose_adapter_calls_hang_delays_no_other_replica(fake_system: System) -> None:
    system = fake_system
    for number, name in enumerate(("one", "two", "three")):
        tiny_adapter(system.services.adapter_root / name, number)
    system.pool(replicas=3)
    system.until_available(30)
    system.misdeeds(0, hang=True)
    for name in ("one", "two", "three"):
        system.adapter(name, warmReplicas=3)
    for name in ("one", "two", "three"):
        until(lambda name=name: {1, 2} <= system.holders(f"acme/{name}@1"), 10, name)  # type: ignore[misc]
    system.misdeeds(0)
