"""A pool changes under live traffic: no request fails, no stream is cut. Engines are real `loraplane-engine`
processes with the real model, started by the kubelet stand-in; requests stream through the data gateway.
"""

import json
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from loraplane_core import credentials, placement
from loraplane_core.identity import PoolRef, ReplicaId
from loraplane_core.labels import ANNOTATION_EPOCH, LABEL_POOL
from tests.cluster.services import until
from tests.cluster.system import POOL, REAL_IMAGE, ClusterAccess, System, running_system
from tests.cluster.traffic import Traffic, traffic

pytestmark = pytest.mark.timeout(300)
#: A stream on the replica that goes, and time for the others to come to it.
FLOWING_SECONDS = 60.0
CHANGE_SECONDS = 150.0
#: A stream that is as young when its replica is told to go takes some seconds yet.
LONG_TOKENS, YOUNG_SECONDS = 128, 1.0


@pytest.fixture(scope="module")
def system(cluster: ClusterAccess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    with running_system(cluster, tmp_path_factory.mktemp("drain"), REAL_IMAGE) as made:
        made.pool(replicas=2)
        made.until_available(120)
        yield made


def at_home(system: System, ordinal: int, count: int) -> list[str]:
    """Names of adapters whose first home of two is that replica; the order depends on the namespace."""
    ids = [ReplicaId(system.namespace, POOL, each) for each in range(2)]
    names = [f"d{number}" for number in range(60)]
    return [name for name in names if placement.order("acme", name, ids)[0].ordinal == ordinal][:count]


@pytest.fixture(scope="module")
def models(system: System) -> list[str]:
    """Four adapters, two with each replica as their home."""
    names = at_home(system, 0, 2) + at_home(system, 1, 2)
    for name, source in zip(names, ("pirate", "html", "json", "butler"), strict=True):
        system.adapter(name, source=source)
    system.until_ready(*names)
    return names


def log_lines(system: System) -> list[dict[str, Any]]:
    return [json.loads(line) for line in system.operator().log.read_text().splitlines()]


def busy(flow: Traffic, replica: str, seconds: float) -> bool:
    """With a request that began no longer ago."""
    since = time.time() - seconds
    return any(answer.replica == replica and answer.began > since for answer in list(flow.running.values()))


def test_a_replica_that_leaves_lets_its_streams_end_and_its_adapters_are_warm_on_the_other_before(
    system: System, models: list[str]
) -> None:
    leaver, key = f"{system.namespace}/{POOL}/1", system.services.key("acme")
    assert not system.warm(0) & {f"acme/{name}@1" for name in models[2:]}
    pod = system.pods()[1]
    told = len(log_lines(system))
    with traffic(system.services, key, models, clients=3, tokens=32) as flow:
        with traffic(system.services, key, models[2:], clients=1, tokens=LONG_TOKENS) as long:
            until(lambda: busy(long, leaver, YOUNG_SECONDS), FLOWING_SECONDS, f"no stream on {leaver}", every=0.01)
            system.pool(replicas=1)
            until(lambda: _terminating(system, 1), FLOWING_SECONDS, lambda: system.explain(""), every=0.01)
            running = [*long.running.values(), *flow.running.values()]
            going = [answer for answer in running if answer.replica == leaver]
            warm = system.warm(0)
        until(lambda: 1 not in system.pods(), FLOWING_SECONDS, lambda: system.explain(""))
        before = len(flow.answers)
        until(lambda: len(flow.answers) >= before + 2 * len(models), FLOWING_SECONDS, "answers afterwards")
    assert flow.failed() + long.failed() == []
    assert {f"acme/{name}@1" for name in models} <= warm
    _assert_warm_before(log_lines(system)[told:], models[2:])
    assert going, "no stream was under way on the replica that went"
    assert all(answer.ended and not answer.trouble for answer in going)
    end, after = max(answer.ended for answer in going), flow.answers + long.answers
    assert not any(answer.replica == leaver for answer in after if answer.began > end)
    assert system.pods().keys() == {0} and pod.restarts == 0
    system.until_ready(*models)
    assert system.condition("", "Progressing")[0] == "False", system.explain("")


def _terminating(system: System, ordinal: int) -> bool:
    raw = system.kube.get(f"/api/v1/namespaces/{system.namespace}/pods/{POOL}-{ordinal}")
    return raw is None or "deletionTimestamp" in raw["metadata"]


def _assert_warm_before(lines: list[dict[str, Any]], names: list[str]) -> None:
    """The operator told the cluster of one replica less after the last load, or mark, on the one that stays."""
    done = [(number, line) for number, line in enumerate(lines) if line["message"] == "done"]
    kept = {
        line["adapter"].partition("@")[0].removeprefix("acme/"): number
        for number, line in done
        if line["action"] in ("Warm", "Mark") and line["replica"].endswith("/0")
    }
    scaled = [number for number, line in done if line["action"] == "ApplyWorkload" and line["why"].endswith("1 stay")]
    assert set(names) <= kept.keys()
    assert max(kept[name] for name in names) < scaled[0]


@pytest.mark.slow
def test_credentials_rotate_without_a_failed_request_and_the_old_ones_are_refused_in_the_end(
    system: System, models: list[str]
) -> None:
    """By two epochs, since engines take the one before theirs, too: each replica is replaced twice."""
    system.pool(replicas=2)
    system.until_available(120)
    system.until_ready(*models, seconds=60)
    assert [_answers(system, ordinal, 1) for ordinal in (0, 1)] == [ACCEPTED, ACCEPTED]
    key = system.services.key("acme")
    with traffic(system.services, key, models, clients=2, tokens=24) as flow:
        until(lambda: len(flow.answers) >= len(models), FLOWING_SECONDS, "answers before")
        system.kube.merge(system.pool_path(), {"metadata": {"annotations": {ANNOTATION_EPOCH: "3"}}})
        until(lambda: _epochs(system) == {0: "3", 1: "3"}, CHANGE_SECONDS, lambda: system.explain(""), every=0.2)
        until(lambda: _settled(system), CHANGE_SECONDS, lambda: system.explain(""), every=0.2)
        until(lambda: _slice_epochs(system) == {"3"}, 10, lambda: str(_slice_epochs(system)))
        before = len(flow.answers)
        until(lambda: len(flow.answers) >= before + 2 * len(models), FLOWING_SECONDS, "answers afterwards")
    assert flow.failed() == []
    assert len({answer.replica for answer in flow.answers[before:]}) == 2
    for ordinal in (0, 1):
        assert _answers(system, ordinal, 1) == REFUSED
        assert _answers(system, ordinal, 2) == _answers(system, ordinal, 3) == ACCEPTED
    assert [_fetch(system, models[0], epoch) for epoch in (1, 2, 3)] == [401, 200, 200]
    system.until_ready(*models)


ACCEPTED = {"admin": 200, "state": 200, "data": 200}
REFUSED = dict.fromkeys(ACCEPTED, 401)
_PATHS = {"admin": (8001, "/adapters"), "state": (8001, "/state"), "data": (8000, "/v1/models")}


def _credential(system: System, role: credentials.Role, epoch: int) -> dict[str, str]:
    master = credentials.read_key(system.services.material.master_file)
    pool = PoolRef(system.namespace, POOL)
    token = credentials.engine_credential(credentials.role_key(master, role), pool, epoch)
    return {"authorization": f"Bearer {token}"}


def _answers(system: System, ordinal: int, epoch: int) -> dict[str, int]:
    """What each port of an engine answers to the credential of an epoch."""
    roles: tuple[credentials.Role, ...] = ("admin", "state", "data")
    found: dict[str, int] = {}
    for role in roles:
        port, path = _PATHS[role]
        url, headers = f"http://{system.pods()[ordinal].ip}:{port}{path}", _credential(system, role, epoch)
        with httpx.stream("GET", url, headers=headers, trust_env=False, timeout=10) as response:
            found[role] = response.status_code
    return found


def _fetch(system: System, model: str, epoch: int) -> int:
    """What the artifact listener answers to an engine of that epoch."""
    pool = f"{system.namespace}/{POOL}"
    headers = {**_credential(system, "fetch", epoch), "x-loraplane-pool": pool, "x-loraplane-epoch": str(epoch)}
    url = f"{system.services.artifacts_url}/artifacts/{system.status(model)['digest']}/adapter_config.json"
    return httpx.get(url, headers=headers, trust_env=False, timeout=10).status_code


def _epochs(system: System) -> dict[int, str]:
    found = {}
    for ordinal in system.pods():
        raw = system.kube.get(f"/api/v1/namespaces/{system.namespace}/pods/{POOL}-{ordinal}")
        if raw is not None:
            found[ordinal] = raw["metadata"]["annotations"][ANNOTATION_EPOCH]
    return found


def _settled(system: System) -> bool:
    ready = (system.kube.call("GET", system.pool_path())["status"]).get("readyReplicas") == 2
    return ready and system.condition("", "Progressing")[0] == "False"


def _slice_epochs(system: System) -> set[str]:
    """What gateways read of the credentials to use."""
    path = f"/apis/discovery.k8s.io/v1/namespaces/{system.namespace}/endpointslices?labelSelector={LABEL_POOL}"
    return {raw["metadata"]["labels"].get(ANNOTATION_EPOCH, "") for raw in system.kube.items(path)}
