"""What a model's forward pass is given for one step. Prefill chunks and decode tokens lie in one batch."""

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class AttentionGroup:
    """`sequences` sequences that each have `queries` query positions in this step.

    `rows` are their positions in the batch, sequence by sequence; None when they are the whole batch in order.
    `blocks` holds per layer the indices into Arena.kv_blocks of the sequences' K blocks, then of their V
    blocks; a shorter sequence repeats one of its own blocks. `mask` is additive, [sequences, 1, queries, keys].
    """

    rows: torch.Tensor | None
    sequences: int
    queries: int
    blocks: tuple[torch.Tensor, ...]
    mask: torch.Tensor


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """`kv_slots` holds per layer the indices into Arena.kv_rows where each token's K and V go, interleaved.

    `routing` belongs to the LoRA form in use, None when every row is the base's. `logit_rows` are the rows
    whose logits are wanted, None for all.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    kv_slots: tuple[torch.Tensor, ...]
    attention: tuple[AttentionGroup, ...]
    routing: Any | None
    logit_rows: torch.Tensor | None
