"""What is done to a system while something breaks, and what must hold afterwards in every case."""

import contextlib
import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from loraplane_core.labels import FINALIZER
from tests.cluster.kube import ADAPTERS, Refused
from tests.cluster.services import until
from tests.cluster.system import System

SOURCES = ("pirate", "html", "json", "butler")
SETTLE_SECONDS = 60.0


@dataclass
class Churn:
    """Applies, edits and deletes adapters by chance, and knows what should exist in the end."""

    system: System
    random: random.Random
    wanted: dict[str, tuple[str, int]] = field(default_factory=dict)  # name -> (source, warm replicas)
    made: int = 0

    def step(self) -> None:
        choice = self.random.random()
        if choice < 0.45 or not self.wanted:
            self.made += 1
            self._put(f"c{self.made}", self.random.choice(SOURCES), self.random.choice((1, 2)))
        elif choice < 0.75:
            name = self.random.choice(sorted(self.wanted))
            self._put(name, self.wanted[name][0], self.random.choice((1, 2)))
        else:
            name = self.random.choice(sorted(self.wanted))
            del self.wanted[name]
            self.system.delete(name)

    def _put(self, name: str, source: str, warm: int) -> None:
        self.wanted[name] = source, warm
        self.system.adapter(name, source=source, warmReplicas=warm, deletionPolicy="Delete")

    def settled(self) -> None:
        """The end state that every way through must reach."""
        settled(self.system, {name: warm for name, (_, warm) in self.wanted.items()})


def settled(system: System, wanted: dict[str, int], seconds: float = SETTLE_SECONDS, *, versions: int = 1) -> None:
    """All wanted adapters Ready on as many replicas as wished, with so many versions each, nothing else anywhere."""
    trouble: list[str] = []

    def holds() -> bool:
        trouble[:] = _troubles(system, wanted, versions)
        return not trouble

    until(holds, seconds, lambda: f"{trouble}\n{system.explain(next(iter(wanted), ''))}", every=0.2)


def _troubles(system: System, wanted: dict[str, int], versions: int) -> list[str]:
    objects = {raw["metadata"]["name"]: raw for raw in system.kube.items(ADAPTERS.format(namespace=system.namespace))}
    found = [f"{name} is still there" for name in sorted(objects.keys() - wanted.keys())]
    for name, warm in wanted.items():
        raw = objects.get(name)
        if raw is None or raw["metadata"].get("finalizers") != [FINALIZER] or not system.ready(name):
            found.append(f"{name}: not Ready, or without its finalizer: {raw and raw['metadata'].get('finalizers')}")
        elif _replicas(raw) != (warm, warm):
            found.append(f"{name}: ready and wished are {_replicas(raw)}, not {warm}")
    return found or [*_claims(system, objects), *_versions(system, wanted, versions), *_engines(system, wanted)]


def _replicas(raw: dict[str, Any]) -> tuple[int | None, int | None]:
    status = raw.get("status") or {}  # read before the object was found Ready
    return status.get("readyReplicas"), status.get("warmReplicas")


def _claims(system: System, objects: dict[str, dict]) -> list[str]:  # type: ignore[type-arg]
    claims = {row[0] for row in system.services.rows("SELECT claim_uid FROM adapters WHERE claim_uid IS NOT NULL")}
    uids = {raw["metadata"]["uid"] for raw in objects.values()}
    return [f"claims {sorted(map(str, claims))} of objects {sorted(uids)}"] if claims != uids else []


def _versions(system: System, wanted: dict[str, int], versions: int) -> list[str]:
    query = "SELECT adapter, count(*) FROM tenant_adapters WHERE tenant_id = 'acme' GROUP BY adapter"
    counts = dict(system.services.rows(query))
    return [f"{name} has {counts.get(name)} versions" for name in wanted if counts.get(name) != versions]


def _engines(system: System, wanted: dict[str, int]) -> list[str]:
    """A replica too many may keep its mark for a while; a deleted adapter may not."""
    warm = {ordinal: system.warm(ordinal) for ordinal in system.pods()}
    names = {ref.partition("@")[0].removeprefix("acme/") for refs in warm.values() for ref in refs}
    found = [f"{name} is gone and still marked warm" for name in sorted(names - wanted.keys())]
    for name, replicas in wanted.items():
        holders = {ordinal for ordinal, refs in warm.items() for ref in refs if ref.startswith(f"acme/{name}@")}
        if len(holders) < replicas:
            found.append(f"{name} is warm on {sorted(holders)}, not on {replicas}")
    return found


@contextlib.contextmanager
def storm(system: System, names: list[str]) -> Iterator[None]:
    """Somebody else patches annotations of these objects all the time."""
    stop = threading.Event()

    def blow() -> None:
        number = 0
        while not stop.wait(0.005):
            for name in names:
                number += 1
                with contextlib.suppress(Refused):
                    system.kube.merge(system.adapter_path(name), {"metadata": {"annotations": {"storm": str(number)}}})

    thread = threading.Thread(target=blow)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(timeout=20)


def forever_alive(system: System, action: Callable[[], None]) -> None:
    """`action`, and the operator that runs before is the one that runs after."""
    before = system.operator().pid
    action()
    assert system.operator().running() and system.operator().pid == before, system.operator().tail()
