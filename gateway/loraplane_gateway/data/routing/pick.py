"""Selection inside the placement set. Pure: no clock, no I/O.

The set is the first k routable replicas of the adapter's rendezvous order, so that an adapter has few
homes and a cold start makes no herd. Inside it residency decides first, but a warm replica loaded above
1.25 times the set's mean loses to a colder one that is not (bounded loads: Mirrokni, Thorup and
Zadimoghaddam 2018).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from loraplane_core.identity import ReplicaId
from loraplane_core.wire.engine import ResidencyClass

LOAD_FACTOR = 1.25
#: Lower is better. `loading` on this replica is nearer than a fetch, and like a file already on its disk.
_COLDNESS: Mapping[ResidencyClass, int] = {"device": 0, "host": 1, "loading": 2, "disk": 2, "absent": 3}


@dataclass(frozen=True, slots=True)
class Candidate:
    """A routable replica as the choice sees it. `in_flight` counts requests of all gateways."""

    replica: ReplicaId
    residency: ResidencyClass
    in_flight: float


def members(order: Sequence[ReplicaId], routable: Mapping[ReplicaId, Candidate], k: int) -> list[Candidate]:
    """The first max(1, k) routable ones along `order`."""
    found = [routable[replica] for replica in order if replica in routable]
    return found[: max(1, k)]


def pick(order: Sequence[ReplicaId], routable: Mapping[ReplicaId, Candidate], k: int) -> Candidate | None:
    """The replica for one more request; None when none is routable."""
    homes = members(order, routable, k)
    if not homes:
        return None
    cap = load_cap([home.in_flight for home in homes])
    within = [home for home in homes if home.in_flight + 1 <= cap] or homes
    # min() keeps the first of equals: ties go along the order, which every gateway shares.
    return min(within, key=lambda home: (_COLDNESS[home.residency], home.in_flight))


def pick_least_loaded(routable: Mapping[ReplicaId, Candidate]) -> Candidate | None:
    """For the base itself, which every replica holds."""
    return min(routable.values(), key=lambda one: (one.in_flight, one.replica), default=None)


def load_cap(loads: Sequence[float]) -> int:
    """Most requests a replica may hold once the new one is counted; never below the mean, so one always fits."""
    return math.ceil(LOAD_FACTOR * (sum(loads) + 1) / len(loads))
