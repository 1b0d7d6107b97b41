"""The device has room for everybody's turn: pins stop where the largest that is not pinned would never get one."""

from dataclasses import replace

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loraplane_core.identity import ReplicaId
from loraplane_core.wire.engine import Residence
from loraplane_operator.actions import Mark, Warm
from loraplane_operator.plan import plan
from loraplane_operator.plan.reservations import admit
from loraplane_operator.plan.wishes import wishes
from loraplane_operator.words import Failure, World
from tests.operator.plans import condition, of, told
from tests.operator.test_plan_room import MIB, aged, carried_out, crowd, holding, placed
from tests.operator.worlds import NOW, POOL, adapter, entry, everywhere, pool, registry, residence, version, world


def mixed(sizes: dict[str, int], pinned: str, *, device: int, slots: int = 0, host: int = 256) -> World:
    """As crowd; those whose letters are in `pinned` are wished pinned."""
    seen = crowd(sizes, host=host, device=device)
    objects = tuple(replace(obj, pinned=obj.adapter in pinned) for obj in seen.adapters)
    engine = (("slots", str(slots)),) if slots else ()
    return replace(seen, adapters=objects, pools={POOL: pool(replicas=1, engine=engine)})


def pins(seen: World) -> str:
    """Whose pins are admitted."""
    found = admit(seen, wishes(seen)).items()
    return "".join(sorted(adapter for (_, adapter), wish in found for target in wish.targets if target.pinned_on))


def on_host(seen: World) -> str:
    found = admit(seen, wishes(seen)).items()
    return "".join(sorted(adapter for (_, adapter), wish in found for target in wish.targets if target.replicas))


def test_a_pin_leaves_room_for_the_largest_that_is_not_pinned() -> None:
    seen = mixed({"a": 20, "b": 20, "c": 30}, "ab", device=64)
    assert (pins(seen), on_host(seen)) == ("a", "ac")
    state, reason, message = placed(seen, "b")
    assert (state, reason) == ("False", "InsufficientMemory")
    assert message.startswith("needs 20 MiB on 1 replica; pool has 14 MiB free (device memory of default/pool: 20 MiB")
    assert message.endswith("30 MiB stay free for the largest adapter that is not pinned)")


def test_where_all_are_pinned_they_may_fill_the_device() -> None:
    assert pins(mixed({"a": 32, "b": 32}, "ab", device=64)) == "ab"


def test_one_that_is_larger_than_the_device_keeps_no_room_for_itself() -> None:
    seen = mixed({"a": 40, "b": 80}, "a", device=64)
    assert (pins(seen), on_host(seen)) == ("a", "a")
    assert placed(seen, "b") == (
        "False",
        "InsufficientMemory",
        "needs 80 MiB on 1 replica; pool has 64 MiB free"
        " (device memory of default/pool: adapters may take 64 MiB per replica)",
    )


def test_a_newcomer_takes_no_pin_away_and_is_told_why_it_gets_no_turn() -> None:
    seen = holding(mixed({"a": 30, "b": 30, "c": 10}, "ab", device=64), "a", "b", pinned=True)
    assert (pins(seen), on_host(seen)) == ("ab", "ab")
    assert placed(seen, "c")[2].startswith("needs 10 MiB on 1 replica; pool has 4 MiB free (device memory of")
    assert of(Mark, seen) == []


def test_an_engine_that_restarted_changes_nothing_about_it() -> None:
    """Pins that are known by the status are not weighed against a newcomer, either."""
    held = holding(mixed({"a": 30, "b": 30, "c": 10}, "ab", device=64), "a", "b", pinned=True)
    seen = told(told(held))
    empty = msgspec.structs.replace(seen.engines[ReplicaId(*POOL, 0)].capacity)
    engines = {id_: replace(each, boot="new", residences={}, capacity=empty) for id_, each in seen.engines.items()}
    again = replace(seen, engines=engines)
    assert (pins(again), on_host(again)) == ("ab", "ab")


@pytest.mark.parametrize(("wished", "slots", "admitted"), [("ab", 2, "a"), ("ab", 3, "ab"), ("abc", 3, "abc")])
def test_slots_are_counted_and_one_stays_free_for_turns(wished: str, slots: int, admitted: str) -> None:
    seen = mixed({"a": 1, "b": 1, "c": 1}, wished, device=64, slots=slots)
    assert pins(seen) == admitted
    if admitted == "a":
        told = "needs a slot on 1 replica; pool has 0 free (slots of default/pool: pinned adapters hold 1 of 2"
        assert placed(seen, "b")[2].startswith(told)


def test_where_pins_hold_all_slots_a_newcomer_is_told_so() -> None:
    seen = holding(mixed({"a": 1, "b": 1, "c": 1}, "ab", device=64, slots=2), "a", "b", pinned=True)
    assert on_host(seen) == "ab"
    assert placed(seen, "c")[2].startswith("needs a slot on 1 replica; pool has 0 free (slots of default/pool")


def test_the_same_bytes_as_a_pinned_one_need_no_turn_of_their_own() -> None:
    seen = mixed({"a": 40, "b": 40}, "a", device=64)
    twins = [entry(name, version(name, bytes=40 * MIB, digest="d" * 64)) for name in ("a", "b")]
    assert on_host(replace(seen, registry=registry(*twins))) == "ab"


def test_a_pin_that_the_engine_refuses_is_told_and_is_not_ready() -> None:
    seen = world(adapters=(adapter(pinned=True),), registry=registry(entry(pinned=True)), **everywhere(residence()))
    (mark,) = of(Mark, seen)
    failed = Failure("insufficient_memory", "pinning needs a slot", 1, NOW + 5)
    refused = replace(seen, memory=replace(seen.memory, failures={mark: failed}))
    assert condition(seen, "Ready") == ("True", "Ready")
    assert condition(refused, "Ready") == ("False", "InsufficientMemory")


@st.composite
def mixtures(draw: st.DrawFn) -> World:
    sizes = draw(st.dictionaries(st.sampled_from("abcdefg"), st.integers(1, 30), min_size=1))
    wished = "".join(name for name in sizes if draw(st.booleans()))
    return mixed(sizes, wished, device=draw(st.integers(1, 64)), slots=draw(st.integers(0, 4)))


@settings(max_examples=80, deadline=None)
@given(mixtures())
def test_whoever_has_a_place_has_its_turn_beside_the_pins(seen: World) -> None:
    after = carried_out(seen)
    (known,) = after.engines.values()
    held: list[Residence] = list(known.residences.values())
    pinned = [each for each in held if each.pinned]
    passing = [each for each in held if not each.pinned]
    most = max((each.bytes for each in passing), default=0)
    assert sum(each.bytes for each in pinned) + most <= known.capacity.adapter_bytes
    slots = int(dict(after.pools[POOL].engine).get("slots", 0))
    assert not slots or len(pinned) + bool(passing) <= slots
    assert [action for action in plan(after).actions if isinstance(action, Warm | Mark)] == []


def test_age_still_decides_among_pins() -> None:
    seen = mixed({"a": 30, "b": 30, "c": 10}, "ab", device=64)
    aged_anew = {"a": 1, "b": 1000, "c": 1}
    objects = tuple(replace(obj, meta=aged(obj.adapter, aged_anew[obj.adapter]).meta) for obj in seen.adapters)
    assert (pins(seen), pins(replace(seen, adapters=objects))) == ("a", "b")
