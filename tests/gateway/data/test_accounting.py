"""The usage queue and the bound on metric labels."""

import asyncio
import datetime
from collections.abc import Sequence

import pytest

from loraplane_gateway.data import accounting, metrics
from loraplane_gateway.data.accounting import UsageLog
from loraplane_gateway.data.metrics import IDLE_SECONDS, OTHER, TOP, Metrics, TopLabels
from loraplane_gateway.db.serving import UsageEvent
from tests.gateway.data.harness import until

pytestmark = pytest.mark.timeout(30)


def _event(number: int) -> UsageEvent:
    at = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
    return UsageEvent(f"r-{number}", at, "acme", "k", "m/one", "base", "pirate", 1, 200, 7, 3)


class Store:
    def __init__(self) -> None:
        self.batches: list[list[str]] = []
        self.failures = 0

    async def add_usage(self, events: Sequence[UsageEvent]) -> None:
        if self.failures:
            self.failures -= 1
            raise OSError("away")
        self.batches.append([event.request_id for event in events])


async def test_events_are_written_in_batches_and_again_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accounting, "FLUSH_SECONDS", 0.01)
    monkeypatch.setattr(accounting, "RETRY_SECONDS", 0.01)
    store = Store()
    store.failures = 2
    usage = UsageLog(store, lambda: None)
    for number in range(accounting.BATCH + 10):
        usage.add(_event(number))
    job = asyncio.create_task(usage.run())
    await until(lambda: len(usage) == 0)
    job.cancel()
    assert [len(batch) for batch in store.batches] == [accounting.BATCH, 10]
    usage.add(_event(9999))
    await usage.close()
    assert store.batches[-1] == ["r-9999"]


async def test_the_queue_is_bounded_and_what_it_loses_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accounting, "QUEUE_MAX", 3)
    lost = []
    store = Store()
    usage = UsageLog(store, lambda: lost.append(1))
    for number in range(5):
        usage.add(_event(number))
    await usage.close()
    assert store.batches == [["r-2", "r-3", "r-4"]] and len(lost) == 2


def test_labels_are_bounded_and_an_idle_pair_makes_room() -> None:
    now = 0.0
    forgotten: list[tuple[str, str]] = []
    labels = TopLabels(forgotten.append, lambda: now)
    for number in range(TOP):
        assert labels.of("acme", f"a{number}") == ("acme", f"a{number}")
    assert labels.of("acme", "one-more") == OTHER
    assert labels.of("acme", "a0") == ("acme", "a0")
    now += IDLE_SECONDS
    assert labels.of("acme", "one-more") == ("acme", "one-more")
    assert forgotten == [("acme", "a1")]


def test_a_forgotten_pair_leaves_no_series(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "TOP", 1)
    monkeypatch.setattr(metrics, "IDLE_SECONDS", 0.0)
    found = Metrics()
    found.served("acme", "a", 200, 0.1)
    found.settled("acme", "a", 1, 2)
    found.served("acme", "b", 503, None)
    tenants = {
        (sample.labels.get("adapter"))
        for family in found.registry.collect()
        for sample in family.samples
        if "adapter" in sample.labels
    }
    assert tenants == {"b"}
