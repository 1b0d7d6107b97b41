"""The command line: which command is which function."""

from typing import Annotated

import typer

from loraplane_cli.commands import adapters, apply, get, model, tenants, top, traffic, up
from loraplane_core.version import VERSION

HERE = "On this machine (on Kubernetes: helm and kubectl)"
ANYWHERE = "Through the registry, here or on Kubernetes"

app = typer.Typer(
    name="loraplane",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    help="Run Loraplane on one machine, and operate it here or on Kubernetes.",
)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"loraplane {VERSION}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Which release.")
    ] = False,
) -> None:
    pass


for command in (up.up, up.down, apply.apply, apply.delete, get.get, get.events, get.logs, top.top):
    app.command(rich_help_panel=HERE)(command)
app.add_typer(model.model, name="model", rich_help_panel=HERE)
app.command(rich_help_panel=ANYWHERE)(adapters.rollback)
app.command(rich_help_panel=ANYWHERE)(traffic.traffic)
app.add_typer(tenants.tenant, name="tenant", rich_help_panel=ANYWHERE)
app.add_typer(tenants.key, name="key", rich_help_panel=ANYWHERE)
app.add_typer(adapters.adapter, name="adapter", rich_help_panel=ANYWHERE)
