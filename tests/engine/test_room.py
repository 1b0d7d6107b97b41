"""The arithmetic of reservations by itself."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplane_core.errors import InsufficientMemory
from loraplane_engine.adapters.room import Held, HostRoom, check_pin, keeps_place


def host_victims(images: list[Held], need: int, limit: int) -> list[str] | None:
    return HostRoom(images, limit).victims(need)


def held(digest: str, size: int, *, reserved: bool = False, busy: bool = False, age: float = 0.0) -> Held:
    return Held(digest, size, reserved, busy, (reserved, False, -age))


@pytest.mark.parametrize(
    ("images", "need", "victims"),
    [
        ([], 10, []),
        ([held("a", 4)], 6, []),
        ([held("a", 4)], 7, ["a"]),
        ([held("a", 4, age=1), held("b", 4, age=2)], 3, ["b"]),
        ([held("a", 4, age=1), held("b", 4, age=2)], 10, ["b", "a"]),
        ([held("a", 4, reserved=True), held("b", 4)], 6, ["b"]),
        ([held("a", 4, busy=True), held("b", 4)], 6, ["b"]),
        ([held("a", 4, busy=True), held("b", 4)], 7, None),  # not now; nobody leaves for nothing
        ([held("a", 10, busy=True)], 1, None),
    ],
)
def test_room_is_made_of_what_is_idle_and_unreserved(images: list[Held], need: int, victims: list[str] | None) -> None:
    assert host_victims(images, need, limit=10) == victims


@pytest.mark.parametrize("busy", [False, True])
def test_what_reservations_leave_no_room_for_is_refused_with_the_arithmetic(busy: bool) -> None:
    images = [held("a", 4, reserved=True, busy=busy), held("b", 3, reserved=True), held("c", 3)]
    with pytest.raises(InsufficientMemory, match=r"needs 4 bytes .* reserved 7 of 10, so 3 are free"):
        host_victims(images, 4, limit=10)


@pytest.mark.parametrize(
    ("marks", "newcomer", "keeps"),
    [
        ([], None, False),
        ([], "acme/a@2", False),
        ([("acme/a@1", False)], None, True),
        ([("acme/a@1", True)], None, True),
        ([("acme/a@1", False)], "acme/b@1", True),
        ([("acme/a@1", False)], "acme/a@2", False),  # another version of the same adapter takes its place
        ([("acme/a@1", True)], "acme/a@2", True),
        ([("acme/a@1", False), ("globex/a@1", False)], "acme/a@2", True),  # equal bytes, held for somebody else, too
    ],
)
def test_marks_keep_a_place_against_all_but_the_next_version(
    marks: list[tuple[str, bool]], newcomer: str | None, keeps: bool
) -> None:
    assert keeps_place(marks, newcomer) is keeps


def test_pins_fit_exactly_or_are_refused_with_the_arithmetic() -> None:
    check_pin(4, [3, 3], budget=10, slots=None)
    check_pin(4, [3, 3], budget=10, slots=3)
    with pytest.raises(InsufficientMemory, match=r"needs 5 bytes .* 2 pinned adapters hold 6 of 10, so 4 are free"):
        check_pin(5, [3, 3], budget=10, slots=None)
    with pytest.raises(InsufficientMemory, match="needs a slot; pinned adapters hold 2 of 2"):
        check_pin(1, [3, 3], budget=10, slots=2)


IMAGES = st.lists(st.tuples(st.integers(0, 6), st.booleans(), st.booleans(), st.integers(0, 9)), max_size=6)


@given(sizes=IMAGES, need=st.integers(0, 24), limit=st.integers(0, 24))
def test_no_reservation_is_ever_taken_and_no_waiting_is_in_vain(
    sizes: list[tuple[int, bool, bool, int]], need: int, limit: int
) -> None:
    images = [held(str(n), size, reserved=r, busy=b, age=age) for n, (size, r, b, age) in enumerate(sizes)]
    try:
        victims = host_victims(images, need, limit)
    except InsufficientMemory:
        assert sum(image.bytes for image in images if image.reserved) + need > limit
        return
    if victims is None:  # it fits once everything busy is idle
        assert host_victims([image._replace(busy=False) for image in images], need, limit) is not None
        return
    gone = [image for image in images if image.digest in victims]
    assert not any(image.reserved or image.busy for image in gone)
    assert sum(image.bytes for image in images if image not in gone) + need <= limit
