"""Where a command finds what it talks to: the environment first, then `.loraplane/env`."""

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated

import typer

from loraplane_cli import envfile
from loraplane_cli.admin import AdminClient
from loraplane_cli.errors import NotConfigured
from loraplane_cli.output import errors
from loraplane_cli.supervisor.layout import STATE_FOLDER, StateFolder
from loraplane_cli.supervisor.record import running

StateDir = Annotated[
    Path,
    typer.Option("--state-dir", envvar="LORAPLANE_STATE_DIR", help="Where the local installation keeps its state."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
DEFAULT_STATE = Path(STATE_FOLDER)


def settings(state: Path, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The LORAPLANE_ values that hold here."""
    own = {name: value for name, value in environment.items() if name.startswith("LORAPLANE_")}
    return envfile.read_env(StateFolder.of(state).env) | own


def tell_if_stopped(state: StateFolder) -> None:
    """On standard error, so that nobody takes what an ended run reported for what is now."""
    if running(state) is None:
        errors.print(f"note: no `loraplane up` runs on {state.root}; this is what it last reported", markup=False)


@contextlib.contextmanager
def admin(state: Path) -> Iterator[AdminClient]:
    """The registry's admin client. Raises NotConfigured."""
    found = settings(state)
    url, key = found.get(envfile.ADMIN_URL, ""), found.get(envfile.ADMIN_KEY, "")
    missing = [name for name, value in ((envfile.ADMIN_URL, url), (envfile.ADMIN_KEY, key)) if not value]
    if missing:
        raise NotConfigured(
            f"{' and '.join(missing)} not set, neither in the environment nor in {StateFolder.of(state).env}; "
            "`loraplane up` writes that file (is this its folder, --state-dir?), and docs/install.md says what to set "
            "for Kubernetes"
        )
    client = AdminClient(url, key)
    try:
        yield client
    finally:
        client.close()
