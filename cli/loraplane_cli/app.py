"""The command line: which command is which function."""

from typing import Annotated

import typer

from loraplane_cli.commands import adapters, apply, get, model, tenants, top, traffic, up
from loraplane_core.version import VERSION

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


app.command()(up.up)
app.command()(up.down)
app.command()(apply.apply)
app.command()(apply.delete)
app.command()(get.get)
app.command()(get.events)
app.command()(get.logs)
app.command()(top.top)
app.command()(adapters.rollback)
app.command()(traffic.traffic)
app.add_typer(tenants.tenant, name="tenant")
app.add_typer(tenants.key, name="key")
app.add_typer(adapters.adapter, name="adapter")
app.add_typer(model.model, name="model")
