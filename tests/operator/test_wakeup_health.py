"""News is gathered, and a loop that hangs is told."""

import asyncio
import time
from collections.abc import Callable
from typing import cast

import httpx
import pytest

from loraplane_operator import health
from loraplane_operator.cluster.port import Cluster
from loraplane_operator.health import STALLED_SECONDS
from loraplane_operator.reconcile import Reconciler, Wakeup
from tests.operator.eventually import eventually


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


class Stuck:
    """A cluster whose view does not come while `gate` is closed."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.asked = 0

    def subscribe(self, wake: Callable[[], None], returned: Callable[[], None]) -> None:
        self._wake = wake

    async def run(self) -> None:
        while True:
            self._wake()
            await asyncio.sleep(0.01)

    async def observe(self) -> None:
        self.asked += 1
        await self.gate.wait()


async def test_loop_that_hangs_in_a_pass_stops_being_live_until_it_turns_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "STALLED_SECONDS", 0.3)
    cluster = Stuck()
    made = Reconciler(
        cast(Cluster, cluster), registry_url="http://127.0.0.1:1", master=bytes(32), artifacts_url="http://127.0.0.1:1"
    )
    running = asyncio.create_task(made.run())
    serving = health.serve("127.0.0.1", 0, passed_at=lambda: made.passed_at, turned_at=lambda: made.turned_at)
    async with serving as port, httpx.AsyncClient(trust_env=False) as http:

        async def live(wanted: int) -> bool:
            return (await http.get(f"http://127.0.0.1:{port}/health/live")).status_code == wanted

        await eventually(lambda: live(503))
        assert cluster.asked == 1
        cluster.gate.set()
        await eventually(lambda: live(200))
        assert (await http.get(f"http://127.0.0.1:{port}/health/ready")).status_code == 503
        made.stop()
        await running
