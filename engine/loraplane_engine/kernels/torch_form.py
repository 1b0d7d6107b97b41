"""Grouped LoRA in plain torch: per segment one shrink over the group's stacked A, one expand per member.

The oracle for other forms, and the form in use on a CPU until a faster one registers. Views of the arena are
derived once per table row, so a step only slices activations and calls small GEMMs.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from loraplane_engine.adapters.table import DeviceTable, TableEntry
from loraplane_engine.kernels.contract import Segment, SiteGroup


class _Member(NamedTuple):
    member: int  # among the group's
    b: torch.Tensor  # [rank, out], a view of the arena
    scale: float


class _GroupWeights(NamedTuple):
    a: torch.Tensor  # [in, sum of ranks], a transposed view of the arena
    ranks: list[int]
    members: list[_Member]


class TorchRouting(NamedTuple):
    lengths: list[int]  # of consecutive slices that cover all rows
    parts: list[tuple[int, int]]  # (slice, table row) of those that have an adapter
    one_thread: bool


#: Up to this many rows a segment's GEMMs take a few microseconds each; waking a second thread takes a hundred.
_ONE_THREAD_ROWS = 64


class TorchLora:
    name = "torch"

    def __init__(self, elements: torch.Tensor, table: DeviceTable) -> None:
        self._elements = elements
        self._table = table
        self._rows: dict[int, dict[SiteGroup, _GroupWeights | None]] = {}
        self._entries: dict[int, list[TableEntry]] = {}

    def forget(self, row: int) -> None:
        self._rows.pop(row, None)
        self._entries.pop(row, None)

    def route(self, segments: Sequence[Segment], rows: int) -> TorchRouting | None:
        if not segments:
            return None
        lengths: list[int] = []
        parts: list[tuple[int, int]] = []
        position = 0
        for segment in sorted(segments, key=lambda segment: segment.start):
            if segment.start > position:
                lengths.append(segment.start - position)
            parts.append((len(lengths), segment.row))
            lengths.append(segment.length)
            position = segment.start + segment.length
        if position < rows:
            lengths.append(rows - position)
        longest = max(segment.length for segment in segments)
        return TorchRouting(lengths, parts, not self._elements.is_cuda and longest <= _ONE_THREAD_ROWS)

    def apply(self, x: torch.Tensor, y: torch.Tensor, group: SiteGroup, routing: TorchRouting) -> None:
        if not routing.one_thread:
            self._apply(x, y, group, routing)
            return
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # costs 0.2 microseconds
        try:
            self._apply(x, y, group, routing)
        finally:
            torch.set_num_threads(threads)

    def _apply(self, x: torch.Tensor, y: torch.Tensor, group: SiteGroup, routing: TorchRouting) -> None:
        inputs = x.split_with_sizes(routing.lengths)
        outputs: list[tuple[torch.Tensor, ...] | None] = [None] * len(group.outputs)
        columns = y.split_with_sizes(group.outputs, dim=1)
        for part, row in routing.parts:
            weights = self._weights(row, group)
            if weights is None:
                continue
            shrunk = torch.mm(inputs[part], weights.a)
            pieces = shrunk.split_with_sizes(weights.ranks, dim=1) if len(weights.ranks) > 1 else (shrunk,)
            for piece, (index, b, scale) in zip(pieces, weights.members, strict=True):
                slices = outputs[index]
                if slices is None:
                    slices = outputs[index] = columns[index].split_with_sizes(routing.lengths)
                slices[part].addmm_(piece, b, alpha=scale)

    def _weights(self, row: int, group: SiteGroup) -> _GroupWeights | None:
        groups = self._rows.setdefault(row, {})
        if group not in groups:
            groups[group] = self._derive(row, group)
        return groups[group]

    def _derive(self, row: int, group: SiteGroup) -> _GroupWeights | None:
        entries = self._entries.get(row)
        if entries is None:
            entries = self._entries[row] = self._table.read(row)
        present = [(index, entries[site]) for index, site in enumerate(group.sites) if entries[site].rank]
        if not present:
            return None
        ranks = [entry.rank for _, entry in present]
        first = present[0][1].a  # the members' A matrices lie next to each other, in this order
        a = self._elements[first : first + sum(ranks) * group.in_features].view(sum(ranks), group.in_features)
        members = []
        for index, entry in present:
            width = group.outputs[index]
            b = self._elements[entry.b : entry.b + entry.rank * width].view(entry.rank, width)
            members.append(_Member(index, b, entry.scale))
        return _GroupWeights(a.t(), ranks, members)
