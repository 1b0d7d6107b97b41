"""The rendezvous order: the same everywhere, balanced, and moved as little as possible."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from loraplane_core.identity import ReplicaId
from loraplane_core.placement import order

names = st.from_regex(r"[a-z0-9]{1,8}", fullmatch=True)
replicas = st.lists(st.builds(ReplicaId, names, names, st.integers(0, 20)), min_size=1, max_size=12, unique=True)


def _pool(count: int) -> list[ReplicaId]:
    return [ReplicaId("default", "smol", ordinal) for ordinal in range(count)]


@given(data=st.data(), tenant=names, adapter=names, found=replicas)
def test_the_order_given_does_not_matter(
    data: st.DataObject, tenant: str, adapter: str, found: list[ReplicaId]
) -> None:
    shuffled = data.draw(st.permutations(found))
    ordered = order(tenant, adapter, found)
    assert order(tenant, adapter, shuffled) == ordered
    assert sorted(ordered) == sorted(found)


@given(tenant=names, adapter=names, found=replicas, index=st.integers(0, 11))
def test_a_replica_that_leaves_changes_nothing_between_the_others(
    tenant: str, adapter: str, found: list[ReplicaId], index: int
) -> None:
    gone = found[index % len(found)]
    before = [replica for replica in order(tenant, adapter, found) if replica != gone]
    assert order(tenant, adapter, [replica for replica in found if replica != gone]) == before


def test_a_new_replica_takes_its_share_and_moves_nothing_else() -> None:
    adapters = [f"a{number}" for number in range(2000)]
    before = {adapter: order("acme", adapter, _pool(4))[0] for adapter in adapters}
    after = {adapter: order("acme", adapter, _pool(5))[0] for adapter in adapters}
    moved = [adapter for adapter in adapters if before[adapter] != after[adapter]]
    assert {after[adapter].ordinal for adapter in moved} == {4}
    assert 0.15 < len(moved) / len(adapters) < 0.25


def test_homes_are_spread_evenly_and_tenants_apart() -> None:
    homes = Counter(order(f"t{number % 7}", f"a{number}", _pool(4))[0] for number in range(4000))
    assert all(850 < count < 1150 for count in homes.values())
    assert len({order(f"t{number}", "same", _pool(8))[0] for number in range(40)}) > 4


def test_the_order_is_stable_between_releases() -> None:
    # Gateways and operators of different releases must agree, or warm adapters are never found.
    assert [replica.ordinal for replica in order("acme", "style", _pool(5))] == [1, 3, 0, 4, 2]


def test_no_replicas_is_no_order() -> None:
    assert order("acme", "style", []) == []
