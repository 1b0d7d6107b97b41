"""Which actions run, and which wait: one per lane, and not more at a time than the outside system bears.

What waits is what the latest plan says. A plan made while an engine hung, or while a thousand statuses were
being written, is carried out in its newest form only, and what it no longer holds is never begun.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable

from loraplane_operator.actions import Action, Mark, SetFinalizer, SetStatus, Warm, Withdraw

#: At a time per outside system. The API server and the registry answer in milliseconds, so that more would
#: only queue there, before the requests of others. Engines convert artifacts: few at a time each.
WIDTHS = {"engine": 8, "registry": 8, "finalizer": 8, "status": 8, "workload": 8}
#: Gates of what goes to the API server, or to the supervisor.
CLUSTER_GATES = frozenset({"finalizer", "status", "workload"})


class Lanes:
    """Owns the tasks of running actions; `run` must not raise, and tells whether it succeeded. `ended` is called
    after each.

    Whoever has had work for longest goes first, so that of a thousand new objects the first are finished before
    the last are begun. A lane that failed goes to the end: what cannot succeed keeps nobody waiting.
    """

    def __init__(
        self,
        run: Callable[[Action], Awaitable[bool]],
        ended: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._run = run
        self._ended = ended
        self._clock = clock
        self._running: dict[str, asyncio.Task[bool]] = {}
        self._at_work: Counter[str] = Counter()  # running actions by gate
        self._waiting: dict[str, dict[str, Action]] = {}  # by gate, then by lane, the longest waiting first
        self._since: dict[str, float] = {}  # lane -> when it began to wait
        self._turns: dict[str, float] = {}  # lane -> since when it has had work, without a failure
        self._closed = False

    def busy(self, lane: str) -> bool:
        return lane in self._running

    def want(self, actions: Iterable[Action]) -> None:
        """Begin these as room allows; what waited before and is not among them is forgotten.

        Of several for one lane the first counts, and none whose lane is busy: its end wakes the loop.
        """
        now = self._clock()
        wanted: dict[str, Action] = {}
        for action in actions:
            if action.lane not in self._running:
                wanted.setdefault(action.lane, action)
        self._since = {lane: self._since.get(lane, now) for lane in wanted}
        self._turns = {lane: self._turns.get(lane, now) for lane in [*wanted, *self._running]}
        self._waiting = {}
        for lane in sorted(wanted, key=self._turns.__getitem__):
            self._waiting.setdefault(gate(wanted[lane]), {})[lane] = wanted[lane]
        for name in list(self._waiting):
            self._fill(name)

    def oldest_seconds(self) -> float:
        """For how long the action that waits longest has been waiting; 0 when none does."""
        return self._clock() - min(self._since.values()) if self._since else 0.0

    async def idle(self) -> None:
        """Until nothing runs."""
        while self._running:
            await asyncio.wait(list(self._running.values()))

    async def close(self, grace: float) -> None:
        """Begin nothing more, let what runs finish within `grace` seconds, and cancel the rest."""
        self._closed = True
        self._waiting, self._since = {}, {}
        running = list(self._running.values())
        if running:
            await asyncio.wait(running, timeout=grace)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    def _fill(self, name: str) -> None:
        waiting = self._waiting.get(name, {})
        while waiting and not self._closed and self._at_work[name] < WIDTHS[name.partition("/")[0]]:
            lane = next(iter(waiting))
            self._begin(name, lane, waiting.pop(lane))

    def _begin(self, name: str, lane: str, action: Action) -> None:
        self._since.pop(lane, None)
        self._at_work[name] += 1
        task = asyncio.ensure_future(self._run(action))
        self._running[lane] = task
        task.add_done_callback(lambda ended: self._end(name, lane, ended))

    def _end(self, name: str, lane: str, task: asyncio.Task[bool]) -> None:
        del self._running[lane]
        if task.cancelled() or task.exception() or not task.result():
            self._turns.pop(lane, None)
        self._at_work[name] -= 1
        self._fill(name)
        self._ended()


def gate(action: Action) -> str:
    """The outside system whose patience an action uses. Engines have one gate each, so that a hung one holds up
    nobody else; finalizers go beside statuses, so that a thousand of these do not keep an object from going."""
    match action:
        case Warm() | Mark() | Withdraw():
            return f"engine/{action.replica}"
        case SetFinalizer():
            return "finalizer"
        case SetStatus():
            return "status"
        case _:
            kind = action.lane.partition("/")[0]
            return "workload" if kind == "workload" else "registry"
