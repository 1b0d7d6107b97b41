"""The command line: which command is which function."""

import typer

from loraplane_cli.commands import adapters, apply, get, model, tenants, top, traffic, up

app = typer.Typer(
    name="loraplane",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    help="Run Loraplane on one machine, and operate it here or on Kubernetes.",
)
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
