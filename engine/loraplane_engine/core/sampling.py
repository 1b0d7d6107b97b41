"""From logits to tokens, for the whole batch at once. Plain greedy rows cost one argmax.

A sampled row draws one uniform number from its own generator and inverts the CDF in vocabulary order, so its
result depends on its logits and seed, not on the batch it runs in.
"""

import random
from collections.abc import Sequence as Rows
from typing import NamedTuple

import numpy as np
import torch

from loraplane_engine.messages import SamplingParams, TokenLogprob

#: Nucleus candidates looked at before the whole row is sorted.
_NUCLEUS = 1024


class SamplingState:
    """What one request carries from token to token. Survives preemption."""

    def __init__(self, params: SamplingParams, prompt: np.ndarray, vocabulary: int) -> None:
        self.params = params
        self.greedy = params.temperature == 0.0
        self.penalised = bool(params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0)
        self.generator = None if self.greedy else random.Random(params.seed)  # noqa: S311 - sampling, not secrets
        self.counts: torch.Tensor | None = None  # of output tokens, [vocabulary]
        self.seen: torch.Tensor | None = None  # in prompt or output, [vocabulary]
        if self.penalised:
            self.counts = torch.zeros(vocabulary)
            self.seen = torch.zeros(vocabulary, dtype=torch.bool)
            self.seen[torch.from_numpy(prompt)] = True

    def accept(self, token: int) -> None:
        if self.counts is not None and self.seen is not None:
            self.counts[token] += 1
            self.seen[token] = True


class SampleRow(NamedTuple):
    """`forbidden` are token ids that may not come yet (min_tokens)."""

    state: SamplingState
    forbidden: tuple[int, ...]


class Sampled(NamedTuple):
    """`finite` is False where the logits hold NaN or +infinity: the token there means nothing."""

    tokens: list[int]
    finite: list[bool]
    logprobs: list[TokenLogprob | None]


def sample(logits: torch.Tensor, rows: Rows[SampleRow]) -> Sampled:
    """`logits` fp32 [rows, vocabulary]; left unchanged. Logprobs are those of the unmodified distribution."""
    special = [i for i, row in enumerate(rows) if not row.state.greedy or row.state.penalised or row.forbidden]
    tokens = logits.argmax(dim=-1)
    finite = torch.isfinite(logits.gather(1, tokens.unsqueeze(1))).squeeze(1)
    if special:
        chosen = [rows[i] for i in special]
        tokens[special] = _sample_special(logits[special], chosen)
    picked = tokens.tolist()
    return Sampled(picked, finite.tolist(), _logprobs(logits, picked, [row.state.params.logprobs for row in rows]))


def _sample_special(logits: torch.Tensor, rows: Rows[SampleRow]) -> torch.Tensor:
    """Changes `logits`."""
    for index, row in enumerate(rows):
        if row.forbidden:
            logits[index, list(row.forbidden)] = -torch.inf
    penalised = [i for i, row in enumerate(rows) if row.state.penalised]
    if penalised:
        logits[penalised] = _penalise(logits[penalised], [rows[i].state for i in penalised])
    tokens = logits.argmax(dim=-1)
    drawn = [i for i, row in enumerate(rows) if row.state.generator is not None]
    if drawn:
        tokens[drawn] = _draw(logits[drawn], [rows[i].state for i in drawn])
    return tokens


def _penalise(logits: torch.Tensor, states: Rows[SamplingState]) -> torch.Tensor:
    """Repetition as in CTRL (prompt and output), then frequency and presence as OpenAI documents them (output)."""
    counts = torch.stack([state.counts for state in states if state.counts is not None]).to(logits.device)
    seen = torch.stack([state.seen for state in states if state.seen is not None]).to(logits.device)
    repetition = _column([state.params.repetition_penalty for state in states], logits)
    logits = torch.where(seen, torch.where(logits > 0, logits / repetition, logits * repetition), logits)
    logits = logits - _column([state.params.frequency_penalty for state in states], logits) * counts
    return logits - _column([state.params.presence_penalty for state in states], logits) * (counts > 0)


def _draw(logits: torch.Tensor, states: Rows[SamplingState]) -> torch.Tensor:
    logits = logits / _column([max(state.params.temperature, 1e-5) for state in states], logits)
    limited = [i for i, state in enumerate(states) if state.params.top_k > 0 or state.params.top_p < 1.0]
    if limited:
        floor = _floor(logits[limited], [states[i].params for i in limited])
        logits[limited] = logits[limited].masked_fill(logits[limited] < floor, -torch.inf)
    # Double, or the tail of a CDF over a large vocabulary is lost.
    cdf = torch.softmax(logits.double(), dim=-1).cumsum(dim=-1)
    uniform = torch.tensor([[state.generator.random()] for state in states if state.generator], dtype=torch.float64)
    found = torch.searchsorted(cdf, uniform.to(cdf.device) * cdf[:, -1:], right=True).squeeze(1)
    # Rounding may put the last draw behind the last token that is possible.
    last = logits.shape[1] - 1 - (logits > -torch.inf).flip(1).int().argmax(dim=-1)
    return torch.minimum(found, last)


def _floor(logits: torch.Tensor, params: Rows[SamplingParams]) -> torch.Tensor:
    """Per row the smallest logit that top_k, then top_p leave in, [rows, 1]."""
    vocabulary = logits.shape[1]
    ks = [min(p.top_k, vocabulary) if p.top_k > 0 else vocabulary for p in params]
    width = min(vocabulary, max(_NUCLEUS, *(k for k in ks if k < vocabulary), 1))
    top_p = _column([p.top_p for p in params], logits)
    while True:
        values = logits.topk(width, dim=-1).values
        k = torch.tensor(ks, device=logits.device).clamp(max=width).unsqueeze(1)
        total = torch.logsumexp(
            values.masked_fill(torch.arange(width, device=logits.device) >= k, -torch.inf), dim=-1, keepdim=True
        )
        whole = torch.tensor([[full == vocabulary] for full in ks], device=logits.device)
        total = torch.where(whole, torch.logsumexp(logits, dim=-1, keepdim=True), total)
        mass = torch.exp(values - total).cumsum(dim=-1)
        # The nucleus is the shortest prefix whose mass reaches top_p; rows with top_p 1 are bounded by k alone.
        kept = torch.where(top_p < 1.0, (mass < top_p).sum(dim=-1, keepdim=True) + 1, torch.full_like(k, vocabulary))
        kept = torch.minimum(kept, torch.where(whole, torch.full_like(k, vocabulary), k))
        reached = (kept <= width) | (top_p >= 1.0)
        if width == vocabulary or bool(reached.all()):
            floor = values.gather(1, kept.clamp(max=width) - 1)
            return torch.where(whole & (top_p >= 1.0), torch.full_like(floor, -torch.inf), floor)
        width = vocabulary


def _column(values: list[float], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device).unsqueeze(1)


def _logprobs(logits: torch.Tensor, tokens: list[int], wanted: list[int | None]) -> list[TokenLogprob | None]:
    found: list[TokenLogprob | None] = [None] * len(tokens)
    rows = [i for i, count in enumerate(wanted) if count is not None]
    if rows:
        entries = logprobs_of(logits[rows], [tokens[i] for i in rows], [wanted[i] or 0 for i in rows])
        for index, entry in zip(rows, entries, strict=True):
            found[index] = entry
    return found


def logprobs_of(logits: torch.Tensor, tokens: Rows[int], counts: Rows[int]) -> list[TokenLogprob]:
    """Per row the token's logprob and the `counts[row]` likeliest alternatives."""
    logprobs = torch.log_softmax(logits, dim=-1)
    own = logprobs.gather(1, torch.tensor(tokens, device=logits.device).unsqueeze(1)).squeeze(1).tolist()
    most = min(max(counts, default=0), logits.shape[1])
    values, indices = logprobs.topk(most, dim=-1) if most else (logprobs[:, :0], logprobs[:, :0].long())
    return [
        TokenLogprob(token=token, logprob=logprob, top=list(zip(ids[:count], tops[:count], strict=True)))
        for token, logprob, tops, ids, count in zip(tokens, own, values.tolist(), indices.tolist(), counts, strict=True)
    ]
