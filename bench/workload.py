"""The load: N streamed completions at once, adapters in turn, against any OpenAI-compatible engine.

Bounded in count and time; it stops by itself.
"""

import asyncio
import json
import statistics
import time
from dataclasses import dataclass

import httpx

PROMPT = "Write a long story about a robot."
DEADLINE_S = 600.0


@dataclass(frozen=True)
class Cell:
    """One line of the comparison. Rates are generated tokens per second over all requests."""

    name: str
    tokens_per_second: float  # median over the rounds
    rounds: list[float]
    ttft_p50: float  # seconds, of the last round
    ttft_max: float


async def measure(url: str, name: str, models: list[str], *, requests: int, tokens: int, rounds: int) -> Cell:
    """`rounds` measured rounds after one that warms up. Raises RuntimeError on any answer but 200."""
    rates: list[float] = []
    firsts: list[float] = []
    limits = httpx.Limits(max_connections=requests)
    async with httpx.AsyncClient(base_url=url, timeout=DEADLINE_S, limits=limits) as client:
        for number in range(rounds + 1):
            start = time.perf_counter()
            answers = await asyncio.gather(
                *(_complete(client, models[i % len(models)], tokens) for i in range(requests))
            )
            seconds = time.perf_counter() - start
            if number:
                rates.append(round(sum(count for _, count in answers) / seconds, 1))
            firsts = sorted(first for first, _ in answers)
    return Cell(name, statistics.median(rates), rates, round(firsts[len(firsts) // 2], 3), round(firsts[-1], 3))


async def _complete(client: httpx.AsyncClient, model: str, tokens: int) -> tuple[float, int]:
    """(seconds to the first token, completion tokens as the server counts them)"""
    body = {
        "model": model,
        "prompt": PROMPT,
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    start = time.perf_counter()
    first = 0.0
    counted = 0
    async with client.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != 200:
            raise RuntimeError(f"{model}: {response.status_code} {(await response.aread())[:300]!r}")
        async for line in response.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            event = json.loads(line.removeprefix("data: "))
            if event.get("choices") and not first:
                first = time.perf_counter() - start
            counted = (event.get("usage") or {}).get("completion_tokens", counted)
    return first, counted
