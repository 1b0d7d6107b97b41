"""The page allocator under random orders of taking and releasing."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from loraplane_engine.memory.pages import Owner, PageAllocator

PAGES = 24


class Allocation(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.allocator = PageAllocator(PAGES)
        self.held: list[tuple[Owner, list[int]]] = []

    @rule(count=st.integers(1, 10))
    def take_blocks(self, count: int) -> None:
        free = self.allocator.free
        pages = self.allocator.take_blocks(count)
        assert (pages is not None) == (count <= free)
        if pages is not None:
            assert len(pages) == count
            self.held.append(("kv", pages))

    @rule(runs=st.lists(st.integers(1, 5), min_size=1, max_size=4))
    def take_runs(self, runs: list[int]) -> None:
        before = self.allocator.free
        starts = self.allocator.take_runs(runs)
        if starts is None:
            assert self.allocator.free == before
            assert max(runs) > 1 or sum(runs) > before  # single pages never fail for want of a stretch
            return
        pages = [start + i for start, run in zip(starts, runs, strict=True) for i in range(run)]
        self.held.append(("adapter", pages))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        owner, pages = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.allocator.release(pages, owner)
        with pytest.raises(ValueError, match="do not all belong"):
            self.allocator.release(pages, owner)

    @invariant()
    def no_page_has_two_owners(self) -> None:
        pages = [page for _, held in self.held for page in held]
        assert len(set(pages)) == len(pages)
        assert all(0 <= page < PAGES for page in pages)
        assert self.allocator.free == PAGES - len(pages)
        for owner in ("kv", "adapter"):
            assert self.allocator.used[owner] == sum(len(held) for who, held in self.held if who == owner)


TestAllocation = Allocation.TestCase
TestAllocation.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None, derandomize=True, database=None
)


@settings(deadline=None, derandomize=True, database=None)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=6))
def test_an_empty_arena_gives_one_rising_stretch(runs: list[int]) -> None:
    """Then a load is a single copy."""
    starts = PageAllocator(PAGES).take_runs(runs)
    assert starts is not None
    assert all(later == earlier + run for earlier, later, run in zip(starts, starts[1:], runs, strict=False))


def test_pages_of_one_owner_cannot_be_released_by_the_other() -> None:
    allocator = PageAllocator(4)
    pages = allocator.take_blocks(2)
    assert pages is not None
    with pytest.raises(ValueError, match="do not all belong"):
        allocator.release(pages, "adapter")
    assert allocator.free == 2
