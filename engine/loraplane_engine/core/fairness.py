"""Waiting requests: one queue per (tenant, adapter), served in the order of tokens each tenant has had.

Virtual token counters (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024): the tenant
served least goes first; a tenant that comes back from idleness starts at the least of those who are active,
so that idle time is not saved up.
"""

from collections import deque
from collections.abc import Iterator

from loraplane_engine.core.words import QueueKey, Sequence


class FairQueues:
    def __init__(self) -> None:
        self._queues: dict[QueueKey, deque[Sequence]] = {}
        self._served: dict[str, float] = {}
        self._active: dict[str, int] = {}  # requests of the tenant inside the core, waiting or running
        self.waiting = 0

    def enter(self, sequence: Sequence) -> None:
        """A new request: counts its tenant as active until `leave`."""
        tenant = sequence.tenant
        if tenant not in self._active:
            least = min((self._served[other] for other in self._active), default=None)
            if least is None:
                self._served.clear()
            else:
                self._forget_idle(least)
            self._served[tenant] = max(self._served.get(tenant, 0.0), least or 0.0)
        self._active[tenant] = self._active.get(tenant, 0) + 1
        self._queues.setdefault(sequence.queue, deque()).append(sequence)
        self.waiting += 1

    def put_back(self, sequence: Sequence) -> None:
        """A preempted request goes before its queue's other ones."""
        self._queues.setdefault(sequence.queue, deque()).appendleft(sequence)
        self.waiting += 1

    def take(self, sequence: Sequence) -> None:
        """Out of its queue: admitted, aborted or failed. Raises ValueError when it is not waiting."""
        queue = self._queues.get(sequence.queue)
        if queue is None:
            raise ValueError(f"{sequence.request} is not waiting")
        queue.remove(sequence)
        if not queue:
            del self._queues[sequence.queue]
        self.waiting -= 1

    def leave(self, tenant: str) -> None:
        """One of the tenant's requests has left the core."""
        left = self._active[tenant] - 1
        if left:
            self._active[tenant] = left
        else:
            del self._active[tenant]

    def charge(self, tenant: str, tokens: int) -> None:
        self._served[tenant] = self._served.get(tenant, 0.0) + tokens

    def heads(self) -> list[Sequence]:
        """The first of every queue, the one to be served first at the front."""
        return sorted(
            (queue[0] for queue in self._queues.values()), key=lambda head: (self._served[head.tenant], head.arrival)
        )

    def __iter__(self) -> Iterator[Sequence]:
        return (sequence for queue in self._queues.values() for sequence in queue)

    def _forget_idle(self, least: float) -> None:
        """Counters of idle tenants that would be lifted anyway carry nothing: without this they would pile up."""
        for tenant in [t for t, served in self._served.items() if served <= least and t not in self._active]:
            del self._served[tenant]
