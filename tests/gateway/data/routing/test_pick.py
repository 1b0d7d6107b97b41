"""Selection inside the placement set: tables, and what holds for every set."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplane_core.identity import ReplicaId
from loraplane_core.placement import order
from loraplane_core.wire.engine import ResidencyClass
from loraplane_gateway.data.routing.inflight import InFlight
from loraplane_gateway.data.routing.pick import Candidate, load_cap, members, pick, pick_least_loaded
from loraplane_gateway.data.routing.spread import HOLD_SECONDS, Spread

R = [ReplicaId("models", "one", number) for number in range(4)]


def _routable(*states: tuple[int, ResidencyClass, float]) -> dict[ReplicaId, Candidate]:
    return {R[number]: Candidate(R[number], residency, load) for number, residency, load in states}


@pytest.mark.parametrize(
    ("states", "k", "expected", "why"),
    [
        ([], 1, None, "nobody is routable"),
        ([(0, "absent", 0), (1, "device", 0)], 1, 0, "the set is one home: what lies outside does not count"),
        ([(1, "absent", 0), (2, "device", 0)], 1, 1, "the home is gone: the next along the order"),
        ([(0, "absent", 0), (1, "device", 0)], 2, 1, "residency decides inside the set"),
        ([(0, "host", 0), (1, "device", 0)], 2, 1, "device before host"),
        ([(0, "disk", 0), (1, "host", 0)], 2, 1, "host before disk"),
        ([(0, "absent", 0), (1, "loading", 0)], 2, 1, "a load under way is joined, not repeated"),
        ([(0, "loading", 0), (1, "disk", 0)], 2, 0, "loading and disk are equals: the order decides"),
        ([(0, "absent", 0), (1, "disk", 0)], 2, 1, "disk before absent"),
        ([(0, "device", 1), (1, "device", 0)], 2, 1, "equally warm: the less loaded one"),
        ([(0, "device", 0), (1, "device", 0)], 2, 0, "equals: along the order"),
        ([(0, "device", 10), (1, "absent", 0)], 2, 1, "a warm replica above 1.25 times the mean loses (G71)"),
        ([(0, "device", 4), (1, "absent", 4)], 2, 0, "a warm replica at the mean wins"),
        ([(0, "device", 9), (1, "absent", 0)], 1, 0, "alone in its set it cannot lose"),
        ([(0, "device", 0), (1, "device", 0)], 0, 0, "k is never below one"),
    ],
)
def test_pick(states: list[tuple[int, ResidencyClass, float]], k: int, expected: int | None, why: str) -> None:
    chosen = pick(R, _routable(*states), k)
    assert (None if chosen is None else chosen.replica.ordinal) == expected, why


def test_the_base_goes_to_the_least_loaded() -> None:
    assert pick_least_loaded({}) is None
    chosen = pick_least_loaded(_routable((0, "device", 2), (1, "device", 1), (2, "device", 1)))
    assert chosen is not None and chosen.replica == R[1]


_residency: st.SearchStrategy[ResidencyClass] = st.sampled_from(["device", "host", "disk", "loading", "absent"])
_states = st.dictionaries(
    st.integers(0, 11), st.tuples(_residency, st.integers(0, 50).map(float), st.booleans()), min_size=1
)


@given(states=_states, k=st.integers(0, 12))
def test_whatever_is_routable_the_choice_lies_in_the_first_k_and_bounds_the_load(
    states: dict[int, tuple[ResidencyClass, float, bool]], k: int
) -> None:
    replicas = [ReplicaId("models", "one", number) for number in states]
    places = order("acme", "pirate", replicas)
    routable = {
        replica: Candidate(replica, residency, load)
        for replica, (residency, load, is_routable) in zip(replicas, states.values(), strict=True)
        if is_routable
    }
    chosen = pick(places, routable, k)
    homes = members(places, routable, k)
    if not routable:
        assert chosen is None
        return
    assert chosen in homes
    assert len(homes) == min(len(routable), max(1, k))
    assert [home.replica for home in homes] == [replica for replica in places if replica in routable][: max(1, k)]
    cap = load_cap([home.in_flight for home in homes])
    assert cap >= math.ceil(sum(home.in_flight for home in homes) / len(homes))
    assert any(home.in_flight + 1 <= cap for home in homes)  # one is always within the bound
    assert chosen is not None and chosen.in_flight + 1 <= cap


@given(states=_states, k=st.integers(1, 4))
def test_a_replica_outside_the_set_changes_nothing(
    states: dict[int, tuple[ResidencyClass, float, bool]], k: int
) -> None:
    replicas = [ReplicaId("models", "one", number) for number in states]
    places = order("acme", "pirate", replicas)
    routable = {
        replica: Candidate(replica, residency, load)
        for replica, (residency, load, _) in zip(replicas, states.values(), strict=True)
    }
    fewer = {home.replica: home for home in members(places, routable, k)}
    assert pick(places, routable, k) == pick(places, fewer, k)


def test_an_adapter_spreads_at_once_with_demand_and_shrinks_after_a_while() -> None:
    now = 0.0
    spread = Spread(16, lambda: now)
    assert spread.k("a", 1, 1) == 1
    assert spread.k("a", 1, 17) == 2
    assert spread.k("a", 1, 65) == 5
    now += HOLD_SECONDS - 1
    assert spread.k("a", 1, 1) == 5  # not at once
    now += 1
    assert spread.k("a", 1, 1) == 1
    assert spread.k("b", 3, 1) == 3  # never below the warm replicas
    assert spread.k("b", 0, 1) == 1


def test_counts_are_released_whatever_is_raised() -> None:
    in_flight = InFlight(lambda _: 0.0, lambda: None)
    with pytest.raises(RuntimeError), in_flight.counted(R[0], "acme/pirate"):
        assert in_flight.load(R[0]) == in_flight.of_adapter("acme/pirate") == 1
        raise RuntimeError
    assert in_flight.load(R[0]) == in_flight.of_adapter("acme/pirate") == 0
    assert in_flight.dispatched == in_flight.released == 1
    assert in_flight.own() == {}
