"""Which pages of the arena are free. One allocator for KV blocks and adapters; owners hand their pages back."""

import itertools
from collections.abc import Sequence
from typing import Literal

import numpy as np

Owner = Literal["kv", "adapter"]
_FREE, _CODES = 0, {"kv": 1, "adapter": 2}


class PageAllocator:
    """KV blocks are taken from the low end and adapters from the high end, so that runs stay findable."""

    def __init__(self, pages: int) -> None:
        self._owner = np.zeros(pages, dtype=np.int8)
        self.total = pages
        self.used: dict[Owner, int] = {"kv": 0, "adapter": 0}

    @property
    def free(self) -> int:
        return self.total - self.used["kv"] - self.used["adapter"]

    def take_blocks(self, count: int) -> list[int] | None:
        """`count` KV pages, all or nothing."""
        if count > self.free:
            return None
        found: list[int] = np.flatnonzero(self._owner == _FREE)[:count].tolist()
        self._claim(found, "kv")
        return found

    def take_runs(self, runs: Sequence[int]) -> list[int] | None:
        """First pages of contiguous runs of the given lengths, in the given order; all or nothing.

        All in one stretch when there is one, so that a load is one copy.
        """
        total = sum(runs)
        if total > self.free:
            return None
        whole = self._highest_run(total)
        if whole is not None:
            self._claim(range(whole, whole + total), "adapter")
            return [whole + before for before in itertools.accumulate(runs, initial=0)][:-1]
        starts = [-1] * len(runs)
        taken: list[int] = []
        for index in sorted(range(len(runs)), key=lambda i: -runs[i]):
            start = self._highest_run(runs[index])
            if start is None:
                self._release(taken, "adapter")
                return None
            pages = list(range(start, start + runs[index]))
            self._claim(pages, "adapter")
            taken += pages
            starts[index] = start
        return starts

    def release(self, pages: Sequence[int], owner: Owner) -> None:
        """Raises ValueError, before any change, when a page does not belong to `owner` (a double release)."""
        if len(set(pages)) != len(pages) or (self._owner[list(pages)] != _CODES[owner]).any():
            raise ValueError(f"pages {list(pages)} do not all belong to {owner}")
        self._release(pages, owner)

    def _release(self, pages: Sequence[int], owner: Owner) -> None:
        self._owner[list(pages)] = _FREE
        self.used[owner] -= len(pages)

    def _claim(self, pages: Sequence[int], owner: Owner) -> None:
        self._owner[list(pages)] = _CODES[owner]
        self.used[owner] += len(pages)

    def _highest_run(self, length: int) -> int | None:
        free = np.flatnonzero(self._owner == _FREE)
        if length == 1:
            return int(free[-1]) if free.size else None
        # free[i] starts a run when the page `length - 1` places on in the list is as far away in the arena.
        starts = np.flatnonzero(free[length - 1 :] - free[: free.size - length + 1] == length - 1)
        return int(free[starts[-1]]) if starts.size else None
