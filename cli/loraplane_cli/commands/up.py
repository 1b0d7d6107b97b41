"""`loraplane up` and `loraplane down`."""

import asyncio
import contextlib
import logging
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from loraplane_cli import report
from loraplane_cli.errors import LocalError, StartFailed
from loraplane_cli.output import TIMED_OUT, console, done, errors, leave, print_json
from loraplane_cli.progress import Progress, Snapshot, SupervisorEnded, follow
from loraplane_cli.session import DEFAULT_STATE, Json, StateDir
from loraplane_cli.supervisor.components import Options
from loraplane_cli.supervisor.layout import StateFolder
from loraplane_cli.supervisor.postgres import layout_of, remove_data
from loraplane_cli.supervisor.processes import ended
from loraplane_cli.supervisor.record import end_left_overs, exclusive, read_run
from loraplane_cli.supervisor.spec import open_log, tail
from loraplane_cli.supervisor.supervisor import supervise

READY_SECONDS = 600.0
DOWN_SECONDS = 60.0
NEWS_SECONDS = 0.5
#: Set for the process that `--detach` leaves behind.
BACKGROUND = "--background"

Folder = Annotated[
    Path | None,
    typer.Option("-f", "--folder", help="Folder of YAML to watch (by default STATE_DIR/desired)."),
]


def up(
    *,
    folder: Folder = None,
    state_dir: StateDir = DEFAULT_STATE,
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Return when everything is ready.")] = False,
    port: Annotated[
        int | None, typer.Option(help="Port of the OpenAI API (by default the last one, else 8080, else any).")
    ] = None,
    data_replicas: Annotated[int, typer.Option(min=1, max=16, help="Data gateways.")] = 1,
    adapter_root: Annotated[
        Path | None,
        typer.Option(help="Where `file:` sources lie (by default FOLDER/adapters or examples/adapters)."),
    ] = None,
    model_root: Annotated[
        Path | None, typer.Option(help="Where `file:` bases lie (by default STATE_DIR/models).")
    ] = None,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds to wait until everything is ready.")] = READY_SECONDS,
    background: Annotated[bool, typer.Option(BACKGROUND, hidden=True)] = False,
    json: Json = False,
) -> None:
    """Run everything on this machine: databases, gateways, engines, the operator over a folder of YAML."""
    state = StateFolder.of(state_dir)
    state.create()
    if folder is None:
        state.desired.mkdir(exist_ok=True)
        folder = state.desired
    if not folder.is_dir():
        raise LocalError(f"{folder} is not a folder")
    options = Options(
        folder=folder.absolute(),
        adapter_root=_adapter_root(adapter_root, folder, state),
        model_root=(model_root or state.models).absolute(),
        data_replicas=data_replicas,
        port=port,
    )
    if detach:
        snapshot = _detached(state, options, timeout, json)
        leave(_told(state, snapshot, json))
        return
    _log_to(state, background)
    companion = None if background else _Foreground(state, options, timeout, json)
    supervise(state, options, companion=companion.run if companion else None)


def down(
    state_dir: StateDir = DEFAULT_STATE,
    purge: Annotated[bool, typer.Option("--purge", help="Remove the state too, except models.")] = False,
    json: Json = False,
) -> None:
    """Stop a running `up`, or clear away what a killed one left."""
    state = StateFolder.of(state_dir)
    if not state.root.exists():
        done(f"nothing runs on {state.root}", {"stopped": False, "ended": [], "purged": False}, as_json=json)
        return
    stopped = _stop(state)
    with exclusive(state, wait_seconds=5.0):
        left = end_left_overs(state)
        for path in (state.env, state.status, state.run):
            path.unlink(missing_ok=True)
        for file in state.endpoints.glob("*.json"):
            file.unlink(missing_ok=True)
        state.remove_runtime()
        if purge:
            _purge(state)
    text = "stopped" if stopped else "nothing was running"
    text += f"; ended {', '.join(left)}" if left else ""
    text += f"; removed the state in {state.root} except models" if purge else ""
    done(text, {"stopped": stopped, "ended": left, "purged": purge}, as_json=json)


class _Foreground:
    """What a person sees of an `up` in this terminal: progress, the banner, then news."""

    def __init__(self, state: StateFolder, options: Options, timeout: float, as_json: bool) -> None:
        self._state = state
        self._progress = Progress(state, options.folder)
        self._timeout = timeout
        self._json = as_json

    async def run(self, stop: asyncio.Event) -> None:
        shown = errors if self._json else console
        snapshot = await follow(self._progress, shown, seconds=self._timeout, ended=stop.is_set)
        _told(self._state, snapshot, self._json)
        errors.print("[dim]Ctrl-C stops everything.[/]")
        said = _trouble(snapshot)
        try:
            while not stop.is_set():
                await asyncio.sleep(NEWS_SECONDS)
                now = _trouble(self._progress.snapshot())
                for name in sorted(now.keys() | said.keys()):
                    if now.get(name) != said.get(name):
                        errors.print(f"{time.strftime('%H:%M:%S')}  {name}  {now.get(name, 'ready')}", markup=False)
                said = now
        finally:  # it is cancelled when the stop begins
            errors.print("[dim]stopping; Ctrl-C again hurries it[/]")


def _detached(state: StateFolder, options: Options, timeout: float, as_json: bool) -> Snapshot:
    """Start the supervisor in a session of its own and wait for it. Raises AlreadyRunning, StartFailed."""
    with exclusive(state):  # who holds it is told by the exception
        state.status.unlink(missing_ok=True)
    log = state.log("supervisor")
    command = [
        sys.executable, "-P", "-m", "loraplane_cli", "up", BACKGROUND, "-f", str(options.folder),
        "--state-dir", str(state.root), "--data-replicas", str(options.data_replicas),
        "--adapter-root", str(options.adapter_root), "--model-root", str(options.model_root),
        *(["--port", str(options.port)] if options.port else []),
    ]  # fmt: skip
    with open_log(log) as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    progress = Progress(state, options.folder)
    shown = errors if as_json else console
    try:
        return asyncio.run(follow(progress, shown, seconds=timeout, ended=lambda: process.poll() is not None))
    except SupervisorEnded as error:
        raise StartFailed(f"{error.message}; {log} ends with:\n{tail(log)}") from error
    except KeyboardInterrupt:
        process.terminate()
        process.wait(DOWN_SECONDS)
        raise


def _told(state: StateFolder, snapshot: Snapshot, as_json: bool) -> int:
    """Show what came of the start; the exit status."""
    if as_json:
        print_json(report.machine_form(state, snapshot))
    else:
        report.banner(state, snapshot, console)
    if not snapshot.settled:
        waiting = ", ".join(f"{item} ({item.reason})" for item in snapshot.items if item.state == "waiting")
        errors.print(f"[yellow]still waiting for[/] {waiting}; everything keeps running")
        return TIMED_OUT
    return 1 if snapshot.failures else 0


def _trouble(snapshot: Snapshot) -> dict[str, str]:
    """What is not as it should be now, by name."""
    found = {}
    status = snapshot.supervisor
    for part in status.parts if status else []:
        if part.phase not in ("ready", "done"):
            found[part.name] = f"{part.phase} {part.message}".strip()
    for workload in status.workloads if status else []:
        for replica in workload.replicas:
            if not replica.ready:
                found[f"engine {workload.namespace}/{workload.pool}-{replica.ordinal}"] = replica.message
    for item in snapshot.items:
        if item.state != "ready":
            found[str(item)] = f"{item.reason} {item.message}".strip()
    return found | dict.fromkeys(snapshot.problems, "not in force")


def _adapter_root(given: Path | None, folder: Path, state: StateFolder) -> Path:
    """The first that exists; with none, an empty one of our own. Raises LocalError for a given one that does not."""
    if given is not None and not given.is_dir():
        raise LocalError(f"--adapter-root {given} is not a folder")
    for candidate in (given, folder / "adapters", Path("examples/adapters")):
        if candidate is not None and candidate.is_dir():
            return candidate.absolute()
    own = state.root / "adapters"
    own.mkdir(exist_ok=True)
    return own


def _log_to(state: StateFolder, background: bool) -> None:
    """The supervisor's own log. In the background standard error is that file already."""
    handler = logging.StreamHandler() if background else logging.FileHandler(state.log("supervisor"))
    text = "%(asctime)s %(levelname)s %(name)s: %(message)s"
    logging.basicConfig(level=logging.INFO, format=text, handlers=[handler], force=True)
    logging.getLogger("httpx").setLevel(logging.WARNING)  # it writes a line per probe


def _stop(state: StateFolder) -> bool:
    """End the running supervisor: ask, ask for a quick stop, insist. True when one was running."""
    run = read_run(state)
    process = run.supervisor.find() if run else None
    if process is None:
        return False
    for signum, seconds in ((signal.SIGTERM, DOWN_SECONDS), (signal.SIGTERM, 15.0), (signal.SIGKILL, 5.0)):
        if ended(process, signum, seconds):
            return True
    raise LocalError(f"process {process.pid} does not end")


def _purge(state: StateFolder) -> None:
    with contextlib.suppress(LocalError):  # without the wheel there is nothing of it to remove
        remove_data(layout_of(state.root, logs=state.logs, secrets_folder=state.secrets, shared_name=state.shared_name))
    for path in state.root.iterdir():
        if path in (state.models, state.lock):
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
