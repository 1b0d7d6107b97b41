"""Carries out plans: dumb, idempotent, side by side (lanes.py). A deadline on each action,
back-off per action; what succeeded a moment ago is not repeated before its effect can have been observed.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from loraplane_core import credentials
from loraplane_core.errors import LoraplaneError, render
from loraplane_core.identity import PoolRef
from loraplane_core.wire.supervisor import EngineCredentials
from loraplane_operator import faults, metrics
from loraplane_operator.actions import (
    Action,
    ActivateVersion,
    ApplyWorkload,
    ClaimAdapter,
    ConfirmWarm,
    DeleteWorkload,
    Mark,
    Note,
    Register,
    ReleaseClaim,
    RemoveReport,
    ReportPool,
    RestartReplica,
    SetFinalizer,
    SetStatus,
    SplitTraffic,
    Warm,
    Withdraw,
    WorkloadSpec,
)
from loraplane_operator.backoff import Backoff
from loraplane_operator.cluster.port import Cluster
from loraplane_operator.engines.fleet import Fleet
from loraplane_operator.faults import Fault
from loraplane_operator.lanes import CLUSTER_GATES, Lanes, gate
from loraplane_operator.notebook import Notebook
from loraplane_operator.registry.client import RegistryClient
from loraplane_operator.subjects import Subjects
from loraplane_operator.words import Failure

log = logging.getLogger(__name__)

RETRY = Backoff(first=0.5, cap=30.0)
#: The feed and /state show an effect well within this; until then an equal action would only repeat it.
SETTLE_SECONDS = 1.0
#: And after that, while none shows: an engine that says it did and did not, a feed that stands still.
AGAIN = Backoff(first=SETTLE_SECONDS, cap=30.0)
#: Writes of one object within WINDOW_SECONDS. Who needs more of them quarrels with another manager.
BURST, WINDOW_SECONDS = 20, 10.0
#: Loads of one version on one engine within LOADS_SECONDS. One that needs more of them loses it again and again.
LOADS, LOADS_SECONDS = 10, 60.0
#: What an engine was told and answered well so often, although its /state never shows it. Fewer times may be the
#: slowness of a busy machine.
NO_EFFECT, TOLD_TIMES = "no_effect", 3
#: A status that may be over in a moment is written after this long: a burst of objects costs one write each,
#: not one per phase, and a restart of the operator, which has heard no engine yet, none at all.
PASSING_SECONDS = 5.0
#: A bound over every deadline below it, so that no lane stays busy for ever.
ACTION_SECONDS = 90.0


@dataclass(frozen=True, slots=True)
class _Done:
    """An action that succeeded `times` times while every plan since has held it."""

    times: int
    until: float  # not again before


class Executor:
    """`wake` is called when an action ends."""

    def __init__(
        self,
        *,
        cluster: Cluster,
        registry: RegistryClient,
        fleet: Fleet,
        notebook: Notebook,
        master: bytes,
        wake: Callable[[], None],
        clock: Callable[[], float] = time.time,
        fault: Fault = faults.none,
        subjects: Subjects | None = None,
    ) -> None:
        self._cluster = cluster
        self._registry = registry
        self._fleet = fleet
        self._notebook = notebook
        self._master = master
        self._clock = clock
        self._fault = fault
        self._subjects = subjects or Subjects()
        self._done: dict[Action, _Done] = {}
        self._recent: dict[str, list[float]] = {}  # lanes -> when the last of what _bound bounds were
        self._passing: dict[str, float] = {}  # lanes of statuses that are held back -> since when
        self._lanes = Lanes(self._run, wake)

    def submit(self, actions: tuple[Action, ...]) -> float | None:
        """Start what is due; returns when the next of the others becomes due, if time alone decides it."""
        now = self._clock()
        self._forget(actions, now)
        passing = (action.lane for action in actions if isinstance(action, SetStatus) and action.passing)
        self._passing = {lane: self._passing.get(lane, now) for lane in passing}
        ready: list[Action] = []
        due: list[float] = []
        for action in actions:
            if self._lanes.busy(action.lane):
                continue  # its end wakes the loop
            held = self._held_until(action)
            if held > now:
                due.append(held)
            else:
                ready.append(action)
        self._lanes.want(ready)
        return min(due, default=None)

    def _forget(self, actions: tuple[Action, ...], now: float) -> None:
        """An action that is no longer planned has had its effect, or is not wished any more."""
        planned = set(actions) if self._done else set()
        self._done = {
            action: done if action in planned else _Done(0, done.until)
            for action, done in self._done.items()
            if action in planned or done.until > now
        }
        self._recent = {lane: at for lane, at in self._recent.items() if at[-1] > now - LOADS_SECONDS}

    def _held_until(self, action: Action) -> float:
        failure, done = self._notebook.failures.get(action), self._done.get(action)
        (most, within), recent = _bound(action), self._recent.get(action.lane, [])
        settled = max(
            done.until if done else 0.0,
            failure.retry_at if failure else 0.0,
            recent[-most] + within if 0 < most <= len(recent) else 0.0,
        )
        if isinstance(action, SetStatus) and action.passing:
            return max(settled, self._passing[action.lane] + PASSING_SECONDS)
        return settled

    def oldest_seconds(self) -> float:
        """For how long the action that waits longest for its turn has been waiting."""
        return self._lanes.oldest_seconds()

    async def idle(self) -> None:
        """Until nothing runs."""
        await self._lanes.idle()

    async def close(self, grace: float = 0.0) -> None:
        """What runs may finish within `grace` seconds."""
        await self._lanes.close(grace)

    async def _run(self, action: Action) -> bool:
        """Whether it succeeded."""
        kind = type(action).__name__
        described = {"phase": "execute", "action": kind, "why": action.why, **self._subjects.of(action)}
        if action in self._notebook.failures:
            metrics.RETRIES.labels(kind).inc()
        started = time.monotonic()
        try:
            async with asyncio.timeout(ACTION_SECONDS):
                self._fault(f"before/{kind}")
                await self._do(action)
                self._fault(f"after/{kind}")
        except (LoraplaneError, TimeoutError) as error:
            self._failed(action, error, described)
        except Exception as error:
            log.exception("an action broke", extra=described)
            self._failed(action, error, described)
        else:
            metrics.ACTIONS.labels(kind, "ok").inc()
            self._succeeded(action)
            log.info("done", extra={**described, "seconds": round(time.monotonic() - started, 3)})
            return True
        finally:
            metrics.PHASE_SECONDS.labels(kind).observe(time.monotonic() - started)
        return False

    def _succeeded(self, action: Action) -> None:
        """Once is well. Again, while it is still planned, shows that nothing came of it."""
        now, before = self._clock(), self._done.get(action)
        times = before.times + 1 if before else 1
        until = now + (SETTLE_SECONDS if times == 1 else AGAIN.delay(times))
        self._done[action] = _Done(times, until)
        self._notebook.failures.pop(action, None)
        if times >= TOLD_TIMES and isinstance(action, Warm | Mark | Withdraw):
            told = f"the engine has answered {times} times that it is done, which its state does not show"
            self._notebook.failures[action] = Failure(NO_EFFECT, told, times - 1, until)
        if most := _bound(action)[0]:
            self._recent[action.lane] = [*self._recent.get(action.lane, ()), now][-most:]

    def _failed(self, action: Action, error: Exception, described: dict[str, str]) -> None:
        metrics.ACTIONS.labels(described["action"], "failed").inc()
        if isinstance(error, TimeoutError):
            code, message = "deadline_exceeded", f"took longer than {ACTION_SECONDS:g} seconds"
        else:
            inner = render(error)[1]["error"]
            code, message = inner["code"], inner["message"]
        before = self._notebook.failures.get(action)
        attempts = before.attempts + 1 if before else 1
        retry_at = self._clock() + RETRY.delay(attempts)
        self._notebook.failures[action] = Failure(code, message, attempts, retry_at)
        log.warning("failed", extra={**described, "code": code, "error": message, "attempts": attempts})

    async def _do(self, action: Action) -> None:
        match action:
            case ApplyWorkload(spec=spec):
                await self._apply(spec)
                await self._tell(action.notes)
            case RestartReplica(spec=spec, ordinal=ordinal):
                await self._apply(spec)
                self._fault("between/RestartReplica")
                await self._cluster.restart(spec.pool, ordinal)
                await self._tell(action.notes)
            case DeleteWorkload(pool=pool):
                self._notebook.applied.pop(pool, None)
                await self._cluster.delete(pool)
            case SetStatus(ref=ref, uid=uid, status=status):
                await self._cluster.patch_status(ref, uid, status)
                self._fault("between/SetStatus")
                self._notebook.status_written[uid] = self._clock()
                await self._tell(action.notes)
            case SetFinalizer(ref=ref, uid=uid, present=present):
                await self._tell(action.notes)
                self._fault("between/SetFinalizer")
                await self._cluster.set_finalizer(ref, uid, present)
            case Warm() | Mark() | Withdraw():
                await self._engine(action)
            case _:
                await self._ask_registry(action)

    async def _apply(self, spec: WorkloadSpec) -> None:
        await self._cluster.apply(spec, self.credentials(spec.pool, spec.epoch))
        self._notebook.applied[spec.pool] = spec

    async def _tell(self, notes: tuple[Note, ...]) -> None:
        for note in notes:
            await self._cluster.emit(note)

    async def _engine(self, action: Warm | Mark | Withdraw) -> None:
        client = self._fleet.client(action.replica)
        match action:
            case Warm(id=id_, bytes=size, rank=rank, pinned=pinned):
                if action.drift:
                    metrics.DRIFT_FOUND.inc()
                await client.warm(id_, size=size, rank=rank, pinned=pinned)
                if action.drift:
                    metrics.DRIFT_HEALED.inc()
            case Mark(id=id_, pinned=pinned, warm=warm):
                await client.mark(id_, pinned=pinned, warm=warm)
                if not warm:
                    self._notebook.let_go(action.replica, id_)
            case Withdraw(id=id_, drain_s=drain_s):
                await client.withdraw(id_, drain_s)
                self._notebook.let_go(action.replica, id_)

    async def _ask_registry(
        self,
        action: ReportPool
        | RemoveReport
        | ClaimAdapter
        | Register
        | ActivateVersion
        | SplitTraffic
        | ConfirmWarm
        | ReleaseClaim,
    ) -> None:
        book = self._notebook
        match action:
            case ReportPool(pool=pool, report=report):
                await self._registry.report_pool(pool, report)
                book.reports[pool] = report
            case RemoveReport(pool=pool):
                await self._registry.remove_pool(pool)
                book.reports[pool] = None
            case ClaimAdapter(uid=uid, request=request):
                await self._registry.claim(uid, request)
                book.claims.add(uid)
            case Register(uid=uid, request=source):
                book.registered_as(uid, source.source_hash, await self._registry.register(uid, source), self._clock())
            case ActivateVersion(uid=uid, request=wanted):
                await self._registry.activate(uid, wanted)
            case SplitTraffic(uid=uid, request=shares):
                await self._registry.set_traffic(uid, shares)
            case ConfirmWarm(tenant=tenant, adapter=adapter, request=warmed):
                await self._registry.confirm_warm(tenant, adapter, warmed)
            case ReleaseClaim(uid=uid, versions=versions):
                await self._registry.release(uid, versions)
                book.claims.discard(uid)
                book.released.add(uid)

    def credentials(self, pool: PoolRef, epoch: int) -> EngineCredentials:
        """What engines of this epoch accept: it and, while rotating, the one before."""
        epochs = [number for number in (epoch, epoch - 1) if number >= 1]

        def accepted(role: credentials.Role) -> list[str]:
            key = credentials.role_key(self._master, role)
            return [credentials.engine_credential(key, pool, number) for number in epochs]

        return EngineCredentials(
            epoch=epoch,
            data=accepted("data"),
            state=accepted("state"),
            admin=accepted("admin"),
            fetch=accepted("fetch")[0],
        )


def _bound(action: Action) -> tuple[int, float]:
    """How many of its lane succeed within how many seconds; none where the number is 0."""
    if isinstance(action, Warm):
        return LOADS, LOADS_SECONDS
    return (BURST, WINDOW_SECONDS) if gate(action) in CLUSTER_GATES else (0, 0.0)
