"""The supervisor's life: lock, recovery, ordered start, watch, ordered stop.

It runs one event loop in the main thread and no other thread: children watch the thread that started them.
"""

import asyncio
import contextlib
import logging
import signal
from collections.abc import Awaitable, Callable, Iterator

import httpx

from loraplane_cli import envfile
from loraplane_cli.errors import LocalError
from loraplane_cli.supervisor.components import Kit, Options, Parts, System, Urls, child_environment
from loraplane_cli.supervisor.control import control_socket
from loraplane_cli.supervisor.files import private_folder
from loraplane_cli.supervisor.keeper import Component, Keeper
from loraplane_cli.supervisor.layout import StateFolder
from loraplane_cli.supervisor.material import load_material
from loraplane_cli.supervisor.ports import PortBook
from loraplane_cli.supervisor.probes import http_ready
from loraplane_cli.supervisor.record import RUN_VARIABLE, RunRecord, end_left_overs, exclusive
from loraplane_cli.supervisor.spec import bound_logs
from loraplane_cli.supervisor.status import PartStatus, RunPhase, SupervisorStatus, write_status
from loraplane_cli.supervisor.tenants import TenantDocuments
from loraplane_cli.supervisor.workloads import Ports as EnginePorts
from loraplane_cli.supervisor.workloads import Probe, Site, Workloads

log = logging.getLogger(__name__)
REPORT_SECONDS = 0.1
HOUSE_SECONDS = 2.0
PROBE_TIMEOUT = httpx.Timeout(2.0)

PartsMaker = Callable[[Kit], Parts]
Companion = Callable[[asyncio.Event], Awaitable[None]]


class Supervisor:
    """One run. `companion` is anything that shall run beside it, such as a display; it ends with it."""

    def __init__(
        self,
        state: StateFolder,
        options: Options,
        *,
        make_parts: PartsMaker = System,
        engine: tuple[str, ...] | None = None,
        companion: Companion | None = None,
    ) -> None:
        self._state = state
        self._options = options
        self._make_parts = make_parts
        self._engine = engine
        self._companion = companion
        self._run = RunRecord(state.run, options.folder)
        self._material = load_material(state.secrets)
        self._phase: RunPhase = "starting"
        self._message = ""
        self._keepers: list[Keeper] = []
        self._workloads: Workloads | None = None
        self._report_due: asyncio.TimerHandle | None = None
        self._tenant_keys: dict[str, str] = {}
        self._notes: list[str] = []

    async def run(self) -> None:
        """Returns after an orderly stop that a signal asked for. Raises StartFailed when a part did not come up."""
        stop, hurry = asyncio.Event(), asyncio.Event()
        async with httpx.AsyncClient(timeout=PROBE_TIMEOUT, trust_env=False) as client:
            # What a killed child leaves in its temporary folder goes with ours.
            env = child_environment({RUN_VARIABLE: self._run.token, "TMPDIR": str(self._state.runtime)})
            kit = Kit(self._options, self._state, PortBook(self._state.ports), self._material, env, client)
            self._notes = kit.notes
            parts = self._make_parts(kit)
            self._workloads = Workloads(self._site(kit), self._changed)
            with _signals(stop, hurry):
                try:
                    await self._live(parts, self._workloads, stop)
                except LocalError as error:
                    self._phase, self._message = "failed", error.message
                    raise
                finally:
                    await self._stop(hurry)

    async def _live(self, parts: Parts, workloads: Workloads, stop: asyncio.Event) -> None:
        """Start everything and watch until asked to stop."""
        async with contextlib.AsyncExitStack() as stack:
            tasks: list[asyncio.Task[object]] = [asyncio.create_task(stop.wait(), name="stop")]
            if self._companion is not None:
                tasks += [asyncio.create_task(_run(self._companion, stop), name="companion")]
            tasks += [asyncio.create_task(self._start(parts, workloads, stack), name="start")]
            tasks += [asyncio.create_task(self._keep_house(stop), name="house")]
            try:
                while not stop.is_set():
                    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                    for task in done:
                        tasks.remove(task)
                        task.result()
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                self._phase = "stopping"
                self._changed()

    async def _start(self, parts: Parts, workloads: Workloads, stack: contextlib.AsyncExitStack) -> None:
        await stack.enter_async_context(control_socket(self._state.socket, workloads))
        for group in parts.groups():
            await self._start_group([self._keep(component) for component in group])
        urls = parts.urls()
        self._write_env(urls)
        self._phase = "running"
        self._changed()
        await self._watch_tenants(urls)

    async def _start_group(self, keepers: list[Keeper]) -> None:
        """Returns when all are ready; the first that fails ends the others' start. Raises StartFailed."""
        try:
            async with asyncio.TaskGroup() as tasks:
                for keeper in keepers:
                    tasks.create_task(keeper.start(), name=f"start {keeper.name}")
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from None
        log.info("up: %s", ", ".join(keeper.name for keeper in keepers))

    async def _keep_house(self, stop: asyncio.Event) -> None:
        """Bound logs; end when the state folder was removed or is another run's, because nobody could stop us by it."""
        while True:
            await asyncio.sleep(HOUSE_SECONDS)
            if not self._run.holds():
                log.error("%s was removed; stopping", self._state.root)
                stop.set()
            try:
                bound_logs(self._state.logs)
            except OSError as error:
                log.warning("a log could not be bounded: %s", error)

    async def _watch_tenants(self, urls: Urls) -> None:
        def keys_changed(keys: dict[str, str]) -> None:
            self._tenant_keys = keys
            self._write_env(urls)

        headers = {"authorization": f"Bearer {self._material.admin_key}"}
        async with httpx.AsyncClient(base_url=urls.admin, headers=headers, timeout=10.0, trust_env=False) as admin:
            await TenantDocuments(self._options.folder, self._state.secrets / "tenants", admin, keys_changed).watch()

    async def _stop(self, hurry: asyncio.Event) -> None:
        """Operator, gateways, engines, registry, Valkey, Postgres; each has its deadline."""
        for rank in ("first", "edge"):
            ranked = [keeper for keeper in self._keepers if keeper.component.stops == rank]
            await asyncio.gather(*(keeper.stop(hurry=hurry) for keeper in ranked))
        if self._workloads is not None:
            await self._workloads.stop(hurry)
        for keeper in reversed(self._keepers):
            if keeper.component.stops == "last":
                await keeper.stop(hurry=hurry)
        if self._report_due is not None:
            self._report_due.cancel()
        self._report()

    def _keep(self, component: Component) -> Keeper:
        keeper = Keeper(component, log=self._state.log(component.name), run=self._run, changed=self._changed)
        self._keepers.append(keeper)
        return keeper

    def _site(self, kit: Kit) -> Site:
        def probe(ports: EnginePorts) -> Probe:
            return http_ready(kit.client, lambda: ports.metrics, "/health/ready")

        site = Site(kit.state, kit.ports, self._run, kit.env, probe)
        return site if self._engine is None else Site(kit.state, kit.ports, self._run, kit.env, probe, self._engine)

    def _write_env(self, urls: Urls) -> None:
        values = {
            envfile.GATEWAY_URL: urls.gateways[0],
            envfile.ADMIN_URL: urls.admin,
            envfile.ADMIN_KEY: self._material.admin_key,
            envfile.DATABASE_URL: urls.database,
            envfile.REDIS_URL: urls.redis,
        }
        values |= {envfile.key_variable(tenant): key for tenant, key in sorted(self._tenant_keys.items())}
        envfile.write_env(self._state.env, values)

    def _changed(self) -> None:
        """Report soon: many changes become one file."""
        if self._report_due is None:
            self._report_due = asyncio.get_running_loop().call_later(REPORT_SECONDS, self._report)

    def _report(self) -> None:
        self._report_due = None
        parts = [
            PartStatus(
                name=keeper.name, phase=keeper.phase, pid=keeper.pid, restarts=keeper.restarts, message=keeper.message
            )
            for keeper in self._keepers
        ]
        status = SupervisorStatus(
            phase=self._phase,
            pid=self._run.pid,
            folder=str(self._options.folder),
            message=self._message,
            parts=parts,
            workloads=self._workloads.statuses() if self._workloads else [],
            notes=self._notes,
        )
        try:
            write_status(self._state, status)
        except OSError as error:  # a full disk or a removed folder must not keep us from running or stopping
            log.warning("the status cannot be written: %s", error)


def supervise(
    state: StateFolder,
    options: Options,
    *,
    make_parts: PartsMaker = System,
    engine: tuple[str, ...] | None = None,
    companion: Companion | None = None,
) -> None:
    """Run a system on `state` until SIGINT or SIGTERM, and leave nothing of it but its data.

    Raises AlreadyRunning, StartFailed, LocalError.
    """
    state.create()
    with exclusive(state):
        left = end_left_overs(state)
        if left:
            log.warning("ended what an earlier run left: %s", ", ".join(left))
        _clear(state)
        private_folder(state.runtime)
        try:
            asyncio.run(Supervisor(state, options, make_parts=make_parts, engine=engine, companion=companion).run())
        except BaseException:
            _clear(state, keep_status=True)
            raise
        _clear(state)


def _clear(state: StateFolder, *, keep_status: bool = False) -> None:
    """Remove what only means something while a supervisor runs."""
    state.remove_runtime()
    for folder in (state.endpoints, state.secrets / "engines"):
        for path in folder.glob("*.json"):
            path.unlink()
    state.env.unlink(missing_ok=True)
    state.run.unlink(missing_ok=True)
    if not keep_status:
        state.status.unlink(missing_ok=True)


async def _run(companion: Companion, stop: asyncio.Event) -> None:
    await companion(stop)


@contextlib.contextmanager
def _signals(stop: asyncio.Event, hurry: asyncio.Event) -> Iterator[None]:
    """The first signal asks for an orderly stop, the second for a quick one."""

    def ask() -> None:
        (hurry if stop.is_set() else stop).set()

    loop = asyncio.get_running_loop()
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    for number in numbers:
        loop.add_signal_handler(number, ask)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
