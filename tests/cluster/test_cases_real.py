"""Known failures of other systems where it matters what an engine does: all engines are real `loraplane-engine`
processes with the real model, started by the kubelet stand-in. The others are in test_cases.
"""

import contextlib
import json
import re
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
from starlette.routing import Route

from loraplane_engine.server.admin_app import AdminRoutes
from loraplane_engine.server.state import StateHub
from loraplane_gateway.registry.app import create_admin_app
from tests.cluster.fixtures import REAL_REPLICAS
from tests.cluster.services import until
from tests.cluster.system import System

pytestmark = pytest.mark.timeout(240)
ALL = set(range(REAL_REPLICAS))
SIDE = "side"
DISK_BYTES = 4 << 20
CLIENTS = 3
#: Long enough for several whole blocks of the prefix cache.
PROMPT = "The captain of the ship told the crew about the harbour, the weather and the long way home. " * 6


def test_a_hot_adapter_is_served_by_as_many_replicas_as_it_asks_for_o41(system: System) -> None:
    system.adapter("pirate")
    system.until_ready("pirate")
    assert len(system.holders("acme/pirate@1")) == 1
    system.adapter("pirate", warmReplicas=REAL_REPLICAS)
    until(lambda: system.status("pirate").get("readyReplicas") == REAL_REPLICAS, 20, lambda: system.explain("pirate"))
    assert system.ready("pirate") and system.holders("acme/pirate@1") == ALL
    key = system.services.key("acme")
    with ThreadPoolExecutor(12) as pool:
        asked = [pool.submit(system.services.ask, key, "pirate", max_tokens=16) for _ in range(12)]
        answers = [each.result(60) for each in asked]
    assert {answer.status_code for answer in answers} == {200}
    served = Counter(answer.headers["x-loraplane-replica"] for answer in answers)
    assert set(served) == {f"{system.namespace}/smol/{ordinal}" for ordinal in ALL}, served
    assert {answer.headers["x-loraplane-residency"] for answer in answers} == {"hit"}


def test_other_weights_under_the_same_name_never_answer_from_the_old_ones_cache_o43(system: System) -> None:
    """By a new version, and by an object that was deleted and made again."""
    for name, source in (("style", "pirate"), ("reference", "html")):
        system.adapter(name, source=source)
    system.until_ready("style", "reference")
    key = system.services.key("acme")
    old, wanted = _text(system, key, "style"), _text(system, key, "reference")
    assert _text(system, key, "style") == old != wanted
    system.adapter("style", source="html")
    until(lambda: system.ready("style") and system.status("style")["activeVersion"] == 2, 30, "version 2")
    until(lambda: _version(system, key) == 2, 5, "version 2 at the gateway")
    assert _text(system, key, "style") == wanted
    system.delete("style")
    system.until_gone("style")
    system.adapter("style", source="pirate")
    system.until_ready("style")
    until(lambda: _version(system, key) not in (0, 2), 5, "the object made again, at the gateway")
    assert _text(system, key, "style") == old


def _text(system: System, key: str, model: str) -> str:
    answer = system.services.ask(key, model, prompt=PROMPT, max_tokens=10, temperature=0)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


def _version(system: System, key: str) -> int:
    """Which one answers for "style"; 0 when none does."""
    answer = system.services.ask(key, "style", max_tokens=1)
    found = answer.headers.get("x-loraplane-adapter-id", "@0#")
    return int(found.rpartition("#")[0].rpartition("@")[2])


def test_adapters_come_and_go_while_others_generate_and_no_answer_is_lost_o46(system: System) -> None:
    system.adapter("pirate", warmReplicas=REAL_REPLICAS)
    system.until_ready("pirate")
    before = {ordinal: (pod.pid, pod.restarts) for ordinal, pod in system.pods().items()}
    others = ("html", "json", "butler")
    with traffic(system, "pirate") as answers:
        until(lambda: len(answers) >= CLIENTS, 60, "the first answers")
        for name in others:
            system.adapter(name, warmReplicas=REAL_REPLICAS)
        system.until_ready(*others, seconds=60)
        for name in others:
            system.delete(name)
        for name in others:
            system.until_gone(name, 60)
    assert len(answers) >= 2 * CLIENTS  # what was being generated meanwhile, too
    assert {answer.status_code for answer in answers} == {200}, [answer.text for answer in answers][:3]
    assert {answer.headers["x-loraplane-adapter-id"].partition("#")[0] for answer in answers} == {"acme/pirate@1"}
    assert {answer.json()["choices"][0]["finish_reason"] for answer in answers} <= {"stop", "length"}
    assert {ordinal: (pod.pid, pod.restarts) for ordinal, pod in system.pods().items()} == before


@contextlib.contextmanager
def traffic(system: System, model: str) -> Iterator[list[httpx.Response]]:
    """CLIENTS that ask again as soon as they were answered; the answers."""
    key = system.services.key("acme")
    stop = threading.Event()
    answers: list[httpx.Response] = []

    def client() -> None:
        while not stop.is_set():
            answers.append(system.services.ask(key, model, max_tokens=12))

    with ThreadPoolExecutor(CLIENTS) as pool:
        clients = [pool.submit(client) for _ in range(CLIENTS)]
        try:
            yield answers
        finally:
            stop.set()
        for each in clients:
            each.result(60)


def test_an_engines_disk_stays_within_its_bound_and_is_freed_by_deletions_o29(system: System) -> None:
    names = ("pirate", "pirate-v2", "html", "json", "butler")
    engine = {"maxModelLen": 256, "maxSequences": 2, "adapterMemory": "16Mi", "hostCache": "64Mi"}
    system.pool(SIDE, replicas=1, engine={**engine, "diskCache": str(DISK_BYTES)})
    try:
        system.until_available(90, SIDE)
        for name in names:
            system.adapter(name, poolRef={"name": SIDE})
        system.until_ready(*names, seconds=60)
        sizes = [size for _, size in _images(system)]
        assert 0 < sum(sizes) <= DISK_BYTES < max(sizes) * len(names)  # not all of them have room
        kept = {digest for digest, _ in _images(system)}
        leaving = [name for name in names if system.status(name)["digest"] in kept]
        assert leaving and leaving != list(names)
        for name in leaving:
            system.delete(name)
        for name in leaving:
            system.until_gone(name)
        assert _images(system) == []
    finally:
        system.clear()
        system.kube.delete(system.pool_path(SIDE))
        until(lambda: system.kube.get(system.pool_path(SIDE)) is None and not system.pods(SIDE), 60, SIDE)


def _images(system: System) -> list[tuple[str, int]]:
    """(digest, bytes) of what lies in the side pool's engine's cache volume."""
    folder: Path = system.state / "volumes" / system.pods(SIDE)[0].uid / "cache"
    return [(file.name.removesuffix(".image"), file.stat().st_size) for file in folder.rglob("*.image")]


# -- who may change something


def test_no_route_of_an_engine_or_of_the_registry_does_anything_without_the_right_to_o53(system: System) -> None:
    """The routes are read from the applications, so that a new one is asked, too; so is one that does not exist."""
    pod = system.pods()[0]
    file = next((system.state / "volumes" / pod.uid).rglob("credentials.json"))
    engine = {role: found[0] for role, found in json.loads(file.read_text()).items() if isinstance(found, list)}
    client = system.services.key("acme")
    with httpx.Client(trust_env=False, timeout=10) as http:

        def status(method: str, url: str, token: str) -> int:
            headers = {"authorization": f"Bearer {token}"}
            return http.request(method, url, headers=headers, json={}).status_code

        for path in engine_paths():
            for method in ("GET", "POST", "PUT", "PATCH", "DELETE"):
                url = f"http://{pod.ip}:8001{path}"
                assert {status(method, url, token) for token in ("-", engine["data"], client)} == {401}, (method, path)
                if method != "GET":
                    assert status(method, url, engine["state"]) == 403, (method, path)
        for method, path in registry_routes():
            url = f"{system.services.admin_url}{path}"
            assert {status(method, url, token) for token in ("-", engine["admin"])} == {401}, (method, path)
            assert status(method, url, client) == 403, (method, path)


def engine_paths() -> list[str]:
    nothing = cast(Any, None)
    hub = StateHub(snapshot=list, slots=None, max_rank=1)
    admin = AdminRoutes(adapters=nothing, hub=hub, replica="pools/smol/0", boot="", info=lambda: None)
    found = {_filled(route.path) for route in admin.router().routes if isinstance(route, Route)}
    assert len(found) >= 5
    return [*sorted(found), "/not/thought/of/yet"]


def registry_routes() -> list[tuple[str, str]]:
    """All that are not open to everyone who reaches the port."""
    paths = create_admin_app(cast(Any, None)).openapi()["paths"]
    found = [(method.upper(), _filled(path)) for path, methods in paths.items() for method in methods]
    closed = [(method, path) for method, path in found if not re.match("/health/|/metrics$", path)]
    assert len(closed) >= 20 and len(found) - len(closed) == 3
    return closed


def _filled(path: str) -> str:
    known = {"tenant": "acme", "version": "1"}
    return re.sub(r"\{([a-z_]+)\}", lambda name: known.get(name[1], "x"), path)
