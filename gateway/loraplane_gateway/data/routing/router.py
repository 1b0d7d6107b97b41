"""The choice of a replica as a lease: waits within a deadline, counts at dispatch, always releases."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Set
from contextlib import AbstractContextManager, asynccontextmanager
from dataclasses import dataclass

from loraplane_core.errors import NoReplica
from loraplane_core.identity import BASE_REFERENCE, ReplicaId
from loraplane_core.placement import order
from loraplane_core.wire.endpoints import Endpoint
from loraplane_core.wire.engine import ResidencyClass
from loraplane_gateway.data.resolve import Target
from loraplane_gateway.data.routing.inflight import InFlight
from loraplane_gateway.data.routing.pick import Candidate, pick, pick_least_loaded
from loraplane_gateway.data.routing.replicas import Fleet, ReplicaView
from loraplane_gateway.data.routing.spread import Spread

#: An engine process: a replica that came back is another one, and may be tried again.
Process = tuple[ReplicaId, str]
#: How long `/state` has to say that a replica that failed a request is lost; after it the same one may be tried again.
FORGIVE_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class Lease:
    endpoint: Endpoint
    boot: str
    residency: ResidencyClass
    on_loss: Callable[[Callable[[], None]], AbstractContextManager[None]]  # ReplicaView.on_loss

    @property
    def process(self) -> Process:
        return self.endpoint.replica, self.boot


class Router:
    def __init__(
        self,
        fleet: Fleet,
        in_flight: InFlight,
        spread: Spread,
        demand: Callable[[str], float],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`demand` estimates how many requests of an adapter all gateways together have in flight."""
        self._fleet = fleet
        self._in_flight = in_flight
        self._spread = spread
        self._demand = demand
        self._clock = clock

    @asynccontextmanager
    async def lease(self, target: Target, avoid: Set[Process], deadline: float) -> AsyncIterator[Lease]:
        """A replica for one request; one of `avoid` only when no other is there and it is still alive.

        Raises NoReplica when none is routable by `deadline`.
        """
        view, residency = await self._wait(target, avoid, deadline)
        with self._in_flight.counted(view.replica, adapter_key(target)):  # no await between choice and count
            yield Lease(view.endpoint, view.boot, residency, view.on_loss)

    async def _wait(self, target: Target, avoid: Set[Process], deadline: float) -> tuple[ReplicaView, ResidencyClass]:
        forgive_at = self._clock() + FORGIVE_SECONDS
        with self._fleet.watching() as changed:
            while True:
                changed.clear()
                now = self._clock()
                if avoid and forgive_at <= now < deadline:
                    avoid = frozenset()
                found = self._choose(target, avoid)
                if found is not None:
                    return found
                if now >= deadline or not self._fleet.replicas_of(target.pools):
                    raise NoReplica(f"No replica of `{target.base_model}` is ready.", retry_after=2)
                wake_at = min(deadline, forgive_at) if avoid else deadline
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(wake_at - now):
                        await changed.wait()

    def _choose(self, target: Target, avoid: Set[Process]) -> tuple[ReplicaView, ResidencyClass] | None:
        views = {
            view.replica: view
            for view in self._fleet.routable(target.pools, target.base_digest)
            if (view.replica, view.boot) not in avoid
        }
        candidates = {replica: self._candidate(view, target) for replica, view in views.items()}
        if target.adapter is None:
            chosen = pick_least_loaded(candidates)
        else:
            places = order(target.tenant, target.adapter.name, self._fleet.replicas_of(target.pools))
            chosen = pick(places, candidates, self._k(target))
        return None if chosen is None else (views[chosen.replica], chosen.residency)

    def _candidate(self, view: ReplicaView, target: Target) -> Candidate:
        residency: ResidencyClass = "device"
        if target.version is not None:
            residency = view.residency_of(target.version.id)
        return Candidate(view.replica, residency, self._in_flight.load(view.replica))

    def _k(self, target: Target) -> int:
        key = adapter_key(target)
        warm = target.adapter.warm_replicas if target.adapter is not None else 1
        return self._spread.k(key, warm, max(self._in_flight.of_adapter(key) + 1, self._demand(key)))


def adapter_key(target: Target) -> str:
    """The key of demand and of counts: without the version, which shares its homes."""
    return f"{target.tenant}/{target.adapter.name}" if target.adapter is not None else BASE_REFERENCE
