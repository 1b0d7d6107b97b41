"""`loraplane apply` and `loraplane delete`: documents into and out of the watched folder of the running `up`.

`apply` replaces a document that the folder already holds, in its file; a new one goes to `applied/`.
"""

import asyncio
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from loraplane_cli.documents import Document, load, load_file, load_raw, yaml_files
from loraplane_cli.errors import BadDocument, NotRunning
from loraplane_cli.objects import KINDS
from loraplane_cli.output import REFUSED, TIMED_OUT, console, errors, leave, print_json
from loraplane_cli.progress import Progress, Snapshot, follow
from loraplane_cli.session import DEFAULT_STATE, Json, StateDir
from loraplane_cli.supervisor.layout import StateFolder
from loraplane_cli.supervisor.record import running
from loraplane_core.errors import NotFound
from loraplane_core.files import write_atomic
from loraplane_core.labels import TENANT_KIND

APPLIED = "applied"
WAIT_SECONDS = 300.0
FILE_MODE = 0o644

Key = tuple[str, str, str]


def apply(
    source: Annotated[Path, typer.Option("-f", "--filename", help="A YAML file, or a folder of them.")],
    wait: Annotated[bool, typer.Option("--wait", help="Return when all is ready or has failed.")] = False,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds to wait.")] = WAIT_SECONDS,
    state_dir: StateDir = DEFAULT_STATE,
    json: Json = False,
) -> None:
    """Check documents and hand them to the running `up`."""
    state = StateFolder.of(state_dir)
    folder = watched_folder(state)
    documents = load(source)
    if not documents:
        raise BadDocument(f"{source} holds no document")
    outcomes = apply_documents(documents, folder)
    if not json:
        for (kind, namespace, name), outcome in outcomes.items():
            console.print(f"{kind} {'/'.join(filter(None, (namespace, name)))} {outcome}", markup=False)
    snapshot = _wait(state, folder, set(outcomes), timeout, json) if wait else None
    if json:
        print_json({"items": [_row(key, outcome, snapshot) for key, outcome in outcomes.items()]})
    if snapshot is None:
        return
    for failure in snapshot.failures:
        errors.print(f"[red]failed[/] {failure}")
    leave(TIMED_OUT if not snapshot.settled else REFUSED if snapshot.failures else 0)


def delete(
    what: Annotated[str, typer.Argument(help="pool, adapter or tenant")],
    name: Annotated[str, typer.Argument()],
    namespace: Annotated[str, typer.Option("-n", "--namespace")] = "default",
    state_dir: StateDir = DEFAULT_STATE,
    json: Json = False,
) -> None:
    """Take an object's document out of the watched folder (a tenant's document: the tenant stays)."""
    folder = watched_folder(StateFolder.of(state_dir))
    kind = TENANT_KIND if what in ("tenant", "tenants") else KINDS.get(what.lower())
    if kind is None:
        raise BadDocument(f"there is no kind {what!r}; say pool, adapter or tenant")
    key = (kind, "" if kind == TENANT_KIND else namespace, name)
    path = _remove(folder, key)
    if path is None:
        raise NotFound(f"no document in {folder} is {kind} {namespace}/{name}")
    if json:
        print_json({"kind": kind, "namespace": key[1], "name": name, "path": str(path)})
    else:
        console.print(f"{kind} {name} taken out of {path}", markup=False)


def watched_folder(state: StateFolder) -> Path:
    """The folder that the running supervisor watches. Raises NotRunning."""
    run = running(state)
    if run is None:
        raise NotRunning(f"no `loraplane up` runs on {state.root}; start one, or name another --state-dir")
    return Path(run.folder)


def apply_documents(documents: list[Document], folder: Path) -> dict[Key, str]:
    """Write each into `folder`; what became of it: created, configured or unchanged."""
    present = _present(folder)
    outcomes = {}
    for document in documents:
        known = present.get(document.key)
        if known is None:
            path = folder / APPLIED / f"{'.'.join(filter(None, document.key)).lower()}.yaml"
            path.parent.mkdir(exist_ok=True)
            _write(path, [document.raw])
            outcomes[document.key] = "created"
        elif known.resource == document.resource:
            outcomes[document.key] = "unchanged"
        else:
            raw = load_raw(known.path)
            raw[known.index] = document.raw
            _write(known.path, raw)
            outcomes[document.key] = "configured"
    return outcomes


def _remove(folder: Path, key: Key) -> Path | None:
    document = _present(folder).get(key)
    if document is None:
        return None
    raw = load_raw(document.path)
    del raw[document.index]
    if any(each is not None for each in raw):
        _write(document.path, raw)
    else:
        document.path.unlink()
    return document.path


def _present(folder: Path) -> dict[Key, Document]:
    """What the folder holds; a file that cannot be read is nobody's to change."""
    found: dict[Key, Document] = {}
    for path in yaml_files(folder):
        try:
            for document in load_file(path):
                found.setdefault(document.key, document)
        except BadDocument as error:
            errors.print(f"[yellow]passed over[/] {error.message}")
    return found


def _write(path: Path, documents: list[Any]) -> None:
    mode = path.stat().st_mode & 0o777 if path.exists() else FILE_MODE
    write_atomic(path, yaml.safe_dump_all([each for each in documents if each is not None], sort_keys=False), mode)


def _wait(state: StateFolder, folder: Path, keys: set[Key], timeout: float, quiet: bool) -> Snapshot:
    def ended() -> bool:
        return running(state) is None

    progress = Progress(state, folder, keys)
    return asyncio.run(follow(progress, errors, seconds=timeout, ended=ended, quiet=quiet, only_objects=True))


def _row(key: Key, outcome: str, snapshot: Snapshot | None) -> dict[str, str]:
    row = {"kind": key[0], "namespace": key[1], "name": key[2], "outcome": outcome}
    for item in snapshot.items if snapshot else ():
        if (item.kind, item.namespace, item.name) == key:
            row |= {"state": item.state, "reason": item.reason, "message": item.message}
    return row
