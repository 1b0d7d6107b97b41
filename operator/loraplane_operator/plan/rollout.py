"""What a pool's engines shall run as, and which of its replicas goes down next by our doing (OnDelete, one at a time).

Credentials rotate by epochs: an engine accepts the epoch it was started with and the one before. So all replicas
are brought to one epoch before the next, and whoever speaks to them uses the oldest that one of them runs.
"""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import replace

from loraplane_core.identity import ReplicaId
from loraplane_operator.actions import WorkloadSpec
from loraplane_operator.words import PoolObject, Replica, World


def placement_ids(world: World, pool: PoolObject) -> list[ReplicaId]:
    """The replicas over which adapters are placed; a wish for warmth counts in this order's first ones.

    One that shall leave for good is out of it at once, so that its adapters have their next homes before it
    goes. One that restarts, or is not there yet, stays in: its adapters come back to it, and meanwhile
    `departures.with_extra_homes` keeps them warm on the next in order, where gateways look then.
    """
    return pool.replica_ids


def next_down(world: World, pool: PoolObject) -> Replica | None:
    """The one that goes down next, maybe after a wait; None while none may, or none need.

    First the surplus, from the last on. Then who is broken and of an old revision: it serves nobody. Then the
    others of an old revision, but only while all are ready: a replacement that fails stops the rollout.
    """
    running = (world.workloads or {}).get(pool.ref, ())
    if pool.meta.deleting_since is not None or not running:
        return None
    surplus = [replica for replica in running if replica.id.ordinal >= pool.replicas]
    if surplus:
        return max(surplus, key=lambda replica: replica.id)
    spec = workload_spec(world, pool)
    old = outdated(running, spec) if spec else []
    broken = [replica for replica in old if not replica.ready]
    if not broken and any(not replica.ready for replica in running):
        return None
    return min(broken or old, key=lambda replica: replica.id, default=None)


def outdated(running: Iterable[Replica], spec: WorkloadSpec) -> list[Replica]:
    """Those that have to be replaced. One that is being replaced, or does not exist yet, starts as wished by itself."""
    return [each for each in running if each.revision not in ("", spec.revision) and not each.terminating]


def workload_spec(world: World, pool: PoolObject) -> WorkloadSpec | None:
    """With as many replicas as the pool wishes. None while the base's location is unknown or unusable."""
    base = world.bases.get(pool.ref)
    if base is None or base.reason:
        return None
    options = {**dict(pool.engine), "model": base.path, "artifacts-url": world.artifacts_url}
    engine = tuple(sorted((name, value) for name, value in options.items() if value))
    epoch, accepted = _epochs(world, pool)
    made_of = [engine, epoch, pool.image, pool.resources, pool.pod_template]
    revision = hashlib.sha256(json.dumps(made_of, separators=(",", ":")).encode()).hexdigest()[:12]
    return WorkloadSpec(
        pool=pool.ref,
        uid=pool.meta.uid,
        replicas=pool.replicas,
        engine=engine,
        epoch=epoch,
        revision=revision,
        image=pool.image,
        resources=pool.resources,
        pod_template=pool.pod_template,
        accepted_epoch=accepted,
    )


def sized(spec: WorkloadSpec, replicas: int) -> WorkloadSpec:
    return replace(spec, replicas=replicas)


def _epochs(world: World, pool: PoolObject) -> tuple[int, int]:
    """(of engines that start from now on, the one that all accept)."""
    known, coming = _running_epochs(world, pool), _coming_epochs(world, pool)
    if coming:  # it starts with what it was promised; another epoch now would have it replaced as soon as it is there
        return min(coming), min(known | coming)
    if not known:
        return pool.epoch or 1, pool.epoch or 1
    oldest, newest = min(known), max(known)
    wished = oldest if pool.epoch is None else pool.epoch
    epoch = max(newest - 1, min(oldest + 1, wished), 1)
    return epoch, min(oldest, epoch)


def report_epoch(world: World, pool: PoolObject) -> int:
    """The registry takes this and the one before from engines that fetch; so it is told before an engine uses it."""
    return max([*_running_epochs(world, pool), _epochs(world, pool)[0]])


def _running_epochs(world: World, pool: PoolObject) -> set[int]:
    return {replica.epoch for replica in (world.workloads or {}).get(pool.ref, ()) if replica.revision}


def _coming_epochs(world: World, pool: PoolObject) -> set[int]:
    """Of replicas that are wished and not there yet."""
    return {replica.epoch for replica in (world.workloads or {}).get(pool.ref, ()) if not replica.revision}
