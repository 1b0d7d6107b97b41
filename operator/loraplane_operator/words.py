"""The operator's words: what it observes (World), what it remembers (Memory), what it decided (Plan).

Everything here is immutable, so that planning is a pure function of a World.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, Literal

from loraplane_core.identity import AdapterId, AdapterRef, PoolRef, ReplicaId
from loraplane_core.resources.reasons import Reason, reason_for
from loraplane_core.wire.engine import Capacity, ModelInfo, Residence
from loraplane_core.wire.registry import Adapter, PoolReport, Version
from loraplane_operator.actions import Action, ObjectRef, WorkloadSpec

# --- what is wished: objects -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Meta:
    """An object's metadata as far as reconciling needs it. Times are Unix seconds."""

    ref: ObjectRef
    uid: str
    generation: int
    finalized: bool  # carries our finalizer
    created_at: float
    deleting_since: float | None = None


@dataclass(frozen=True, slots=True)
class PoolObject:
    meta: Meta
    base_model: str
    base_uri: str
    replicas: int
    aliases: tuple[str, ...] = ()
    base_digest: str = ""  # the declared one, "" when none is
    engine: tuple[tuple[str, str], ...] = ()  # loraplane-engine's long options without dashes
    max_rank: int = 64
    allowed_tenants: tuple[str, ...] = ()
    allowed_namespaces: tuple[str, ...] = ()
    #: As in WorkloadSpec; "" and () where the pool leaves it to the site.
    image: str = ""
    resources: tuple[tuple[str, str, str], ...] = ()
    pod_template: str = ""
    epoch: int | None = 1  # of credentials, as wished; None where the wish cannot be read
    status: Mapping[str, Any] = field(default_factory=dict)

    @property
    def ref(self) -> PoolRef:
        return PoolRef(self.meta.ref.namespace, self.meta.ref.name)

    @property
    def replica_ids(self) -> list[ReplicaId]:
        return list(_replica_ids(self.ref, self.replicas))


@lru_cache(maxsize=256)  # asked for every adapter in every pass
def _replica_ids(pool: PoolRef, replicas: int) -> tuple[ReplicaId, ...]:
    return tuple(ReplicaId(*pool, ordinal) for ordinal in range(replicas))


@dataclass(frozen=True, slots=True)
class AdapterObject:
    meta: Meta
    tenant: str
    adapter: str
    pool: PoolRef
    source_uri: str
    source_hash: str
    source_digest: str | None = None
    active_version: int | None = None
    warm_replicas: int = 1
    pinned: bool = False
    deletion_policy: Literal["retain", "delete"] = "retain"
    #: Several versions and their percents, by version; () where one or none is asked for.
    traffic: tuple[tuple[int, int], ...] = ()
    status: Mapping[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> "AdapterKey":
        return (self.tenant, self.adapter)

    @property
    def owns_activation(self) -> bool:
        return self.active_version is not None or bool(self.traffic)

    @property
    def wanted_shares(self) -> dict[int, int]:
        """Percent by version as the object asks; {} where it leaves activation to the registry."""
        if self.active_version is not None:
            return {self.active_version: 100}
        return dict(self.traffic)


AdapterKey = tuple[str, str]  # tenant, adapter

# --- what is: workloads, engines, registry -----------------------------------------------------


@dataclass(frozen=True, slots=True)
class Replica:
    """One replica as the cluster reports it. An address is known once it runs, ready or not."""

    id: ReplicaId
    ready: bool
    running: bool
    revision: str
    address: str = ""
    admin_port: int = 0
    restarts: int = 0
    message: str = ""
    terminating: bool = False  # told to stop; it finishes what it has
    epoch: int = 1  # of the credentials it was started with; it accepts the one before, too


@dataclass(frozen=True, slots=True)
class Engine:
    """One engine's own words, from a live /state stream (an engine without one is not in the World)."""

    replica: ReplicaId
    boot: str
    base: str
    base_digest: str
    capacity: Capacity
    residences: Mapping[AdapterRef, Residence]
    model: ModelInfo | None = None


@dataclass(frozen=True, slots=True)
class RegistryView:
    """The change feed, folded. `live` is False while the stream is down: the view is then old, not wrong."""

    cursor: int
    adapters: Mapping[AdapterKey, Adapter]
    tenants: frozenset[str]
    withdrawn: frozenset[AdapterRef] = frozenset()  # versions the feed took away
    live: bool = True


@dataclass(frozen=True, slots=True)
class BaseLocation:
    """Where a pool's base lies for its engines, or why it cannot be used."""

    path: str = ""
    reason: str = ""
    message: str = ""


@dataclass(frozen=True, slots=True)
class Failure:
    code: str
    message: str
    attempts: int
    retry_at: float

    @property
    def reason(self) -> Reason:
        return reason_for(self.code)


@dataclass(frozen=True, slots=True)
class Residue:
    """Something on an engine that nobody wishes there, and what the operator makes of it."""

    replica: ReplicaId
    boot: str
    id: AdapterId
    known: bool  # the registry still has the version


#: Something that takes its time, and has a bound: a replica that is to go down waits for its adapters to be warm
#: elsewhere, or one becomes ready; an object, by uid, is being deleted. By this process's own clock: that of the API
#: server, which dates deletions, may be another.
Wait = tuple[Literal["leave", "start"], ReplicaId] | tuple[Literal["delete"], str]


@dataclass(frozen=True)
class Memory:
    """What answers taught the operator. Nothing here is truth: a restart loses it and learns it again."""

    reports: Mapping[PoolRef, PoolReport | None] = field(default_factory=dict)  # None: taken back
    registered: Mapping[tuple[str, str], Version] = field(default_factory=dict)  # (object uid, source hash)
    registered_at: Mapping[tuple[str, str], float] = field(default_factory=dict)
    claims: frozenset[str] = frozenset()  # uids claimed or released, that the feed has not shown yet
    released: frozenset[str] = frozenset()
    models: Mapping[str, ModelInfo] = field(default_factory=dict)  # of bases, by uid of the pool
    #: Seen warm by our wish, and on which boot of the engine; kept when the engine loses it.
    warmed: Mapping[tuple[ReplicaId, AdapterId], str] = field(default_factory=dict)
    #: When one of those was first seen missing; kept until it is warm again and that was told.
    lost_since: Mapping[tuple[ReplicaId, AdapterId], float] = field(default_factory=dict)
    failures: Mapping[Action, Failure] = field(default_factory=dict)
    residue_since: Mapping[Residue, float] = field(default_factory=dict)
    status_written: Mapping[str, float] = field(default_factory=dict)  # object uid
    #: What the cluster was last told; unknown after a start of the operator, so it is told again.
    applied: Mapping[PoolRef, WorkloadSpec] = field(default_factory=dict)
    waits: Mapping[Wait, float] = field(default_factory=dict)  # since when

    @cached_property
    def source_hashes(self) -> Mapping[str, frozenset[str]]:
        """Of what each object was registered as."""
        found: dict[str, set[str]] = {}
        for uid, source_hash in self.registered:
            found.setdefault(uid, set()).add(source_hash)
        return {uid: frozenset(hashes) for uid, hashes in found.items()}


@dataclass(frozen=True)
class World:
    """All that a plan depends on. `workloads` None: the cluster has not told yet; `registry` likewise."""

    now: float
    pools: Mapping[PoolRef, PoolObject] = field(default_factory=dict)
    adapters: tuple[AdapterObject, ...] = ()
    bases: Mapping[PoolRef, BaseLocation] = field(default_factory=dict)
    workloads: Mapping[PoolRef, tuple[Replica, ...]] | None = None
    engines: Mapping[ReplicaId, Engine] = field(default_factory=dict)
    registry: RegistryView | None = None
    memory: Memory = field(default_factory=Memory)
    unreadable: Mapping[ObjectRef, str] = field(default_factory=dict)  # objects that exist, by uid, but not as words
    namespaces: frozenset[str] | None = None  # the ones observed; None = all
    pool_namespaces: frozenset[str] | None = None  # those of them where pools are honoured; None = all
    artifacts_url: str = ""
    suspects: frozenset[PoolRef] = frozenset()  # pools of whose workload somebody else may have changed a part

    def failure(self, action: Action) -> Failure | None:
        return self.memory.failures.get(action)

    def honours(self, pool: PoolRef) -> bool:
        return self.pool_namespaces is None or pool.namespace in self.pool_namespaces

    def watched(self, namespace: str) -> bool:
        return self.namespaces is None or namespace in self.namespaces


@dataclass(frozen=True)
class Plan:
    """`due_at`: when something that is held back now becomes due, so that the loop wakes for it."""

    actions: tuple[Action, ...] = ()
    residues: frozenset[Residue] = frozenset()
    #: Wished, warm once and not any more, or warm again and not told yet.
    lost: frozenset[tuple[ReplicaId, AdapterId]] = frozenset()
    waits: frozenset[Wait] = frozenset()  # under way now
    due_at: float | None = None
    #: Objects whose planning broke; the others' plans stand.
    broken: tuple[tuple[ObjectRef, Exception], ...] = ()
