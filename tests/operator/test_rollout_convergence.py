"""A pool that is changed reaches what it wishes, one replica at a time, and no warm adapter is without a home
on the way: a simulated cluster carries out what is planned, in any order, with engines that take their time."""

import random
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loraplane_core import placement
from loraplane_core.identity import ReplicaId
from loraplane_core.wire.engine import Residence
from loraplane_core.wire.registry import Adapter
from loraplane_operator.actions import (
    Action,
    ApplyWorkload,
    Mark,
    ReportPool,
    RestartReplica,
    SetStatus,
    Warm,
    WorkloadSpec,
)
from loraplane_operator.plan import plan
from loraplane_operator.plan.departures import LEAVE_SECONDS
from loraplane_operator.plan.rollout import workload_spec
from loraplane_operator.words import Engine, Memory, PoolObject, Replica, World
from tests.operator.worlds import NOW, POOL, engine, entry, pool, registry, replica, wished, world

NAMES = tuple(f"a{number}" for number in range(4))


@dataclass
class Pods:
    """A StatefulSet and its engines. A replaced or new replica becomes ready at the next `settle`."""

    pool: PoolObject
    entries: tuple[Adapter, ...]
    replicas: dict[int, Replica]
    engines: dict[ReplicaId, Engine]
    memory: Memory = field(default_factory=Memory)
    now: float = NOW
    cold: set[str] = field(default_factory=set)  # adapters that no engine manages to load
    broken: set[str] = field(default_factory=set)  # revisions whose engines never become ready
    history: list[int] = field(default_factory=list)  # ordinals in the order in which they went down
    boots: int = 0

    def world(self) -> World:
        return world(
            now=self.now,
            pools={POOL: self.pool},
            adapters=(),
            workloads={POOL: tuple(self.replicas[ordinal] for ordinal in sorted(self.replicas))},
            engines=self.engines,
            registry=registry(*self.entries),
            memory=self.memory,
        )

    def do(self, action: Action) -> None:
        match action:
            case ApplyWorkload(spec=spec):
                self.memory = replace(self.memory, applied={POOL: spec})
                for ordinal in [each for each in self.replicas if each >= spec.replicas]:
                    self._down(ordinal)
                    del self.replicas[ordinal]
                for ordinal in range(spec.replicas):
                    if ordinal not in self.replicas:
                        self._start(ordinal, spec)
            case RestartReplica(spec=spec, ordinal=ordinal):
                self._down(ordinal)
                self._start(ordinal, spec)
            case ReportPool(report=report):
                self.memory = replace(self.memory, reports={POOL: report})
            case SetStatus(status=status):
                self.pool = replace(self.pool, status=status)
            case Warm(replica=id_, id=adapter):
                if adapter.adapter not in self.cold:
                    self._hold(id_, str(adapter.ref), adapter.digest, marked=True)
            case Mark(replica=id_, id=adapter, warm=marked):
                self._hold(id_, str(adapter.ref), adapter.digest, marked=marked)
            case _:
                raise AssertionError(f"unexpected {action}")

    def _down(self, ordinal: int) -> None:
        if self.replicas[ordinal].ready:
            self.history.append(ordinal)
        self.engines.pop(self.replicas[ordinal].id, None)

    def _start(self, ordinal: int, spec: WorkloadSpec) -> None:
        self.replicas[ordinal] = replica(ordinal, ready=False, revision=spec.revision, epoch=spec.epoch)

    def _hold(self, id_: ReplicaId, ref: str, digest: str, *, marked: bool) -> None:
        known = self.engines[id_]
        made = Residence(ref=ref, digest=digest, residency="host", bytes=1000, warm_wanted=marked)
        key = next(iter(engine(0, made).residences))
        self.engines[id_] = replace(known, residences={**known.residences, key: made})

    def settle(self) -> bool:
        """Engines that were starting are ready; True when there were any."""
        started = [each for each in self.replicas.values() if not each.ready and each.revision not in self.broken]
        for each in started:
            self.boots += 1
            self.replicas[each.id.ordinal] = replace(each, ready=True)
            self.engines[each.id] = engine(each.id.ordinal, boot=f"new-{self.boots}")
        return bool(started)

    def run(self, order: random.Random, check: Any = lambda: None) -> None:
        for _ in range(600):
            planned = plan(self.world())
            assert not planned.broken
            waits = {wait: self.memory.waits.get(wait, self.now) for wait in planned.waits}
            since = {each: self.memory.residue_since.get(each, self.now) for each in planned.residues}
            self.memory = replace(self.memory, waits=waits, residue_since=since)
            actions = sorted((each for each in set(planned.actions) if not self._futile(each)), key=repr)
            if actions and (order.random() < 0.8 or not self.settle()):
                for action in order.sample(actions, order.randint(1, len(actions))):
                    self.do(action)
                    check()
            elif self.settle():
                pass
            elif planned.due_at is not None and self.now < NOW + 3600:
                self.now = max(self.now, planned.due_at)
            else:
                return
            check()
        raise AssertionError(f"still busy: {plan(self.world()).actions}")

    def _futile(self, action: Action) -> bool:
        return isinstance(action, Warm) and action.id.adapter in self.cold

    def warm_on(self, name: str) -> set[int]:
        return {
            id_.ordinal
            for id_, each in self.engines.items()
            for ref in each.residences
            if ref.adapter == name and self.replicas[id_.ordinal].ready
        }


def settled(replicas: int, warm: int = 1) -> Pods:
    """A pool at rest, every adapter warm on its homes."""
    return deepcopy(_settled(replicas, warm))


@cache
def _settled(replicas: int, warm: int) -> Pods:
    entries = tuple(entry(name, claim_uid="", claim_ref="", warm_replicas=warm) for name in NAMES)
    of = pool(replicas=replicas)
    pods = Pods(of, entries, {n: replica(n) for n in range(replicas)}, {})
    pods.engines = {each.id: engine(each.id.ordinal) for each in pods.replicas.values()}
    pods.memory = replace(Memory(), applied={POOL: wished(of)})
    pods.run(random.Random(0))
    assert not pods.history
    return pods


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 4), st.integers(1, 2), st.integers(2, 5), st.booleans(), st.integers(0, 1 << 30))
def test_no_warm_adapter_is_without_a_home_while_a_pool_changes(
    before: int, warm: int, after: int, changed: bool, seed: int
) -> None:
    pods = settled(before, warm)
    pods.pool = replace(pods.pool, replicas=after, image="other" if changed else "")

    def check() -> None:
        down = [each for each in pods.replicas.values() if not each.ready and each.id.ordinal < before]
        assert len(down) <= 1, "more than one replica is down by our doing"
        for name in NAMES:
            assert pods.warm_on(name), f"{name} is warm nowhere"

    pods.run(random.Random(seed), check)
    assert sorted(pods.replicas) == list(range(after))
    assert {each.revision for each in pods.replicas.values()} == {wished(pods.pool).revision}
    for name in NAMES:
        homes = placement.order("acme", name, pods.pool.replica_ids)[:warm]
        assert {home.ordinal for home in homes} <= pods.warm_on(name)
    assert not plan(pods.world()).actions


@settings(max_examples=15, deadline=None)
@given(st.integers(2, 4), st.integers(0, 1 << 30))
def test_a_gateway_finds_every_adapter_warm_where_it_looks_first(replicas: int, seed: int) -> None:
    """The first that serves in placement order, but for the moment in which a fresh replica is filled again."""
    pods = settled(replicas)
    pods.pool = replace(pods.pool, image="other")

    def check() -> None:
        for name in NAMES:
            serving = [id_ for id_ in placement.order("acme", name, pods.pool.replica_ids) if id_ in pods.engines]
            fresh = serving[0].ordinal in pods.history
            assert fresh or serving[0].ordinal in pods.warm_on(name)

    pods.run(random.Random(seed), check)


def test_an_adapter_that_cannot_be_warmed_holds_a_rollout_up_for_a_while_only() -> None:
    pods = settled(3)
    pods.cold = {NAMES[0]}
    pods.pool = replace(pods.pool, image="other")
    pods.run(random.Random(1))
    assert pods.history == [0, 1, 2]
    assert pods.now >= NOW + LEAVE_SECONDS
    assert pods.now < NOW + 10 * LEAVE_SECONDS


def test_a_replacement_that_does_not_become_ready_stops_the_rollout() -> None:
    pods = settled(3)
    pods.pool = replace(pods.pool, image="bad")
    pods.broken = {wished(pods.pool).revision}
    pods.run(random.Random(1))
    assert pods.history == [0]
    (degraded,) = [each for each in pods.pool.status["conditions"] if each["type"] == "Degraded"]
    assert (degraded["status"], degraded["reason"]) == ("True", "RolloutStalled")
    pods.pool = replace(pods.pool, image="")
    pods.broken = set()
    pods.run(random.Random(1))
    assert pods.history == [0]  # what still ran needed no replacement
    assert all(each.ready for each in pods.replicas.values())


@pytest.mark.parametrize(("first", "last"), [(1, 4), (4, 1)])
def test_epochs_pass_one_by_one_and_all_engines_always_accept_a_common_one(first: int, last: int) -> None:
    pods = settled(3)
    pods.replicas = {n: replace(each, epoch=first) for n, each in pods.replicas.items()}
    pods.pool = replace(pods.pool, epoch=first)
    pods.run(random.Random(1))
    pods.pool = replace(pods.pool, epoch=last)

    def check() -> None:
        epochs = {each.epoch for each in pods.replicas.values()}
        assert max(epochs) - min(epochs) <= 1
        told = pods.memory.applied[POOL].accepted_epoch
        assert all(told in (epoch, epoch - 1) for epoch in epochs)

    pods.run(random.Random(1), check)
    assert {each.epoch for each in pods.replicas.values()} == {last}
    assert pods.memory.applied[POOL].accepted_epoch == last
    report = pods.memory.reports[POOL]
    assert report is not None
    assert report.credential_epoch == last


@pytest.mark.parametrize("others", [(), (replica(1, epoch=2),)])
def test_pod_that_is_on_its_way_gets_the_epoch_it_was_promised_and_not_the_next(others: tuple[Replica, ...]) -> None:
    """Between the old pod's end and the new one's start nobody is left of the old epoch. The next epoch then would
    find the pod made of the last, and replace it as soon as it is there."""
    coming = Replica(ReplicaId(*POOL, 0), ready=False, running=False, revision="", epoch=2)
    seen = world(pools={POOL: pool(epoch=3)}, workloads={POOL: (coming, *others)}, engines={})
    spec = workload_spec(seen, seen.pools[POOL])
    assert spec is not None
    assert (spec.epoch, spec.accepted_epoch) == (2, 2)
    there = replace(seen, workloads={POOL: (replica(0, epoch=2), *others)})
    spec = workload_spec(there, there.pools[POOL])
    assert spec is not None
    assert spec.epoch == 3


@settings(max_examples=15, deadline=None)
@given(st.integers(2, 4), st.integers(0, 1 << 30))
def test_plans_of_a_pool_do_not_depend_on_the_order_of_what_is_seen(replicas: int, seed: int) -> None:
    pods = settled(replicas)
    pods.pool = replace(pods.pool, image="other")
    seen = pods.world()
    shuffled = list(seen.engines.items())
    random.Random(seed).shuffle(shuffled)
    again = replace(seen, engines=dict(shuffled))
    assert set(plan(seen).actions) == set(plan(again).actions)
