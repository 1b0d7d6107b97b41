"""The mutable side of Memory: what answers taught, kept between passes and pruned by what the feed shows."""

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from loraplane_core.identity import AdapterId, PoolRef, ReplicaId
from loraplane_core.wire.engine import WARM, ModelInfo
from loraplane_core.wire.registry import PoolReport, Version
from loraplane_operator.actions import Action, ActivateVersion, ClaimAdapter, Register, WorkloadSpec
from loraplane_operator.lanes import gate
from loraplane_operator.plan.bases import told_digest
from loraplane_operator.words import Engine, Failure, Memory, Plan, PoolObject, RegistryView, Residue, Wait


class Notebook:
    def __init__(self) -> None:
        self.reports: dict[PoolRef, PoolReport | None] = {}
        self.registered: dict[tuple[str, str], Version] = {}
        self.registered_at: dict[tuple[str, str], float] = {}
        self.claims: set[str] = set()
        self.released: set[str] = set()
        self.models: dict[str, ModelInfo] = {}
        self.warmed: dict[tuple[ReplicaId, AdapterId], str] = {}
        self.lost_since: dict[tuple[ReplicaId, AdapterId], float] = {}
        self.failures: dict[Action, Failure] = {}
        self.residue_since: dict[Residue, float] = {}
        self.status_written: dict[str, float] = {}
        #: What was taken over already; engines that tell nothing new cost nothing.
        self._heard: dict[ReplicaId, Engine] = {}
        self.applied: dict[PoolRef, WorkloadSpec] = {}
        self.waits: dict[Wait, float] = {}

    def view(self) -> Memory:
        return Memory(
            reports=dict(self.reports),
            registered=dict(self.registered),
            registered_at=dict(self.registered_at),
            claims=frozenset(self.claims),
            released=frozenset(self.released),
            models=dict(self.models),
            warmed=dict(self.warmed),
            lost_since=dict(self.lost_since),
            failures=dict(self.failures),
            residue_since=dict(self.residue_since),
            status_written=dict(self.status_written),
            applied=dict(self.applied),
            waits=dict(self.waits),
        )

    def registered_as(self, uid: str, source_hash: str, version: Version, now: float) -> None:
        """An object has one source; what it named before is forgotten, so that a return to it is told."""
        for key in [key for key in self.registered if key[0] == uid]:
            del self.registered[key], self.registered_at[key]
        self.registered[uid, source_hash], self.registered_at[uid, source_hash] = version, now

    def reconnected(self) -> None:
        """A new feed: the registry may be another one, or may have lost its latest writes. What failed while it was
        away is asked for now, not when a back-off ends that grew with the absence."""
        self.reports.clear()
        self.claims.clear()
        self.released.clear()
        self.failures = {action: failure for action, failure in self.failures.items() if gate(action) != "registry"}

    def tenant_changed(self, tenant: str) -> None:
        """What was refused for this tenant may be allowed now; do not wait for the back-off."""
        for action in list(self.failures):
            if isinstance(action, ClaimAdapter | Register | ActivateVersion) and action.tenant == tenant:
                del self.failures[action]

    def learn(
        self,
        engines: Iterable[Engine],
        uids: frozenset[str],
        registry: RegistryView | None,
        pools: Mapping[PoolRef, PoolObject] = MappingProxyType({}),
    ) -> None:
        """Take over what engines told; drop what the feed has overtaken and objects that are gone (not in `uids`)."""
        heard = {engine.replica: engine for engine in engines}
        for replica, engine in heard.items():
            if self._heard.get(replica) is not engine:
                self._hear(engine)
            if (pool := pools.get(replica.pool_ref)) is not None:
                self._meet(pool, engine)
        self._heard = heard
        for uid in self.models.keys() - uids:
            del self.models[uid]
        for key in [key for key in self.registered if key[0] not in uids]:
            del self.registered[key], self.registered_at[key]
        for uid in self.status_written.keys() - uids:
            del self.status_written[uid]
        if registry is not None:
            shown = {entry.claim_uid for entry in registry.adapters.values()}
            self.claims -= shown
            self.released &= shown

    def _hear(self, engine: Engine) -> None:
        for ref, residence in engine.residences.items():
            if residence.residency in WARM and residence.warm_wanted:
                self.warmed[engine.replica, AdapterId(*ref, residence.digest)] = engine.boot

    def _meet(self, pool: PoolObject, engine: Engine) -> None:
        """The first engine tells what the pool's base is. One that differs from it, or from what the pool says, is
        wrong, and changes nothing for the others; so is one of a former pool of that name."""
        model = engine.model
        if model is None or pool.meta.uid in self.models or engine.base != pool.base_model:
            return
        if model.base_digest == engine.base_digest and told_digest(pool) in ("", model.base_digest):
            self.models[pool.meta.uid] = model

    def let_go(self, replica: ReplicaId, id_: AdapterId) -> None:
        """By our own doing it is no longer warm there; its absence is no drift."""
        self.warmed.pop((replica, id_), None)

    def planned(self, plan: Plan, now: float) -> None:
        """Failures of what is no longer planned are forgotten; what residues and losses there are, keeps its age."""
        planned = set(plan.actions)
        self.failures = {action: failure for action, failure in self.failures.items() if action in planned}
        self.residue_since = {residue: self.residue_since.get(residue, now) for residue in plan.residues}
        self.lost_since = {lost: self.lost_since.get(lost, now) for lost in plan.lost}
        self.waits = {wait: self.waits.get(wait, now) for wait in plan.waits}
