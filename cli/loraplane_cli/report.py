"""What a person gets when everything runs: the URLs, a key, and a line that works."""

import json
import shlex
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from loraplane_cli import envfile
from loraplane_cli.objects import condition, read_objects
from loraplane_cli.progress import Snapshot
from loraplane_cli.supervisor.layout import StateFolder
from loraplane_core.labels import ADAPTER_KIND

QUESTION = "What is the capital of France?"


def machine_form(state: StateFolder, snapshot: Snapshot) -> dict[str, Any]:
    """All that a program needs to go on."""
    values = envfile.read_env(state.env)
    model = _model(state, values)
    return {
        "gateway_url": values.get(envfile.GATEWAY_URL),
        "admin_url": values.get(envfile.ADMIN_URL),
        "database_url": values.get(envfile.DATABASE_URL),
        "redis_url": values.get(envfile.REDIS_URL),
        "env_file": str(state.env),
        "log_folder": str(state.logs),
        "keys": {name: value for name, value in values.items() if name.startswith(envfile.KEY_PREFIX)},
        "objects": [
            {
                "kind": item.kind,
                "namespace": item.namespace,
                "name": item.name,
                "state": item.state,
                "reason": item.reason,
                "message": item.message,
            }
            for item in snapshot.items
        ],
        "failures": snapshot.failures,
        "notes": snapshot.supervisor.notes if snapshot.supervisor else [],
        "ready": snapshot.settled and not snapshot.failures,
        "curl": _curl(values, model) if model else None,
    }


def banner(state: StateFolder, snapshot: Snapshot, console: Console) -> None:
    """Plain lines: keys and the command are there to be copied."""
    told = machine_form(state, snapshot)
    console.print("\n[bold green]Loraplane is up[/]")
    for label, value in (
        ("OpenAI API", f"{told['gateway_url']}/v1"),
        ("admin API", told["admin_url"]),
        ("environment", f". {shlex.quote(_short(state.env))}"),
        ("logs", _short(state.logs)),
        *((f"key of {name.removeprefix(envfile.KEY_PREFIX).lower()}", key) for name, key in told["keys"].items()),
    ):
        console.print(Text(f"  {label:<16}", style="bold"), value, sep="", markup=False)
    for note in told["notes"]:
        console.print(Text("  note            ", style="bold yellow"), note, sep="", markup=False)
    for failure in snapshot.failures:
        console.print(Text("  not in force    ", style="bold red"), failure, sep="", markup=False)
    if told["curl"]:
        console.print("\nTry it:\n")
        console.print(told["curl"], markup=False)
        console.print()


def _model(state: StateFolder, values: dict[str, str]) -> tuple[str, str] | None:
    """(key variable, model) of an adapter that answers now."""
    for found in read_objects(state.objects, ADAPTER_KIND):
        spec = found["spec"]
        variable = envfile.key_variable(spec["tenant"])
        if condition(found, "Ready").get("status") == "True" and variable in values:
            return variable, str(spec.get("adapter") or found["metadata"]["name"])
    return None


def _curl(values: dict[str, str], model: tuple[str, str]) -> str:
    variable, name = model
    body = {"model": name, "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 40}
    return (
        f"curl -s {values[envfile.GATEWAY_URL]}/v1/chat/completions "
        f"-H 'authorization: Bearer {values[variable]}' -H 'content-type: application/json' "
        f"-d {shlex.quote(json.dumps(body))}"
    )


def _short(path: Path) -> str:
    """Relative to where the person stands, when it is below."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
