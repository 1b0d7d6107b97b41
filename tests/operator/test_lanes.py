"""What runs, what waits, and what is forgotten."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from loraplane_core.identity import AdapterId, PoolRef, ReplicaId
from loraplane_operator.actions import Action, ObjectRef, RemoveReport, SetFinalizer, SetStatus, Warm
from loraplane_operator.lanes import WIDTHS, Lanes
from tests.operator.system import until


class Work:
    """Actions that run until they are told to end."""

    def __init__(self) -> None:
        self.now = 100.0
        self.begun: list[Action] = []
        self.ends = 0
        self._doors: dict[Action, asyncio.Event] = {}
        self.failing: set[Action] = set()
        self.lanes = Lanes(self._run, self._ended, clock=lambda: self.now)

    async def _run(self, action: Action) -> bool:
        self.begun.append(action)
        self._doors[action] = asyncio.Event()
        await self._doors[action].wait()
        return action not in self.failing

    def _ended(self) -> None:
        self.ends += 1

    async def want(self, *actions: Action) -> None:
        self.lanes.want(actions)
        await asyncio.sleep(0)

    async def finish(self, action: Action) -> None:
        before = self.ends
        self._doors[action].set()
        await until(lambda: self.ends > before)
        await asyncio.sleep(0)


@pytest.fixture
async def work() -> AsyncIterator[Work]:
    made = Work()
    yield made
    await made.lanes.close(0)


def status(name: str, generation: int = 1) -> SetStatus:
    return SetStatus(ObjectRef("LoRAAdapter", "default", name), f"uid-{name}", {"observedGeneration": generation})


def warm(name: str, ordinal: int = 0) -> Warm:
    replica = ReplicaId("default", "pool", ordinal)
    return Warm(replica, "boot", AdapterId("acme", name, 1, "d"), bytes=1, rank=8, pinned=False, drift=False, why="")


NAMES = [f"a{number:02d}" for number in range(WIDTHS["status"] + 3)]


async def test_no_more_run_than_the_outside_system_bears(work: Work) -> None:
    await work.want(*map(status, NAMES))
    assert work.begun == [status(name) for name in NAMES[: WIDTHS["status"]]]
    await work.finish(status(NAMES[0]))
    assert work.begun[-1] == status(NAMES[WIDTHS["status"]])


async def test_what_waits_is_done_in_its_newest_form_only(work: Work) -> None:
    await work.want(*map(status, NAMES))
    await work.want(*(status(name, generation=2) for name in NAMES))
    await work.finish(status(NAMES[0]))
    assert work.begun[-1] == status(NAMES[WIDTHS["status"]], generation=2)


async def test_what_the_latest_plan_does_not_hold_is_never_begun(work: Work) -> None:
    await work.want(*map(status, NAMES))
    await work.want()
    await work.finish(status(NAMES[0]))
    assert len(work.begun) == WIDTHS["status"]


async def test_who_waits_longest_is_next_whatever_the_order_of_the_plan(work: Work) -> None:
    await work.want(*map(status, NAMES))
    work.now += 5
    newcomer = status("a-first-in-the-plan")
    await work.want(newcomer, *map(status, NAMES[WIDTHS["status"] :]))
    assert work.lanes.oldest_seconds() == 5
    for name in NAMES[:3]:
        await work.finish(status(name))
    assert newcomer not in work.begun
    await work.finish(status(NAMES[3]))
    assert work.begun[-1] == newcomer


@pytest.mark.parametrize("fails", [False, True])
async def test_who_began_first_is_finished_first_unless_it_failed(work: Work, fails: bool) -> None:
    await work.want(*map(status, NAMES))
    work.now += 5
    if fails:
        work.failing.add(status(NAMES[0]))
    await work.finish(status(NAMES[0]))  # the first that waited takes its place
    follows = status(NAMES[0], generation=2)
    await work.want(follows, *map(status, NAMES[1:]))
    await work.finish(status(NAMES[1]))
    assert (work.begun[-1] == follows) is not fails
    for name in NAMES[2:5]:
        await work.finish(status(name))
    assert follows in work.begun


async def test_actions_of_one_lane_exclude_each_other(work: Work) -> None:
    first = SetFinalizer(ObjectRef("LoRAAdapter", "default", "a"), "uid-a", present=True, why="")
    second = SetFinalizer(first.ref, first.uid, present=False, why="")
    await work.want(first, second)
    await work.want(second)
    assert work.begun == [first]
    await work.finish(first)
    assert work.begun == [first]  # what waits is decided by the next plan
    await work.want(second)
    assert work.begun == [first, second]


async def test_hung_engine_or_flood_of_statuses_holds_up_nobody_else(work: Work) -> None:
    flood = [status(name) for name in NAMES]
    hung = [warm(name) for name in NAMES]
    others: list[Action] = [
        warm("x", ordinal=1),
        SetFinalizer(ObjectRef("LoRAAdapter", "default", "z"), "uid-z", present=True, why=""),
        RemoveReport(PoolRef("default", "pool"), why=""),
    ]
    await work.want(*flood, *hung, *others)
    assert set(others) <= set(work.begun)


async def test_close_lets_what_runs_finish_and_begins_nothing_more(work: Work) -> None:
    await work.want(*map(status, NAMES))
    closing = asyncio.create_task(work.lanes.close(grace=5))
    await asyncio.sleep(0)
    for name in NAMES[: WIDTHS["status"]]:
        await work.finish(status(name))
    async with asyncio.timeout(1):
        await closing
    assert len(work.begun) == WIDTHS["status"]


async def test_close_cancels_what_does_not_finish_in_time(work: Work) -> None:
    await work.want(status("a"))
    async with asyncio.timeout(2):
        await work.lanes.close(grace=0.05)
    assert not work.lanes.busy("status/uid-a")
