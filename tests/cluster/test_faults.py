"""The operator killed at every phase boundary: the fault points that it names itself (faults.points()).

Adapters live on real engines with the real model. A second pool, which is made, changed and removed to reach the
pools' phases, has an engine without a model (fake_engine), so that a replacement takes a second.
"""

import contextlib
import itertools
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from loraplane_operator import faults
from tests.cluster.churn import settled
from tests.cluster.models import TINY_BASE
from tests.cluster.services import until
from tests.cluster.system import FAKE_IMAGE, System

pytestmark = pytest.mark.timeout(240)
_numbers = itertools.count()
SIDE = "side"
STEP_SECONDS = 40.0


class Step(NamedTuple):
    do: Callable[[], object]
    done: Callable[[], object]


def test_there_are_at_least_thirty_points() -> None:
    assert len(faults.points()) >= 30


def _spread() -> list[Any]:
    """Every fourth point in `make check-cluster`, the others in `make check-slow`: each takes about ten seconds."""
    return [
        point if index % 4 == 0 else pytest.param(point, marks=pytest.mark.slow)
        for index, point in enumerate(faults.points())
    ]


@pytest.mark.parametrize("point", _spread())
def test_a_kill_there_leaves_the_same_end_state(system: System, point: str) -> None:
    name = f"f{next(_numbers)}"
    kind = point.rpartition("/")[2]
    steps = _SCRIPTS.get(kind, _adapter)(system, name)
    system.kill_operator()
    operator = system.start_operator(fault=point)
    died = False
    for step in steps:
        step.do()
        until(lambda step=step: not operator.running() or step.done(), STEP_SECONDS, lambda: system.explain(name))  # type: ignore[misc]
        if not operator.running():
            died = True
            system.start_operator()
        until(step.done, STEP_SECONDS, lambda: f"{point} {system.explain(name)}")
    if not died:  # what it did last may be seen, and even told by it, a moment before it dies of it
        until(lambda: not operator.running(), 5, f"the operator never came by {point}")
        system.start_operator()
    wanted = {name: 1} if system.get(name) is not None else {}
    settled(system, wanted, versions=_VERSIONS.get(kind, 1))


def _adapter(system: System, name: str) -> list[Step]:
    """Everything that an adapter's way to Ready and back to nothing consists of."""
    return [
        Step(lambda: system.adapter(name, source="pirate", deletionPolicy="Delete"), lambda: system.ready(name)),
        Step(lambda: system.delete(name), lambda: system.get(name) is None),
    ]


def _kept(system: System, name: str) -> list[Step]:
    return _adapter(system, name)[:1]


def _two_versions(system: System, name: str) -> list[Step]:
    def second() -> bool:
        return system.ready(name) and system.status(name).get("version") == 2

    put = {"deletionPolicy": "Delete"}
    return [
        *_kept(system, name),
        Step(lambda: system.adapter(name, source="pirate-v2", **put), second),
    ]


def _active(system: System, name: str) -> list[Step]:
    def flipped() -> bool:
        return system.ready(name) and _weights(system, name) == {1: 100}

    wanted: dict[str, Any] = {"source": "pirate-v2", "deletionPolicy": "Delete", "activeVersion": 1}
    return [*_two_versions(system, name), Step(lambda: system.adapter(name, **wanted), flipped)]


def _traffic(system: System, name: str) -> list[Step]:
    shares = [{"version": 1, "weight": 30}, {"version": 2, "weight": 70}]

    def split() -> bool:
        return system.ready(name) and _weights(system, name) == {1: 30, 2: 70}

    wanted: dict[str, Any] = {"source": "pirate-v2", "deletionPolicy": "Delete", "traffic": shares}
    return [*_two_versions(system, name), Step(lambda: system.adapter(name, **wanted), split)]


def _waiting(system: System, name: str) -> list[Step]:
    """An activation that waits for warmth, asked for at the registry again and again until it is so."""

    def flip() -> None:
        def ask() -> None:
            body = {"version": 1, "wait": "warm", "deadline_s": 30}
            with contextlib.suppress(AssertionError):
                system.services.admin("POST", f"/admin/tenants/acme/adapters/{name}/activate", body)

        threading.Thread(target=ask, daemon=True).start()

    return [*_two_versions(system, name), Step(flip, lambda: _weights(system, name) == {1: 100})]


def _marked(system: System, name: str) -> list[Step]:
    put = {"source": "pirate", "deletionPolicy": "Delete"}

    def pinned() -> bool:
        found = system.engine_rows(f"acme/{name}@1")
        return bool(found) and all(row["pinned"] for row in found)

    return [*_kept(system, name), Step(lambda: system.adapter(name, pinned=True, **put), pinned)]


def _pool(system: System, name: str) -> list[Step]:
    del name
    base = {**TINY_BASE, "name": "side-base"}

    def put(sequences: int) -> None:
        engine = {"maxSequences": sequences, "adapterMemory": "32Mi", "hostCache": "64Mi"}
        system.pool(SIDE, replicas=1, baseModel=base, image=FAKE_IMAGE, engine=engine)

    def running(sequences: int) -> bool:
        pod = system.pods(SIDE).get(0)
        return pod is not None and pod.ready and f"--max-sequences={sequences}" in system.arguments(SIDE, 0)

    def reported() -> bool:
        rows = system.services.rows("SELECT 1 FROM pools WHERE name = %s AND base_digest <> ''", SIDE)
        return running(4) and bool(rows)

    def gone() -> bool:
        path = f"/apis/apps/v1/namespaces/{system.namespace}/statefulsets/{SIDE}"
        rows = system.services.rows("SELECT 1 FROM pools WHERE name = %s", SIDE)
        return system.kube.get(system.pool_path(SIDE)) is None and system.kube.get(path) is None and not rows

    return [
        Step(lambda: put(4), reported),
        Step(lambda: put(5), lambda: running(5)),
        Step(lambda: system.kube.delete(system.pool_path(SIDE)), gone),
    ]


def _weights(system: System, name: str) -> dict[int, int]:
    query = "SELECT version, weight FROM tenant_adapters WHERE tenant_id = 'acme' AND adapter = %s AND weight > 0"
    return dict(system.services.rows(query, name))


_SCRIPTS: dict[str, Callable[[System, str], list[Step]]] = {
    "ApplyWorkload": _pool,
    "RestartReplica": _pool,
    "DeleteWorkload": _pool,
    "ReportPool": _pool,
    "RemoveReport": _pool,
    "ActivateVersion": _active,
    "SplitTraffic": _traffic,
    "ConfirmWarm": _waiting,
    "Mark": _marked,
}
_VERSIONS = {"ActivateVersion": 2, "SplitTraffic": 2, "ConfirmWarm": 2}
