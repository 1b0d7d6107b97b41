"""News is gathered, and a loop that hangs is told."""

import asyncio
import time

import httpx
import pytest

from loraplane_operator import health
from loraplane_operator.health import STALLED_SECONDS
from loraplane_operator.reconcile import Wakeup


async def test_news_of_one_burst_is_one_wakeup_and_its_age_is_that_of_the_oldest() -> None:
    wakeup = Wakeup()
    assert wakeup.age_seconds() == 0
    wakeup.set()
    first = wakeup.age_seconds()
    for _ in range(1000):
        wakeup.set()
    assert wakeup.age_seconds() >= first
    async with asyncio.timeout(1):
        await wakeup.wait(seconds=30, gather=0)
    assert wakeup.age_seconds() == 0
    began = time.monotonic()
    await wakeup.wait(seconds=0.05, gather=0)
    assert time.monotonic() - began >= 0.05


async def test_what_comes_while_gathering_is_in_the_same_pass() -> None:
    wakeup = Wakeup()
    wakeup.set()
    waiting = asyncio.create_task(wakeup.wait(seconds=30, gather=0.1))
    await asyncio.sleep(0.02)
    wakeup.set()
    await waiting
    assert wakeup.age_seconds() == 0


@pytest.mark.parametrize(
    ("quiet", "passed", "live", "ready"),
    [(0.0, True, 200, 200), (STALLED_SECONDS + 1, True, 503, 200), (1.0, False, 200, 503)],
)
async def test_a_loop_that_hangs_is_not_live_and_one_without_a_view_is_not_ready(
    quiet: float, passed: bool, live: int, ready: int
) -> None:
    turned = time.monotonic() - quiet
    serving = health.serve("127.0.0.1", 0, passed_at=lambda: turned if passed else 0.0, turned_at=lambda: turned)
    async with serving as port, httpx.AsyncClient(trust_env=False) as http:
        assert (await http.get(f"http://127.0.0.1:{port}/health/live")).status_code == live
        assert (await http.get(f"http://127.0.0.1:{port}/health/ready")).status_code == ready
        assert "loraplane_operator_queue_age_seconds" in (await http.get(f"http://127.0.0.1:{port}/metrics")).text
