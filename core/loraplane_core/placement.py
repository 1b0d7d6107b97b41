"""Where an adapter belongs: one pure order that the operator and every gateway compute alike.

Rendezvous (highest random weight) hashing, Thaler and Ravishankar 1998: each replica gets a score from
a hash of (adapter, replica), replicas are taken in descending score. Adding or removing a replica moves
only the adapters that it gains or loses. The version is not in the key, so a new version lands where
the old one is warm.
"""

import hashlib
from collections.abc import Iterable
from functools import lru_cache

from loraplane_core.identity import ReplicaId


def order(tenant: str, adapter: str, replicas: Iterable[ReplicaId]) -> list[ReplicaId]:
    """All `replicas`, best first; independent of the order given."""
    return list(_order(f"{tenant}/{adapter}", tuple(replicas)))


@lru_cache(maxsize=4096)  # asked for every adapter in every pass of the operator, with the same answer
def _order(key: str, replicas: tuple[ReplicaId, ...]) -> tuple[ReplicaId, ...]:
    return tuple(sorted(replicas, key=lambda replica: (_score(key, replica), replica), reverse=True))


def _score(key: str, replica: ReplicaId) -> bytes:
    return hashlib.blake2b(f"{key}\n{replica}".encode(), digest_size=8).digest()
