"""How far a start or an apply has come: each document of the folder against what the operator reports.

An object is ready, waits, or failed; failed is a refusal that waiting does not heal, seen for a moment.
"""

import asyncio
import contextlib
import json
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from loraplane_cli import envfile
from loraplane_cli.documents import Document, load_file, yaml_files
from loraplane_cli.errors import BadDocument, StartFailed
from loraplane_cli.objects import condition, read_objects
from loraplane_cli.supervisor.layout import StateFolder
from loraplane_cli.supervisor.status import SupervisorStatus, read_status
from loraplane_core.identity import PoolRef
from loraplane_core.labels import ADAPTER_KIND, POOL_KIND, TENANT_KIND
from loraplane_core.resources.adapter import LoRAAdapter
from loraplane_core.resources.documents import Resource
from loraplane_core.resources.pool import BaseModelPool

POLL_SECONDS = 0.2
#: A reason that looks final is believed after so long: a tenant may be created, a pool read, a moment later.
SETTLE_SECONDS = 3.0
#: Reasons of work under way, or of something that comes by itself; any other one will not heal by waiting.
WAITING = frozenset(
    {
        "Pending", "Progressing", "Claimed", "PendingBase", "Ingesting", "Ingested", "Validated", "Placed", "Loading",
        "ReplicaNotReady", "NoReplica", "NotWarm", "Drifted", "Starting", "Scaling", "Rolling", "RegistryUnavailable",
        "EngineUnreachable", "ClusterUnavailable", "Unavailable", "DeadlineExceeded", "ArtifactUnavailable",
        "SourceUnavailable", "Deleting", "CrashLoop", "NotActivated",
    }
)  # fmt: skip


class SupervisorEnded(StartFailed):
    """It went without saying why."""


State = Literal["ready", "waiting", "failed"]
Key = tuple[str, str, str]


@dataclass(frozen=True)
class Item:
    """One document and where it stands."""

    kind: str
    namespace: str
    name: str
    state: State
    reason: str
    message: str = ""

    def __str__(self) -> str:
        return f"{self.kind} {'/'.join(filter(None, (self.namespace, self.name)))}"


@dataclass(frozen=True)
class Snapshot:
    supervisor: SupervisorStatus | None
    items: tuple[Item, ...]
    problems: tuple[str, ...]  # documents that are not in force, and why

    @property
    def settled(self) -> bool:
        """Nothing is left to wait for."""
        running = self.supervisor is not None and self.supervisor.phase == "running"
        return running and not any(item.state == "waiting" for item in self.items)

    @property
    def failures(self) -> list[str]:
        failed = [f"{item}: {item.reason}: {item.message}" for item in self.items if item.state == "failed"]
        told = " ".join(failed)
        return failed + [problem for problem in self.problems if problem.partition(": ")[2] not in told]


@dataclass(frozen=True)
class _Reading:
    stamp: tuple[int, int]
    documents: tuple[Document, ...]
    problem: str = ""


class Progress:
    """Reads the state folder; remembers since when a reason has been seen. `only`: those documents, not all."""

    def __init__(self, state: StateFolder, folder: Path, only: Iterable[Key] | None = None) -> None:
        self._state = state
        self._folder = folder
        self._only = None if only is None else frozenset(only)
        self._since: dict[tuple[Key, str], float] = {}
        self._read: dict[Path, _Reading] = {}
        self._tenants_wait = False
        self._serving: frozenset[PoolRef] = frozenset()

    def snapshot(self) -> Snapshot:
        status = read_status(self._state)
        self._serving = serving_pools(status)
        documents, problems = self._documents()
        keys = envfile.read_env(self._state.env) if status is not None and status.phase == "running" else {}
        self._tenants_wait = any(
            document.key[0] == TENANT_KIND and envfile.key_variable(document.key[2]) not in keys
            for document in documents
        )
        reported = self._reported({document.path for document in documents})
        stored = self._stored()
        items = tuple(self._item(document, stored.get(document.key), keys, reported) for document in documents)
        return Snapshot(status, items, (*problems, *(f"{path}: {text}" for path, text in reported)))

    def _documents(self) -> tuple[list[Document], list[str]]:
        found: dict[Key, Document] = {}
        problems = []
        read: dict[Path, _Reading] = {}
        for path in yaml_files(self._folder):
            reading = read[path] = self._reading(path)
            problems += [reading.problem] if reading.problem and self._only is None else []
            for document in reading.documents:
                if self._only is None or document.key in self._only:
                    found.setdefault(document.key, document)
        self._read = read
        return list(found.values()), problems

    def _reading(self, path: Path) -> "_Reading":
        """A file is parsed again only when it changed."""
        stamp = _stamp(path)
        known = self._read.get(path)
        if known is not None and known.stamp == stamp:
            return known
        try:
            return _Reading(stamp, tuple(load_file(path)))
        except BadDocument as error:
            return _Reading(stamp, (), error.message)

    def _stored(self) -> dict[Key, dict[str, object]]:
        found = {}
        for kind in (POOL_KIND, ADAPTER_KIND):
            for stored in read_objects(self._state.objects, kind):
                meta = stored["metadata"]
                found[kind, meta["namespace"], meta["name"]] = stored
        return found

    def _reported(self, ours: set[Path]) -> list[tuple[str, str]]:
        """(file, why) of what the operator has not put in force; a file that cannot be read at all is told already."""
        readable = {path.relative_to(self._folder).as_posix() for path in ours}
        with contextlib.suppress(FileNotFoundError, ValueError, KeyError, TypeError):
            rows = json.loads(self._state.problems.read_text())
            return [(row["path"], row["message"]) for row in rows if row["path"] in readable]
        return []

    def _item(
        self,
        document: Document,
        stored: dict[str, object] | None,
        keys: dict[str, str],
        reported: list[tuple[str, str]],
    ) -> Item:
        kind, namespace, name = document.key
        if kind == TENANT_KIND:
            made = envfile.key_variable(name) in keys
            return Item(kind, namespace, name, "ready" if made else "waiting", "Ready" if made else "Pending")
        for _, text in reported:
            if text.startswith(f"{kind}/{namespace}/{name}"):
                return Item(kind, namespace, name, "failed", "NotInForce", text)
        if stored is None:
            return Item(kind, namespace, name, "waiting", "Pending", "the operator has not read it yet")
        judged = condition(stored, "Available" if kind == POOL_KIND else "Ready")
        reason, message = str(judged.get("reason", "Pending")), str(judged.get("message", ""))
        return Item(kind, namespace, name, self._judge(document, stored, judged, reason), reason, message)

    def _judge(self, document: Document, stored: dict[str, object], judged: dict[str, object], reason: str) -> State:
        meta, spec = stored["metadata"], stored["spec"]
        if not isinstance(meta, dict) or spec != document.resource.spec.to_wire():
            return "waiting"  # the document was edited and is not in force yet
        if judged.get("observedGeneration", 0) not in (0, meta.get("generation")):
            return "waiting"
        if judged.get("status") == "True":
            # What an earlier run reported stands until the operator has looked again; engines are known at once.
            return "ready" if _pool(document.resource) in self._serving else "waiting"
        if reason in WAITING or self._tenants_wait:
            return "waiting"
        since = self._since.setdefault((document.key, reason), time.monotonic())
        return "failed" if time.monotonic() - since >= SETTLE_SECONDS else "waiting"


def _stamp(path: Path) -> tuple[int, int]:
    try:
        status = path.stat()
    except FileNotFoundError:
        return (0, 0)
    return (status.st_mtime_ns, status.st_size)


def _pool(resource: Resource) -> PoolRef | None:
    if isinstance(resource, BaseModelPool):
        return resource.ref
    return resource.pool if isinstance(resource, LoRAAdapter) else None


def serving_pools(status: SupervisorStatus | None) -> frozenset[PoolRef]:
    """Pools with an engine that is ready now."""
    workloads = status.workloads if status is not None and status.phase == "running" else []
    ready = [workload for workload in workloads if any(replica.ready for replica in workload.replicas)]
    return frozenset(PoolRef(workload.namespace, workload.pool) for workload in ready)


async def follow(
    progress: Progress,
    console: Console,
    *,
    seconds: float,
    ended: Callable[[], bool],
    quiet: bool = False,
    only_objects: bool = False,
) -> Snapshot:
    """Show progress until all is settled, the deadline passes, or the supervisor `ended`; the last snapshot.

    Raises StartFailed with the supervisor's message. Uses no thread (supervisor.py says why).
    """
    deadline = time.monotonic() + seconds
    said: dict[str, str] = {}
    with Live(console=console, auto_refresh=False, transient=True, redirect_stdout=False) as live:
        while True:
            snapshot = progress.snapshot()
            status = snapshot.supervisor
            if status is not None and status.phase == "failed":
                raise StartFailed(status.message)
            if not quiet:
                shown = replace(snapshot, supervisor=None) if only_objects else snapshot
                for line in _news(shown, said):
                    console.print(line)
                live.update(_picture(shown) if console.is_terminal else Text(""), refresh=True)
            if snapshot.settled or time.monotonic() > deadline:
                return snapshot
            if ended():
                raise SupervisorEnded("the supervisor ended")
            await asyncio.sleep(POLL_SECONDS)


def _news(snapshot: Snapshot, said: dict[str, str]) -> list[Text]:
    """A line for everything that changed since the last look."""
    lines = []
    for name, state, message in _states(snapshot):
        if said.get(name) != state:
            said[name] = state
            mark = {"ready": "[green]✓[/]", "done": "[green]✓[/]", "failed": "[red]✗[/]"}.get(state, "[dim]·[/]")
            line = Text.from_markup(f"{mark} ")
            line.append(name).append(f"  {state}", style="dim").append(f"  {message}" if message else "", style="dim")
            lines.append(line)
    return lines


def _states(snapshot: Snapshot) -> Iterable[tuple[str, str, str]]:
    status = snapshot.supervisor
    for part in status.parts if status else []:
        yield part.name, part.phase, part.message
    for workload in status.workloads if status else []:
        for replica in workload.replicas:
            name = f"engine {workload.namespace}/{workload.pool}-{replica.ordinal}"
            yield name, "ready" if replica.ready else replica.message or "starting", ""
    for item in snapshot.items:
        state = item.reason if item.state == "waiting" else item.state
        yield str(item), state, item.message if item.state == "failed" else ""
    for problem in snapshot.problems:
        yield problem, "failed", ""


def _picture(snapshot: Snapshot) -> RenderableType:
    """A bar over all objects and a spinner for each that is waited for."""
    waiting = [(name, state) for name, state, _ in _states(snapshot) if state not in ("ready", "done", "failed")]
    items = snapshot.items
    settled = sum(item.state != "waiting" for item in items)
    bar = Table.grid(padding=(0, 1))
    bar.add_row(ProgressBar(total=max(1, len(items)), completed=settled, width=30), f"{settled}/{len(items)} objects")
    spinners = [Spinner("dots", Text(f"{name}  {state}", style="dim")) for name, state in waiting[:12]]
    return Group(bar, *spinners)
