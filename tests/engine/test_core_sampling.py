"""Sampling: what each parameter promises, and that a row's result does not depend on its neighbours."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

from loraplane_engine.core.sampling import SampleRow, SamplingState, sample
from loraplane_engine.messages import SamplingParams

VOCABULARY = 64
PROMPT = np.array([5, 6, 7])


def row(forbidden: tuple[int, ...] = (), **params: Any) -> SampleRow:
    settings = SamplingParams(**{"max_tokens": 8, **params})
    return SampleRow(SamplingState(settings, PROMPT, VOCABULARY), forbidden)


def logits_of(*values: float) -> torch.Tensor:
    return torch.tensor([[*values, *[-20.0] * (VOCABULARY - len(values))]])


def random_logits(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 2


def test_greedy_is_the_best_token() -> None:
    logits = random_logits(5)
    assert sample(logits, [row(temperature=0.0)] * 5).tokens == logits.argmax(-1).tolist()


def test_logits_are_left_unchanged() -> None:
    logits = random_logits(3)
    before = logits.clone()
    sample(logits, [row(temperature=0.7, top_p=0.5), row((1, 2), temperature=0.0), row(presence_penalty=1.0)])
    assert torch.equal(logits, before)


def test_a_seed_gives_the_same_tokens_alone_and_in_any_batch() -> None:
    steps = [random_logits(1, seed) for seed in range(12)]

    def alone() -> list[int]:
        own = row(temperature=1.0, seed=42, top_p=0.9)
        return [sample(step, [own]).tokens[0] for step in steps]

    def mixed() -> list[int]:
        own, others = row(temperature=1.0, seed=42, top_p=0.9), [row(temperature=0.0), row(top_k=3), row(seed=1)]
        found = []
        for number, step in enumerate(steps):
            place = number % 4
            rows = [*others[:place], own, *others[place:]]
            batch = torch.cat([random_logits(place, 99), step, random_logits(3 - place, 98)])
            found.append(sample(batch, rows).tokens[place])
        return found

    assert alone() == mixed()
    other = row(temperature=1.0, seed=43, top_p=0.9)
    assert alone() != [sample(step, [other]).tokens[0] for step in steps]


def test_frequencies_follow_the_distribution() -> None:
    logits = logits_of(2.0, 1.0, 0.0, -1.0)
    own = row(temperature=1.0, seed=7)
    draws = 4000
    counts = Counter(sample(logits, [own]).tokens[0] for _ in range(draws))
    expected = torch.softmax(logits[0], 0)
    for token in range(4):
        assert counts[token] / draws == pytest.approx(expected[token].item(), abs=0.03)


@pytest.mark.parametrize(
    ("params", "allowed"),
    [
        ({"top_k": 1}, {0}),
        ({"top_k": 2}, {0, 1}),
        ({"top_p": 0.6}, {0}),  # token 0 has 0.64
        ({"top_p": 0.65}, {0, 1}),
        ({"top_p": 0.9}, {0, 1, 2}),
        ({"top_k": 2, "top_p": 0.75}, {0, 1}),  # of the two kept, token 0 has 0.73
        ({"top_k": 2, "top_p": 0.7}, {0}),
        ({"top_p": 1e-9}, {0}),
        ({"temperature": 0.01}, {0}),
    ],
)
def test_only_allowed_tokens_come(params: dict[str, Any], allowed: set[int]) -> None:
    logits = logits_of(3.0, 2.0, 1.0, 0.0)
    own = row(**{"seed": 3, **params})
    assert {sample(logits, [own]).tokens[0] for _ in range(300)} == allowed


def test_a_nucleus_wider_than_the_first_look_is_found() -> None:
    vocabulary = 3000
    state = SamplingState(SamplingParams(max_tokens=1, top_p=0.9, seed=5), PROMPT, vocabulary)
    logits = torch.zeros(1, vocabulary)  # 2700 tokens make 0.9 of it
    assert len({sample(logits, [SampleRow(state, ())]).tokens[0] for _ in range(1500)}) > 1024


def test_forbidden_tokens_do_not_come() -> None:
    logits = logits_of(9.0, 8.0, 1.0)
    assert sample(logits, [row((0,), temperature=0.0)]).tokens == [1]
    own = row((0, 1), temperature=1.0, seed=1)
    assert all(sample(logits, [own]).tokens[0] not in (0, 1) for _ in range(50))


def test_penalties_act_on_what_has_come() -> None:
    logits = logits_of(2.0, 1.5, 1.0).repeat(2, 1)
    presence, frequency = row(temperature=0.0, presence_penalty=1.0), row(temperature=0.0, frequency_penalty=0.3)
    assert sample(logits, [presence, frequency]).tokens == [0, 0]
    for own in (presence, frequency):
        own.state.accept(0)
    assert sample(logits, [presence, frequency]).tokens == [1, 0]
    frequency.state.accept(0)
    assert sample(logits, [presence, frequency]).tokens == [1, 1]


def test_repetition_penalty_counts_the_prompt() -> None:
    logits = torch.full((1, VOCABULARY), -5.0)
    logits[0, 5], logits[0, 9] = 2.0, 1.5  # 5 stands in the prompt
    assert sample(logits, [row(temperature=0.0, repetition_penalty=1.0)]).tokens == [5]
    assert sample(logits, [row(temperature=0.0, repetition_penalty=1.5)]).tokens == [9]


def test_logprobs_are_those_of_the_model_whatever_the_sampling() -> None:
    logits = random_logits(2)
    sampled = sample(logits, [row(temperature=0.3, top_k=2, logprobs=3, seed=1), row(temperature=0.0)])
    entry = sampled.logprobs[0]
    assert entry is not None and sampled.logprobs[1] is None
    expected = torch.log_softmax(logits[0], -1)
    assert entry.token == sampled.tokens[0]
    assert entry.logprob == pytest.approx(expected[entry.token].item(), abs=1e-5)
    assert [token for token, _ in entry.top] == expected.topk(3).indices.tolist()


def test_nan_is_reported_for_its_row_alone() -> None:
    logits = random_logits(3)
    logits[1, 4] = torch.nan
    assert sample(logits, [row(temperature=0.0), row(temperature=0.0), row(seed=1)]).finite == [True, False, True]
