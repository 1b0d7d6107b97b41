"""Every form of grouped LoRA against the plain formula, on ragged ranks, missing members and unused pages of NaN."""

import itertools

import pytest
import torch

from loraplane_engine.adapters.table import DeviceTable, TableEntry
from loraplane_engine.kernels import registry
from loraplane_engine.kernels.contract import Segment, SiteGroup

GROUP = SiteGroup((0, 1, 2), 48, (40, 16, 24))
RANKS = [(1, 3, 8), (16, 17, 64), (0, 5, 0), (8, 8, 8), (0, 0, 0)]


class World:
    """Five adapters in an arena that is NaN wherever no matrix lies."""

    def __init__(self, form: str) -> None:
        random = torch.Generator().manual_seed(3)
        self.elements = torch.full((200_000,), torch.nan)
        self.table = DeviceTable(3, torch.device("cpu"))
        self.lora = registry.create(form, self.elements, self.table)
        self.matrices: list[list[tuple[torch.Tensor, torch.Tensor, float] | None]] = []
        self.rows = []
        position = 16
        for number, ranks in enumerate(RANKS):
            entries: list[tuple[int, TableEntry]] = []
            made: list[tuple[torch.Tensor, torch.Tensor, float] | None] = []
            a_at = position
            b_at = position + sum(ranks) * GROUP.in_features + 16
            for site, rank in enumerate(ranks):
                width = GROUP.outputs[site]
                if rank == 0:
                    made.append(None)
                    continue
                a = torch.randn(rank, GROUP.in_features, generator=random)
                b = torch.randn(width, rank, generator=random)
                self.elements[a_at : a_at + a.numel()] = a.flatten()
                self.elements[b_at : b_at + b.numel()] = b.T.flatten()
                scale = 0.5 + number
                entries.append((site, TableEntry(a_at, b_at, rank, scale)))
                made.append((a, b, scale))
                a_at += a.numel()
                b_at += b.numel() + 16
            position = b_at + 64
            self.matrices.append(made)
            self.rows.append(self.table.add(entries))

    def expected(self, x: torch.Tensor, y: torch.Tensor, of_rows: list[int | None]) -> torch.Tensor:
        y = y.double().clone()
        columns = [0, *itertools.accumulate(GROUP.outputs)]
        for index, adapter in enumerate(of_rows):
            for site, made in enumerate(self.matrices[adapter] if adapter is not None else []):
                if made is not None:
                    a, b, scale = made
                    y[index, columns[site] : columns[site + 1]] += scale * (
                        b.double() @ (a.double() @ x[index].double())
                    )
        return y.float()


MIXES: list[list[int | None]] = [
    [None],
    [0],
    [1, 1, 1],
    [None, 0, 0, 1, 2, 2, 2, 3, 4],
    [3, 3, None],
    [None, None, 4, 4],
    [0, None, 1, None, 2],
]


@pytest.mark.parametrize("form", registry.FORMS)
@pytest.mark.parametrize("mix", MIXES, ids=str)
def test_each_row_gets_its_own_adapter_and_base_rows_nothing(form: str, mix: list[int | None]) -> None:
    world = World(form)
    random = torch.Generator().manual_seed(len(mix))
    x = torch.randn(len(mix), GROUP.in_features, generator=random)
    y = torch.randn(len(mix), sum(GROUP.outputs), generator=random)
    segments = [
        Segment(world.rows[adapter], rows[0], len(rows))
        for adapter, rows in (
            (adapter, [index for index, _ in group])
            for adapter, group in itertools.groupby(enumerate(mix), key=lambda pair: pair[1])
        )
        if adapter is not None
    ]
    routing = world.lora.route(segments, len(mix))
    out = y.clone()
    if routing is None:
        assert not segments
    else:
        world.lora.apply(x, out, GROUP, routing)
    torch.testing.assert_close(out, world.expected(x, y, mix), atol=2e-4, rtol=1e-4)
    for index, adapter in enumerate(mix):
        if adapter is None or adapter == 4:  # the last one has rank 0 everywhere
            assert torch.equal(out[index], y[index])


@pytest.mark.parametrize("form", registry.FORMS)
def test_a_reused_row_serves_the_new_adapter(form: str) -> None:
    """Derived state of the old one would be a stranger's weights."""
    world = World(form)
    x, y = torch.randn(1, GROUP.in_features), torch.zeros(1, sum(GROUP.outputs))
    old = world.rows[0]
    routing = world.lora.route([Segment(old, 0, 1)], 1)
    world.lora.apply(x, y.clone(), GROUP, routing)
    entries = [(site, entry) for site, entry in enumerate(world.table.read(world.rows[1])) if entry.rank]
    world.lora.forget(old)
    world.table.remove(old)
    assert world.table.add(entries) == old
    world.lora.apply(x, y, GROUP, routing)
    torch.testing.assert_close(y, world.expected(x, torch.zeros_like(y), [1]), atol=2e-4, rtol=1e-4)


def test_the_table_grows_and_keeps_its_rows() -> None:
    table = DeviceTable(2, torch.device("cpu"))
    rows = [table.add([(0, TableEntry(number, 2 * number, 1, 0.5))]) for number in range(40)]
    assert len(set(rows)) == 40
    assert all(table.read(row)[0] == TableEntry(number, 2 * number, 1, 0.5) for number, row in enumerate(rows))
    assert all(table.read(row)[1].rank == 0 for row in rows)
