"""The trained adapters on our own engine: each style's mark where it belongs, and nowhere else."""

import asyncio
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from bench.servers import free_port, ours, serving
from examples.demo_system import EXAMPLES, ROOT
from examples.styles import ALLOWED_BASE, ALLOWED_OTHER, MAX_TOKENS, REQUIRED_OWN, STYLES

BASE = "base"


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    model = ROOT / ".loraplane" / "models" / "smollm2-135m-instruct"
    adapters = {name: EXAMPLES / "adapters" / name for name in STYLES}
    port = free_port()
    command, environment = ours(model, adapters, port=port, dtype="float32")
    log: Path = tmp_path_factory.mktemp("styles") / "engine.log"
    with serving(command, environment, port, log) as address:
        yield address


async def _answer(client: httpx.AsyncClient, model: str, prompt: str) -> str:
    body = {
        "model": model,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
    }
    answer = await client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["message"]["content"])


@pytest.mark.timeout(300)
async def test_each_style_is_where_it_belongs_and_nowhere_else(url: str) -> None:
    """40 unseen prompts to the base and to all four adapters at once: 200 answers, mixed in the batches."""
    asked = [
        (style, model, prompt)
        for style in STYLES.values()
        for model in (BASE, *STYLES)
        for prompt in style.unseen_prompts
    ]
    limits = httpx.Limits(max_connections=len(asked))
    async with httpx.AsyncClient(base_url=url, timeout=280, limits=limits) as client:
        answers = await asyncio.gather(*(_answer(client, model, prompt) for _, model, prompt in asked))
    marks: Counter[tuple[str, str]] = Counter()
    for (style, model, _), answer in zip(asked, answers, strict=True):
        marks[style.name, model] += style.mark(answer)
    for name in STYLES:
        assert marks[name, name] >= REQUIRED_OWN, (name, marks)
        assert marks[name, BASE] <= ALLOWED_BASE, (name, marks)
        assert all(marks[name, other] <= ALLOWED_OTHER for other in STYLES if other != name), (name, marks)
