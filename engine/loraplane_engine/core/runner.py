"""From a batch of chunks to logits: builds the step's indices once for all layers, then runs the model."""

from collections import defaultdict
from collections.abc import Sequence as Listing

import numpy as np
import torch

from loraplane_engine.core.words import Batch, Chunk
from loraplane_engine.kernels.contract import GroupedLora, Segment
from loraplane_engine.memory.arena import BLOCK, Arena, blocks_for
from loraplane_engine.models.batch import AttentionGroup, ForwardBatch
from loraplane_engine.models.registry import Model

#: Sequences of one attention group have at most this many times the blocks of its shortest.
_SPREAD = 2


class Runner:
    def __init__(self, model: Model, arena: Arena, lora: GroupedLora) -> None:
        self._model, self._arena, self._lora = model, arena, lora
        self._layer_offsets = (np.arange(arena.layers, dtype=np.int64) * 2)[:, None]

    @torch.inference_mode()
    def forward(self, batch: Batch) -> tuple[torch.Tensor, list[slice]]:
        """Logits of the wanted rows, and per chunk its slice of them.

        Wanted are the last row of a chunk that samples, and all rows of one whose prompt logprobs are asked for.
        """
        chunks = batch.chunks
        starts = np.cumsum([0, *(chunk.tokens for chunk in chunks)])
        tokens = np.concatenate([chunk.sequence.ids[chunk.start : chunk.start + chunk.tokens] for chunk in chunks])
        positions = np.concatenate([np.arange(chunk.start, chunk.start + chunk.tokens) for chunk in chunks])
        rows, slices = _logit_rows(chunks, starts)
        forward = ForwardBatch(
            tokens=self._tensor(tokens),
            positions=self._tensor(positions),
            kv_slots=self._kv_slots(chunks, positions),
            attention=self._attention(chunks, starts),
            routing=self._lora.route(_segments(chunks, starts), len(tokens)),
            logit_rows=None if len(rows) == len(tokens) else self._tensor(rows),
        )
        return self._model.forward(forward), slices

    def _kv_slots(self, chunks: Listing[Chunk], positions: np.ndarray) -> tuple[torch.Tensor, ...]:
        pages = np.concatenate(
            [
                np.asarray(c.sequence.pages, dtype=np.int64)[np.arange(c.start, c.start + c.tokens) // BLOCK]
                for c in chunks
            ]
        )
        first = pages * self._arena.layers * 2  # the page's first K block
        k = (first[None, :] + self._layer_offsets) * BLOCK + (positions % BLOCK)[None, :]
        return self._tensor(np.stack([k, k + BLOCK], axis=2).reshape(self._arena.layers, -1)).unbind(0)

    def _attention(self, chunks: Listing[Chunk], starts: np.ndarray) -> tuple[AttentionGroup, ...]:
        by_queries: dict[int, list[int]] = defaultdict(list)
        for index, chunk in enumerate(chunks):
            by_queries[chunk.tokens].append(index)
        groups = []
        for queries, members in by_queries.items():
            for part in _of_similar_length(members, chunks):
                groups.append(self._group(queries, part, chunks, starts))
        return tuple(groups)

    def _group(self, queries: int, members: list[int], chunks: Listing[Chunk], starts: np.ndarray) -> AttentionGroup:
        lengths = np.array([chunks[i].start + queries for i in members])
        width = blocks_for(int(lengths.max()))
        table = np.empty((len(members), width), dtype=np.int64)
        for row, index in enumerate(members):
            pages = chunks[index].sequence.pages[:width]
            table[row, : len(pages)] = pages
            table[row, len(pages) :] = pages[0]
        k = (table.reshape(1, -1) * self._arena.layers * 2) + self._layer_offsets
        blocks = self._tensor(np.concatenate([k, k + 1], axis=1)).unbind(0)
        # Query i of a sequence of `length` positions sees keys up to its own, length - queries + i.
        last = lengths[:, None, None] - queries + np.arange(queries)[None, :, None]
        hidden = np.arange(width * BLOCK)[None, None, :] > last
        dtype = self._arena.elements.dtype
        mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(torch.from_numpy(hidden), -torch.inf)
        whole = len(members) == len(chunks)
        rows = None if whole else np.concatenate([np.arange(starts[i], starts[i + 1]) for i in members])
        return AttentionGroup(
            rows=None if rows is None else self._tensor(rows),
            sequences=len(members),
            queries=queries,
            blocks=blocks,
            mask=mask.unsqueeze(1).to(self._arena.elements.device),
        )

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._arena.elements.device, non_blocking=True)


def _logit_rows(chunks: Listing[Chunk], starts: np.ndarray) -> tuple[np.ndarray, list[slice]]:
    rows: list[int] = []
    slices: list[slice] = []
    for chunk, start, end in zip(chunks, starts[:-1].tolist(), starts[1:].tolist(), strict=True):
        before = len(rows)
        if chunk.sequence.wants_prompt_logits:
            rows.extend(range(start, end))
        elif chunk.samples:
            rows.append(end - 1)
        slices.append(slice(before, len(rows)))
    return np.array(rows, dtype=np.int64), slices


def _segments(chunks: Listing[Chunk], starts: np.ndarray) -> list[Segment]:
    """Chunks are sorted by table row, so each adapter's rows are one stretch."""
    segments: list[Segment] = []
    for index, chunk in enumerate(chunks):
        if chunk.sequence.image is None:
            continue
        row = chunk.sequence.image.row
        if row is None:
            raise RuntimeError(f"{chunk.sequence.request} was scheduled without its adapter on the device")
        start, length = int(starts[index]), chunk.tokens
        if segments and segments[-1].row == row:
            segments[-1] = Segment(row, segments[-1].start, segments[-1].length + length)
        else:
            segments.append(Segment(row, start, length))
    return segments


def _of_similar_length(members: list[int], chunks: Listing[Chunk]) -> list[list[int]]:
    """Split so that short sequences are not padded to the length of a long one; order is kept where possible."""
    blocks = {i: blocks_for(chunks[i].start + chunks[i].tokens) for i in members}
    if max(blocks.values()) <= _SPREAD * min(blocks.values()):
        return [members]
    parts: list[list[int]] = []
    shortest = 0
    for index in sorted(members, key=lambda i: blocks[i]):
        if not parts or blocks[index] > _SPREAD * shortest:
            parts.append([])
            shortest = blocks[index]
        parts[-1].append(index)
    return parts
