"""What succeeds and changes nothing is not repeated for ever at full speed, nor is a quarrel with another writer."""

from collections.abc import AsyncIterator, Mapping
from typing import Any, cast

import pytest

from loraplane_core.identity import AdapterId
from loraplane_operator.actions import Action, Mark, Note, ObjectRef, SetStatus, Warm
from loraplane_operator.cluster.port import Cluster
from loraplane_operator.engines.fleet import Fleet
from loraplane_operator.execute import (
    BURST,
    LOADS,
    LOADS_SECONDS,
    NO_EFFECT,
    SETTLE_SECONDS,
    WINDOW_SECONDS,
    Executor,
)
from loraplane_operator.notebook import Notebook
from loraplane_operator.registry.client import RegistryClient
from tests.operator.plans import HOME, failed, status
from tests.operator.worlds import engine, with_engines, world

PIRATE = ObjectRef("LoRAAdapter", "default", "pirate")
ID = AdapterId("acme", "pirate", 1, "1" * 64)
WARM = Warm(HOME, "boot", ID, 1, 1, pinned=False, drift=False, why="")
MARK = Mark(HOME, "boot", ID, pinned=True, warm=True, why="")


class Bench:
    """An executor whose every action succeeds, with a clock of the test's."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.notebook = Notebook()
        self.done: list[float] = []
        self.statuses: list[Mapping[str, Any]] = []
        self.executor = Executor(
            cluster=cast(Cluster, self),
            registry=cast(RegistryClient, None),
            fleet=cast(Fleet, self),
            notebook=self.notebook,
            master=b"",
            wake=lambda: None,
            clock=lambda: self.now,
        )

    def client(self, _: object) -> "Bench":
        return self

    async def warm(self, *_: object, **__: object) -> None:
        self.done.append(self.now)

    async def mark(self, *_: object, **__: object) -> None:
        self.done.append(self.now)

    async def patch_status(self, ref: ObjectRef, uid: str, status: Mapping[str, Any]) -> None:
        self.statuses.append(status)

    async def emit(self, note: Note) -> None:
        pass

    async def plans(self, *actions: Action, seconds: float) -> None:
        """The same plan again and again, every tenth of a second."""
        until = self.now + seconds
        while self.now < until:
            self.executor.submit(actions)
            await self.executor.idle()
            self.now += 0.1


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    made = Bench()
    yield made
    await made.executor.close()


@pytest.mark.parametrize("action", [WARM, MARK])
async def test_what_has_no_effect_is_done_ever_more_rarely_and_told(bench: Bench, action: Action) -> None:
    await bench.plans(action, seconds=120)
    pauses = [later - sooner for sooner, later in zip(bench.done, bench.done[1:], strict=False)]
    assert pauses[0] == pytest.approx(SETTLE_SECONDS, abs=0.11)
    assert len(bench.done) <= 12
    assert max(pauses) >= 10
    assert bench.notebook.failures[action].code == NO_EFFECT


async def test_an_effect_that_shows_a_little_late_is_not_told_as_missing(bench: Bench) -> None:
    await bench.plans(WARM, seconds=1.5 * SETTLE_SECONDS)
    assert len(bench.done) == 2
    assert bench.notebook.failures == {}


async def test_what_had_its_effect_is_done_again_as_soon_as_it_is_needed(bench: Bench) -> None:
    """An engine that loses it again and again gets it back each time within seconds."""
    for _ in range(10):
        await bench.plans(WARM, seconds=0.1)
        await bench.plans(seconds=SETTLE_SECONDS)  # not planned: it is there
    assert len(bench.done) == 10
    assert bench.notebook.failures == {}


async def test_an_engine_that_takes_it_and_loses_it_again_and_again_is_given_it_ever_more_rarely(bench: Bench) -> None:
    for _ in range(100):
        await bench.plans(WARM, seconds=0.1)
        await bench.plans(seconds=SETTLE_SECONDS)  # there, and then not
    seconds = bench.now - 1000.0
    assert LOADS <= len(bench.done) <= LOADS * (1 + seconds / LOADS_SECONDS)
    await bench.plans(WARM, seconds=LOADS_SECONDS)
    assert bench.done[-1] > bench.now - LOADS_SECONDS


async def test_a_status_over_which_two_quarrel_is_written_only_so_often(bench: Bench) -> None:
    for number in range(200):
        await bench.plans(SetStatus(PIRATE, "uid", {"said": number}), seconds=0.1)
    seconds = 20.0
    assert len(bench.statuses) <= BURST * (1 + seconds / WINDOW_SECONDS)
    await bench.plans(SetStatus(PIRATE, "uid", {"said": "last"}), seconds=WINDOW_SECONDS)
    assert bench.statuses[-1] == {"said": "last"}


async def test_a_few_changes_of_a_status_are_written_at_once(bench: Bench) -> None:
    for number in range(BURST):
        await bench.plans(SetStatus(PIRATE, "uid", {"said": number}), seconds=0.1)
    assert [each["said"] for each in bench.statuses] == list(range(BURST))


def test_the_object_says_that_an_engine_does_not_do_what_it_answers() -> None:
    seen = failed(world(**with_engines(engine(0), engine(1))), Warm, NO_EFFECT)
    (ready,) = [each for each in status(seen)["conditions"] if each["type"] == "Ready"]
    assert (ready["status"], ready["reason"]) == ("False", "NoEffect")
