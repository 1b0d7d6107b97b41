"""`model` → what is asked for. Pure over one snapshot; the list of models uses the same predicate (G13).

Order (design §3): an exact base name or alias; `[tenant/]adapter[@version]`; `base:` + that.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from loraplane_core.errors import BaseModelMismatch, LoraplaneError, ModelNotFound, NoReplica
from loraplane_core.identity import PoolRef, parse_model
from loraplane_gateway.data.traffic import pick_version
from loraplane_gateway.db.serving import ActiveVersion, Pool, ServedAdapter, Snapshot

LISTED_OWNER = "loraplane"


@dataclass(frozen=True, slots=True)
class Target:
    """What a request is for, and which pools may serve it. All of `pools` hold the base `base_digest`."""

    tenant: str
    pools: tuple[PoolRef, ...]
    base_model: str
    base_digest: str
    adapter: ServedAdapter | None = None  # None: the base itself
    version: ActiveVersion | None = None


@dataclass(frozen=True, slots=True)
class ListedModel:
    id: str
    created: int
    owned_by: str
    parent: str | None


def resolve(snapshot: Snapshot, tenant: str, model: str, key: str) -> Target:
    """`key` decides between several weighted versions (data.traffic).

    Raises ModelNotFound (one body for foreign, unknown and inactive), BaseModelMismatch, NoReplica."""
    base = _base(snapshot, tenant, model)
    if base is not None:
        return base
    name = parse_model(model)
    if name is None or name.tenant not in (None, tenant):
        raise ModelNotFound(model)
    adapter = snapshot.adapters.get((tenant, name.adapter))
    if adapter is None:
        raise ModelNotFound(model)
    version = _version(adapter, name.version, key)
    if version is None:
        raise ModelNotFound(model)
    pool = snapshot.pools.get(adapter.pool)
    if pool is not None and not pool.allows(tenant):
        raise ModelNotFound(model)
    if pool is None or not pool.base_digest:
        raise NoReplica(f"No pool serves `{model}` yet.", retry_after=2)
    if name.base is not None and not pool.is_called(name.base):
        raise BaseModelMismatch(
            f"`{name.adapter}` was trained for the base `{pool.base_model}`, not for `{name.base}`.", param="model"
        )
    if version.base_digest != pool.base_digest:
        raise BaseModelMismatch(
            f"`{version.id.ref}` was trained for the base {version.base_digest[:12]}, but its pool {pool.ref} "
            f"holds {pool.base_digest[:12]}.",
            param="model",
        )
    return Target(tenant, (pool.ref,), pool.base_model, pool.base_digest, adapter, version)


def list_models(snapshot: Snapshot, tenant: str) -> list[ListedModel]:
    """Exactly what `resolve` would accept by its plain name: bases and their aliases, then adapters, each by name."""
    usable = [pool for pool in snapshot.pools.values() if _may_use(pool, tenant)]
    bases = sorted({name for pool in usable for name in (pool.base_model, *pool.aliases)})
    found = [ListedModel(base, 0, LISTED_OWNER, None) for base in bases]
    return found + sorted(_listed_adapters(snapshot, tenant), key=lambda model: model.id)


def _listed_adapters(snapshot: Snapshot, tenant: str) -> Iterator[ListedModel]:
    for owner, name in snapshot.adapters:
        if owner != tenant:
            continue
        try:
            target = resolve(snapshot, tenant, name, key="")  # whichever version: only its name is shown
        except LoraplaneError:
            continue
        if target.adapter is not None:  # a base of that name wins
            yield ListedModel(name, target.adapter.created, tenant, target.base_model)


def _may_use(pool: Pool, tenant: str) -> bool:
    return bool(pool.base_digest) and pool.allows(tenant)


def _base(snapshot: Snapshot, tenant: str, model: str) -> Target | None:
    pools = sorted(
        (pool for pool in snapshot.pools.values() if pool.is_called(model) and _may_use(pool, tenant)),
        # A pool of the tenant's own goes first; the name decides among equals, so that all gateways agree.
        key=lambda pool: (not pool.allowed_tenants, pool.ref),
    )
    if not pools:
        return None
    first = pools[0]
    same = tuple(pool.ref for pool in pools if pool.base_digest == first.base_digest)
    return Target(tenant, same, first.base_model, first.base_digest)


def _version(adapter: ServedAdapter, wanted: int | None, key: str) -> ActiveVersion | None:
    if wanted is None:
        return pick_version(adapter.tenant, adapter.name, adapter.versions, key)
    return next((version for version in adapter.versions if version.id.version == wanted), None)
