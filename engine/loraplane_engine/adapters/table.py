"""The device table: where each resident adapter's matrices lie, per site."""

from collections.abc import Iterable
from typing import NamedTuple

import torch


class TableEntry(NamedTuple):
    """`a` and `b` are element offsets in the arena, absolute; rank 0 = the adapter lacks the site."""

    a: int
    b: int
    rank: int
    scale: float


class DeviceTable:
    """`where` is int64 [rows, sites, 3] (offset A, offset B, rank), `scale` fp32 [rows, sites]; rows are reused.

    Row numbers are an adapter's only name in a kernel. The table grows by doubling; a grown table is a new
    tensor, so nobody may keep the old one over a load.
    """

    INITIAL_ROWS = 16

    def __init__(self, sites: int, device: torch.device) -> None:
        self.sites = sites
        self.where = torch.zeros(self.INITIAL_ROWS, sites, 3, dtype=torch.int64, device=device)
        self.scale = torch.zeros(self.INITIAL_ROWS, sites, dtype=torch.float32, device=device)
        self._free = list(range(self.INITIAL_ROWS))[::-1]

    def add(self, entries: Iterable[tuple[int, TableEntry]]) -> int:
        """Write a row of (site, entry); sites not named have rank 0. Returns the row."""
        if not self._free:
            self._grow()
        where, scale = [(0, 0, 0)] * self.sites, [0.0] * self.sites
        for site, entry in entries:
            where[site] = entry[:3]
            scale[site] = entry.scale
        row = self._free.pop()
        self.where[row] = torch.tensor(where, dtype=torch.int64)
        self.scale[row] = torch.tensor(scale, dtype=torch.float32)
        return row

    def remove(self, row: int) -> None:
        """The row's sites become rank 0, so that a stale use adds nothing rather than another's weights."""
        self.where[row].zero_()
        self.scale[row].zero_()
        self._free.append(row)

    def read(self, row: int) -> list[TableEntry]:
        """The row's entries by site, on the host."""
        scale = self.scale[row].tolist()
        return [TableEntry(a, b, rank, scale[site]) for site, (a, b, rank) in enumerate(self.where[row].tolist())]

    def _grow(self) -> None:
        rows = self.where.shape[0]
        self.where = torch.cat([self.where, torch.zeros_like(self.where)])
        self.scale = torch.cat([self.scale, torch.zeros_like(self.scale)])
        self._free = list(range(rows, 2 * rows))[::-1]
