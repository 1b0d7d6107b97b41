"""The words of the core: what a request is while it is inside, and what one step computes."""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from loraplane_engine.adapters.words import Adapter, Image
from loraplane_engine.core.sampling import SamplingState
from loraplane_engine.messages import AdapterKey, Generate, SamplingParams, TokenLogprob

#: Requests of one queue share an adapter (None = the base) and are charged to one tenant.
QueueKey = tuple[str, AdapterKey | None]


@dataclass(slots=True, eq=False)
class Sequence:
    """One request. `ids` holds prompt and output and has room for all of it; KV of `computed` of them exists."""

    request: str
    tenant: str
    adapter: Adapter | None
    params: SamplingParams
    ids: np.ndarray
    prompt_length: int
    length: int  # of `ids` filled so far
    arrival: float
    cold: bool
    state: SamplingState
    computed: int = 0
    pages: list[int] = field(default_factory=list)
    admissions: int = 0
    admitted: int = 0  # the scheduler's count at the last admission: smaller = older
    admitted_at: float = 0.0
    served: int = 0  # positions computed since the last admission
    blocked_since: float | None = None  # waiting for its adapter's place on the device since then
    prompt_logprobs: list[TokenLogprob | None] | None = None  # gathered over chunks, sent with the first output

    @classmethod
    def of(cls, message: Generate, adapter: Adapter | None, now: float, *, cold: bool, vocabulary: int) -> "Sequence":
        prompt = np.asarray(message.prompt, dtype=np.int64)
        ids = np.empty(len(prompt) + message.sampling.max_tokens, dtype=np.int64)
        ids[: len(prompt)] = prompt
        return cls(
            request=message.request,
            tenant=message.tenant,
            adapter=adapter,
            params=message.sampling,
            ids=ids,
            prompt_length=len(prompt),
            length=len(prompt),
            arrival=now,
            cold=cold,
            state=SamplingState(message.sampling, prompt, vocabulary),
            prompt_logprobs=[None] if message.sampling.prompt_logprobs else None,
        )

    @property
    def queue(self) -> QueueKey:
        return (self.tenant, None if self.adapter is None else self.adapter.key)

    @property
    def image(self) -> Image | None:
        return None if self.adapter is None else self.adapter.image

    @property
    def remaining(self) -> int:
        """Positions to compute before the next token can be sampled; 1 while decoding."""
        return self.length - self.computed

    @property
    def generated(self) -> int:
        return self.length - self.prompt_length

    @property
    def wants_prompt_logits(self) -> bool:
        return self.prompt_logprobs is not None and len(self.prompt_logprobs) < self.prompt_length


class Chunk(NamedTuple):
    """`tokens` positions of a sequence from `start` on, computed in this step."""

    sequence: Sequence
    start: int
    tokens: int

    @property
    def samples(self) -> bool:
        return self.start + self.tokens == self.sequence.length


@dataclass(frozen=True, slots=True)
class Batch:
    """The chunks of one step, sorted by table row: base first, then each adapter's chunks next to each other."""

    chunks: list[Chunk]

    @property
    def tokens(self) -> int:
        return sum(chunk.tokens for chunk in self.chunks)
