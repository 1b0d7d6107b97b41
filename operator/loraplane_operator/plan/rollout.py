"""Which replicas of a pool count for placement now, while some of them leave or are being replaced."""

from loraplane_core.identity import ReplicaId
from loraplane_operator.words import PoolObject, World


def placement_ids(world: World, pool: PoolObject) -> list[ReplicaId]:
    """The replicas over which adapters are placed; a wish for warmth counts in this order's first ones."""
    return pool.replica_ids
