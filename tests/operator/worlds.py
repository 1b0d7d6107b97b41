"""Small worlds for planner tests: build one, change one thing."""

from dataclasses import replace
from typing import Any

from loraplane_core.identity import AdapterRef, PoolRef, ReplicaId
from loraplane_core.labels import ADAPTER_KIND, POOL_KIND
from loraplane_core.wire.engine import Residence
from loraplane_core.wire.registry import Adapter, PoolReport, Version
from loraplane_operator.actions import ObjectRef, WorkloadSpec
from loraplane_operator.plan.rollout import workload_spec
from loraplane_operator.words import (
    AdapterObject,
    BaseLocation,
    Engine,
    Memory,
    Meta,
    PoolObject,
    RegistryView,
    Replica,
    World,
)
from tests.operator.fakes.engine import BASE_DIGEST, CAPACITY

NOW = 1_000_000.0
POOL = PoolRef("default", "pool")


def meta(kind: str, name: str, **changes: Any) -> Meta:
    made = Meta(ObjectRef(kind, "default", name), uid=f"uid-{name}", generation=1, finalized=True, created_at=NOW - 100)
    return replace(made, **changes)


def pool(name: str = "pool", replicas: int = 2, **changes: Any) -> PoolObject:
    made = PoolObject(meta(POOL_KIND, name), base_model="base-a", base_uri="file:base-a", replicas=replicas)
    return replace(made, **changes)


def adapter(name: str = "pirate", **changes: Any) -> AdapterObject:
    made = AdapterObject(
        meta(ADAPTER_KIND, name), tenant="acme", adapter=name, pool=POOL, source_uri=f"file:{name}", source_hash="h1"
    )
    return replace(made, **changes)


def version(name: str = "pirate", number: int = 1, **changes: Any) -> Version:
    fields: dict[str, Any] = {
        "tenant": "acme",
        "adapter": name,
        "version": number,
        "state": "validated",
        "digest": format(number, "x") * 64,
        "bytes": 1000,
        "rank": 8,
        "base_model": "base-a",
        "base_digest": BASE_DIGEST,
        "base_evidence": "artifact",
    }
    return Version(**{**fields, **changes})


def entry(name: str = "pirate", *versions: Version, **changes: Any) -> Adapter:
    fields: dict[str, Any] = {
        "tenant": "acme",
        "adapter": name,
        "pool": str(POOL),
        "claim_uid": f"uid-{name}",
        "claim_ref": f"default/{name}",
        "active_version": 1,
        "versions": list(versions) or [version(name)],
    }
    return Adapter(**{**fields, **changes})


def registry(*adapters: Adapter, **changes: Any) -> RegistryView:
    view = RegistryView(1, {(each.tenant, each.adapter): each for each in adapters}, frozenset({"acme"}))
    return replace(view, **changes)


def residence(ref: str = "acme/pirate@1", **changes: Any) -> Residence:
    number = AdapterRef.parse(ref).version
    fields: dict[str, Any] = {
        "ref": ref,
        "digest": format(number, "x") * 64,
        "residency": "device",
        "warm_wanted": True,
    }
    return Residence(**{**fields, **changes})


def engine(ordinal: int, *residences: Residence, **changes: Any) -> Engine:
    made = Engine(
        replica=ReplicaId(*POOL, ordinal),
        boot=f"boot-{ordinal}",
        base="base-a",
        base_digest=BASE_DIGEST,
        capacity=CAPACITY,
        residences={AdapterRef.parse(each.ref): each for each in residences},
    )
    return replace(made, **changes)


def replica(ordinal: int, **changes: Any) -> Replica:
    made = Replica(
        ReplicaId(*POOL, ordinal),
        ready=True,
        running=True,
        revision=wished().revision,
        address="127.0.0.1",
        admin_port=1,
    )
    return replace(made, **changes)


def wished(of: PoolObject | None = None) -> WorkloadSpec:
    """What the cluster is told about a pool all of whose replicas run with the first credentials."""
    spec = workload_spec(World(NOW, bases={POOL: BaseLocation(path="/m")}), of or pool())
    assert spec is not None
    return spec


def world(**changes: Any) -> World:
    """A pool of two live replicas, reported; one claimed, registered, active adapter; nothing warm yet."""
    obj = adapter()
    memory = Memory(
        reports={POOL: PoolReport(base_model="base-a", replicas=2)},
        registered={(obj.meta.uid, obj.source_hash): version()},
        registered_at={(obj.meta.uid, obj.source_hash): NOW - 50},
        applied={POOL: wished()},
    )
    made = World(
        now=NOW,
        pools={POOL: pool()},
        adapters=(obj,),
        bases={POOL: BaseLocation(path="/m")},
        workloads={POOL: (replica(0), replica(1))},
        engines={each.replica: each for each in (engine(0), engine(1))},
        registry=registry(entry()),
        memory=memory,
    )
    return replace(made, **changes)


def with_engines(*engines: Engine) -> dict[str, Any]:
    return {"engines": {each.replica: each for each in engines}}


def everywhere(*residences: Residence) -> dict[str, Any]:
    return with_engines(engine(0, *residences), engine(1, *residences))
