"""What a pool's base is known to be, and so which of its replicas may answer for it."""

from loraplane_core.wire.engine import ModelInfo
from loraplane_operator.words import PoolObject, Replica, World


def model_of(world: World, pool: PoolObject) -> ModelInfo | None:
    """What an engine of this very pool told of its base; None until one has."""
    return world.memory.models.get(pool.meta.uid)


def base_digest_of(world: World, pool: PoolObject) -> str:
    """Declared, else learnt from the first engine that told, also by an operator before this one; "" while unknown."""
    model = model_of(world, pool)
    return told_digest(pool) or (model.base_digest if model else "")


def told_digest(pool: PoolObject) -> str:
    """By the pool itself. A pool's base never changes, so that what it was found to be once, it is."""
    return pool.base_digest or str(pool.status.get("baseDigest") or "")


def serves(world: World, replica: Replica) -> bool:
    """Whether gateways send requests to it, as far as the operator can see."""
    engine, pool = world.engines.get(replica.id), world.pools.get(replica.id.pool_ref)
    expected = base_digest_of(world, pool) if pool is not None else ""
    return replica.ready and engine is not None and expected in ("", engine.base_digest)
