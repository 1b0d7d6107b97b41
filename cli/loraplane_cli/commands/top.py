"""`loraplane top`: replicas, load, and what adapters cost, read from the engines' own metrics."""

import contextlib
import json as jsonlib
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

import httpx
import typer
from rich.console import Group
from rich.live import Live
from rich.table import Table

from loraplane_cli.objects import Object, read_objects
from loraplane_cli.output import console, lines, print_json, size, table
from loraplane_cli.session import DEFAULT_STATE, Json, StateDir, tell_if_stopped
from loraplane_cli.supervisor.layout import StateFolder
from loraplane_core.errors import InvalidName
from loraplane_core.labels import ADAPTER_KIND
from loraplane_core.wire.endpoints import Endpoint, from_slice

PREFIX = "loraplane_engine_"
SCRAPE_SECONDS = 2.0
REFRESH_SECONDS = 1.0
_SAMPLE = re.compile(r"^([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})? (\S+)$")
_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"')

Labels = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Reading:
    """One engine now; `values` holds its metrics without the prefix, None when it did not answer."""

    endpoint: Endpoint
    at: float  # monotonic seconds
    values: dict[tuple[str, Labels], float] | None

    def get(self, name: str) -> float:
        return (self.values or {}).get((name, ()), 0.0)

    def rate(self, name: str, before: "Reading | None") -> float | None:
        """Per second since `before`; None without one, or when the engine restarted meanwhile."""
        if before is None or before.values is None or self.values is None or self.at <= before.at:
            return None
        grown = self.get(name) - before.get(name)
        return grown / (self.at - before.at) if grown >= 0 else None


def top(
    once: Annotated[bool, typer.Option("--once", help="Show it once, as into a pipe or file.")] = False,
    state_dir: StateDir = DEFAULT_STATE,
    json: Json = False,
) -> None:
    """Show live, until Ctrl-C: replicas, load, residency, and the KV tokens that adapters displace."""
    state = StateFolder.of(state_dir)
    with httpx.Client(timeout=SCRAPE_SECONDS, trust_env=False) as client:
        if once or json or not console.is_terminal:
            tell_if_stopped(state)
            readings = read_engines(state, client)
            adapters = list(read_objects(state.objects, ADAPTER_KIND))
            if json:
                print_json(_machine_form(readings, adapters))
            else:
                lines.print(_picture(readings, {}, adapters))
            return
        before: dict[str, Reading] = {}
        with Live(console=console, screen=True, auto_refresh=False) as live, contextlib.suppress(KeyboardInterrupt):
            while True:
                readings = read_engines(state, client)
                adapters = list(read_objects(state.objects, ADAPTER_KIND))
                live.update(_picture(readings, before, adapters), refresh=True)
                before = {str(reading.endpoint.replica): reading for reading in readings}
                time.sleep(REFRESH_SECONDS)


def read_engines(state: StateFolder, client: httpx.Client) -> list[Reading]:
    readings = []
    for endpoint in _endpoints(state):
        values = None
        with contextlib.suppress(httpx.HTTPError):
            answer = client.get(f"http://{endpoint.address}:{endpoint.metrics_port}/metrics")
            values = dict(parse_metrics(answer.text)) if answer.status_code == 200 else None
        readings.append(Reading(endpoint, time.monotonic(), values))
    return readings


def parse_metrics(text: str) -> Iterator[tuple[tuple[str, Labels], float]]:
    """The engine's own samples of a Prometheus exposition, as ((name, labels), value)."""
    for line in text.splitlines():
        match = _SAMPLE.match(line)
        if match is not None and match[1].startswith(PREFIX):
            with contextlib.suppress(ValueError):
                labels = tuple((name, value) for name, value in _LABEL.findall(match[2] or ""))
                yield (match[1].removeprefix(PREFIX), labels), float(match[3])


def _endpoints(state: StateFolder) -> list[Endpoint]:
    found = []
    for path in sorted(state.endpoints.glob("*.json")):
        with contextlib.suppress(FileNotFoundError, ValueError, InvalidName):
            found += from_slice(jsonlib.loads(path.read_text()))
    return found


def _picture(readings: list[Reading], before: dict[str, Reading], adapters: list[Object]) -> Group:
    return Group(_engines(readings, before), "", _adapters(readings, adapters))


def _engines(readings: list[Reading], before: dict[str, Reading]) -> Table:
    rows: list[list[object]] = []
    for reading in readings:
        endpoint = reading.endpoint
        state = "terminating" if endpoint.terminating else "ready" if endpoint.ready else "not ready"
        if reading.values is None:
            rows.append([endpoint.replica, state])
            continue
        speed = reading.rate("generated_tokens_total", before.get(str(endpoint.replica)))
        kv, lost = reading.get("kv_tokens"), reading.get("kv_tokens_displaced")
        rows.append(
            [
                endpoint.replica,
                state,
                int(reading.get("running_requests")),
                int(reading.get("waiting_requests")),
                "" if speed is None else f"{speed:.0f}",
                _share(reading.get("adapter_bytes"), reading.get("adapter_budget_bytes")),
                int(reading.get("kv_tokens_free")),
                _share(lost, kv, f"{lost:.0f}"),
                int(reading.get("adapters_per_step_max")),
                int(reading.get("adapter_swaps_total")),
            ]
        )
    # Eighty columns hold it: ADAPTERS is device memory, KV LOST the tokens it displaces, MIX adapters in one step.
    headings = ["REPLICA", "STATE", "RUN", "WAIT", "TOK/S", "ADAPTERS", "KV FREE", "KV LOST", "MIX", "SWAPS"]
    return table(headings, rows)


def _share(part: float, whole: float, shown: str | None = None) -> str:
    text = size(part) if shown is None else shown
    return f"{text} ({100 * part / whole:.0f}%)" if whole else text


def _adapters(readings: list[Reading], adapters: list[Object]) -> Table:
    tokens: dict[tuple[str, str], float] = {}
    for reading in readings:
        for (name, labels), value in (reading.values or {}).items():
            if name == "adapter_tokens_total":
                of = dict(labels)
                key = of.get("tenant", ""), of.get("adapter", "")
                tokens[key] = tokens.get(key, 0) + value
    rows = []
    for found in adapters:
        spec, status = found["spec"], found.get("status") or {}
        name = spec.get("adapter") or found["metadata"]["name"]
        held = {row["name"].rpartition("/")[2]: row["residency"] for row in status.get("replicas") or []}
        where = "  ".join(f"{ordinal}:{residency}" for ordinal, residency in sorted(held.items()))
        spent = tokens.get((spec["tenant"], name), 0)
        rows.append([spec["tenant"], name, status.get("activeVersion"), status.get("resident"), where, f"{spent:.0f}"])
    return table(["TENANT", "ADAPTER", "VERSION", "RESIDENT", "WHERE", "TOKENS"], rows)


def _machine_form(readings: list[Reading], adapters: list[Object]) -> dict[str, Any]:
    return {
        "replicas": [
            {
                "replica": str(reading.endpoint.replica),
                "ready": reading.endpoint.ready,
                "metrics": None
                if reading.values is None
                else {name: value for (name, labels), value in reading.values.items() if not labels},
            }
            for reading in readings
        ],
        "adapters": [
            {
                "tenant": found["spec"]["tenant"],
                "adapter": found["spec"].get("adapter") or found["metadata"]["name"],
                "status": found.get("status") or {},
            }
            for found in adapters
        ],
    }
