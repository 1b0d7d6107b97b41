"""Attention over the paged KV cache in plain torch: blocks are gathered per group, then one SDPA call."""

import torch
import torch.nn.functional as F

from loraplane_engine.memory.arena import Arena
from loraplane_engine.models.batch import AttentionGroup, ForwardBatch


class PagedAttention:
    def __init__(self, arena: Arena, *, kv_heads: int, head_dim: int) -> None:
        self._blocks, self._rows = arena.kv_blocks, arena.kv_rows
        self._kv_heads, self._head_dim = kv_heads, head_dim

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int, batch: ForwardBatch
    ) -> torch.Tensor:
        """q [rows, heads, head_dim], k and v [rows, kv_heads, head_dim]. Stores k and v in the cache.

        Returns [rows, heads * head_dim].
        """
        rows = q.shape[0]
        self._rows.index_copy_(0, batch.kv_slots[layer], torch.stack((k, v), dim=1).view(2 * rows, -1))
        if len(batch.attention) == 1 and batch.attention[0].rows is None:
            return self._attend(q, batch.attention[0], layer)
        out = q.new_empty(rows, q.shape[1] * self._head_dim)
        for group in batch.attention:
            if group.rows is not None:
                out.index_copy_(0, group.rows, self._attend(q.index_select(0, group.rows), group, layer))
        return out

    def _attend(self, q: torch.Tensor, group: AttentionGroup, layer: int) -> torch.Tensor:
        sequences, queries, heads = group.sequences, group.queries, q.shape[1]
        gathered = self._blocks.index_select(0, group.blocks[layer])
        k, v = gathered.view(2, sequences, -1, self._kv_heads, self._head_dim).transpose(2, 3).unbind(0)
        if queries == 1:
            # The heads that share a K/V head stand in for query positions: no copy of K and V per head.
            q = q.reshape(sequences, self._kv_heads, heads // self._kv_heads, self._head_dim)
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=group.mask)
            return out.reshape(sequences, heads * self._head_dim)
        q = q.reshape(sequences, queries, heads, self._head_dim).transpose(1, 2)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=group.mask, enable_gqa=True)
        return out.transpose(1, 2).reshape(sequences * queries, heads * self._head_dim)
