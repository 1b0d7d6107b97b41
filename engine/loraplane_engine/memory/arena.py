"""The device memory that KV cache and adapters share: one tensor, cut into pages.

A page is one KV block of BLOCK tokens over all layers, `[layer, 2, BLOCK, kv_heads, head_dim]`, or a page of
an adapter's image. Views of it are made once; nothing else on the device is sized by load.
"""

from collections.abc import Sequence

import torch

from loraplane_engine.memory.pages import PageAllocator

BLOCK = 16


class Arena:
    """`elements` is the arena as a flat tensor of the model's dtype; offsets in the device table index it.

    `kv_blocks` is `[pages * layers * 2, BLOCK * kv_heads * head_dim]` and `kv_rows` is
    `[pages * layers * 2 * BLOCK, kv_heads * head_dim]`: the same memory by block and by token.
    """

    def __init__(
        self, pages: int, *, layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.layers = layers
        self.page_elements = layers * 2 * BLOCK * kv_heads * head_dim
        self.page_bytes = self.page_elements * dtype.itemsize
        self.pages = PageAllocator(pages)
        self.bytes = torch.empty(pages * self.page_bytes, dtype=torch.uint8, device=device)
        self.elements = self.bytes.view(dtype)
        self.by_page = self.bytes.view(pages, self.page_bytes)
        self.kv_blocks = self.elements.view(pages * layers * 2, BLOCK * kv_heads * head_dim)
        self.kv_rows = self.elements.view(pages * layers * 2 * BLOCK, kv_heads * head_dim)

    def take_blocks(self, count: int) -> list[int] | None:
        """KV pages, zeroed: attention multiplies masked positions by 0, and 0 x NaN of an earlier owner is NaN."""
        pages = self.pages.take_blocks(count)
        for page in pages or ():
            self.by_page[page].zero_()
        return pages

    def free_blocks(self, pages: Sequence[int]) -> None:
        self.pages.release(pages, "kv")

    def take_runs(self, runs: Sequence[int]) -> list[int] | None:
        return self.pages.take_runs(runs)

    def free_runs(self, pages: Sequence[int]) -> None:
        self.pages.release(pages, "adapter")

    def copy_in(self, page: int, data: torch.Tensor) -> None:
        """Copy whole pages of an image (uint8) to `page` and those after it."""
        start = page * self.page_bytes
        self.bytes[start : start + data.numel()].copy_(data, non_blocking=True)


def page_bytes_of(*, layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    return layers * 2 * BLOCK * kv_heads * head_dim * dtype.itemsize


def blocks_for(tokens: int) -> int:
    """KV pages that `tokens` positions need."""
    return -(-tokens // BLOCK)
