"""What every form of grouped LoRA promises: y += scale * B (A x) for the rows of each adapter, in place.

Rows of a batch are sorted by adapter, so an adapter's rows are one slice, a *segment*. Base rows lie in no
segment and cost nothing. Ranks are real: nothing is padded to the largest, and a member that the adapter
lacks has rank 0. Routing is made once per step and serves all layers.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch


class Segment(NamedTuple):
    """Rows [start, start + length) of the batch use row `row` of the device table."""

    row: int
    start: int
    length: int


class SiteGroup(NamedTuple):
    """Linears that share their input and, merged into one weight, their output.

    `sites` are columns of the device table, `outputs` the width of each member's slice of y, in order.
    """

    sites: tuple[int, ...]
    in_features: int
    outputs: tuple[int, ...]


class GroupedLora(Protocol):
    name: str

    def forget(self, row: int) -> None:
        """The table row changes; drop whatever was derived from it."""
        ...

    def route(self, segments: Sequence[Segment], rows: int) -> Any | None:
        """Routing of one step over `rows` rows, or None when no row has an adapter."""
        ...

    def apply(self, x: torch.Tensor, y: torch.Tensor, group: SiteGroup, routing: Any) -> None:
        """x [rows, in] is the group's input, y [rows, sum of outputs] its base output, changed in place."""
        ...
