"""Requests in flight, counted at dispatch (G68) and released exactly once, whatever happens (G37, G38, G44)."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from loraplane_core.identity import ReplicaId

_K = TypeVar("_K")


class InFlight:
    """This process's counts. `others` gives those of the other gateways for a replica (the shared ledger)."""

    def __init__(self, others: Callable[[ReplicaId], float], changed: Callable[[], None]) -> None:
        self._others = others
        self._changed = changed
        self._replicas: Counter[ReplicaId] = Counter()
        self._adapters: Counter[str] = Counter()
        self.dispatched = 0
        self.released = 0

    def load(self, replica: ReplicaId) -> float:
        return self._replicas[replica] + self._others(replica)

    def of_adapter(self, key: str) -> int:
        return self._adapters[key]

    def own(self) -> dict[ReplicaId, int]:
        return dict(self._replicas)

    @contextmanager
    def counted(self, replica: ReplicaId, adapter: str) -> Iterator[None]:
        self._replicas[replica] += 1
        self._adapters[adapter] += 1
        self.dispatched += 1
        self._changed()
        try:
            yield
        finally:
            self.released += 1
            _decrement(self._replicas, replica)
            _decrement(self._adapters, adapter)
            self._changed()


def _decrement(counts: Counter[_K], key: _K) -> None:
    counts[key] -= 1
    if not counts[key]:
        del counts[key]
