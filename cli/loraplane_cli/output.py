"""What the commands print: tables for people, JSON for programs, one form of error."""

import json
import sys
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime

import msgspec
import typer
import yaml
from rich.console import Console
from rich.table import Table
from rich.text import Text

from loraplane_cli.errors import LocalError
from loraplane_core.errors import LoraplaneError, error_object

#: Exit status of a command that was refused by the other side.
REFUSED = 1
#: Exit status when a deadline passed while waiting.
TIMED_OUT = 7

LINE_WIDTH = 2000

console = Console(highlight=False, soft_wrap=True)
#: For tables: never narrower than a line.
lines = Console(highlight=False, width=LINE_WIDTH)
errors = Console(stderr=True, highlight=False, soft_wrap=True)


def print_json(value: object) -> None:
    """One JSON document on standard output; wire types are allowed anywhere in it."""
    sys.stdout.write(json.dumps(msgspec.to_builtins(value), indent=2, ensure_ascii=False) + "\n")


def print_yaml(value: object) -> None:
    sys.stdout.write(yaml.safe_dump(msgspec.to_builtins(value), sort_keys=False, allow_unicode=True))


def print_table(headings: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """One line a row, however long, as kubectl prints: a terminal may wrap it, a pipe must not see it cut."""
    lines.print(table(headings, rows))


def table(headings: Sequence[str], rows: Iterable[Sequence[object]]) -> Table:
    """Left-aligned and without frames."""
    built = Table(box=None, pad_edge=False, header_style="bold", show_edge=False, padding=(0, 2, 0, 0))
    for heading in headings:
        built.add_column(heading, no_wrap=True)
    for row in rows:
        built.add_row(*(Text("" if cell is None else str(cell)) for cell in row))
    return built


def age(moment: str, now: datetime | None = None) -> str:
    """How long ago an RFC 3339 time was, in its largest unit; "" for none."""
    if not moment:
        return ""
    try:
        then = datetime.fromisoformat(moment)
    except ValueError:
        return moment
    seconds = max(0, int(((now or datetime.now(UTC)) - then).total_seconds()))
    for unit, size in (("d", 86_400), ("h", 3_600), ("m", 60)):
        if seconds >= size:
            return f"{seconds // size}{unit}"
    return f"{seconds}s"


def size(count: float) -> str:
    """Bytes for people."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


def fail(error: LoraplaneError, *, as_json: bool) -> int:
    """Show a refusal; the exit status it stands for."""
    if as_json:
        print_json(error_object(error))
    else:
        errors.print(f"[red]error[/]: {error.code}", end=": ")
        errors.print(error.message, markup=False)
    return error.exit_code if isinstance(error, LocalError) else REFUSED


def done(text: str, value: object, *, as_json: bool) -> None:
    """Say that something was done; as JSON, the thing itself."""
    if as_json:
        print_json(value)
    else:
        console.print(text, markup=False)


def leave(code: int) -> None:
    """End the command with an exit status other than 0."""
    if code:
        raise typer.Exit(code)
