"""The running system as the tour sees it: the `loraplane` command, the OpenAI port, objects and metrics."""

import asyncio
import contextlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml
from prometheus_client.parser import text_string_to_metric_families

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"
LORAPLANE = str(Path(sys.executable).with_name("loraplane"))
COMMAND_DEADLINE_S = 120.0
ANSWER_DEADLINE_S = 120.0


@dataclass(frozen=True)
class Answer:
    """A whole streamed answer. `error` is the typed error event that ended the stream, if one did."""

    status: int
    text: str
    headers: httpx.Headers
    tokens: int = 0
    error: dict[str, Any] | None = None
    body: dict[str, Any] | None = None  # of a refusal


class System:
    """Owns the processes from `start` to `stop`. `work` is a folder of its own, emptied at the start."""

    def __init__(self, work: Path, models: Path) -> None:
        self.folder = work / "folder"
        self._state = work / "state"
        self._work = work
        self._models = models
        self.env: dict[str, str] = {}

    # -- processes

    def start(self, replicas: int) -> None:
        """Run `loraplane up` on a copy of the example documents. Returns when every object is Ready."""
        self.stop()
        shutil.rmtree(self._work, ignore_errors=True)
        for part in ("tenants", "pools", "lora"):
            shutil.copytree(EXAMPLES / part, self.folder / part)
        self.edit("pools", replicas=replicas)
        roots = ["--model-root", str(self._models), "--adapter-root", str(EXAMPLES / "adapters")]
        self.command("up", "-f", str(self.folder), "--detach", *roots)
        for line in (self._state / "env").read_text().splitlines():
            name, equals, value = line.removeprefix("export ").partition("=")
            if equals and not name.startswith("#"):
                self.env[name] = "".join(shlex.split(value))

    def stop(self) -> None:
        """Leave nothing: no process, no database folder."""
        if self._state.exists():
            self.command("down", "--purge")

    def command(self, *words: str) -> str:
        """Run `loraplane`; raises RuntimeError with what it said."""
        environment = os.environ | {"LORAPLANE_STATE_DIR": str(self._state)}
        done = subprocess.run(
            [LORAPLANE, *words],
            env=environment,
            capture_output=True,
            text=True,
            timeout=COMMAND_DEADLINE_S,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(
                f"loraplane {shlex.join(words)} ended with {done.returncode}:\n{done.stderr}{done.stdout}"
            )
        return done.stdout

    def json(self, *words: str) -> Any:
        return json.loads(self.command(*words, "--json"))

    def replica_processes(self) -> dict[str, int]:
        """{pod: pid} of the engines that run and are ready."""
        workloads = json.loads((self._state / "status.json").read_text())["workloads"]
        return {
            f"{workload['pool']}-{replica['ordinal']}": replica["pid"]
            for workload in workloads
            for replica in workload["replicas"]
            if replica["ready"]
        }

    # -- objects

    def edit(self, part: str, **spec: Any) -> None:
        """Change the spec of every document in one part (`pools`, `lora`) of the watched folder."""
        for path in sorted((self.folder / part).glob("*.yaml")):
            document = yaml.safe_load(path.read_text())
            document["spec"].update(spec)
            _write(path, document)

    def write_adapter(self, name: str, tenant: str, source: str, **spec: Any) -> Path:
        """Add a LoRAAdapter document to the watched folder, as an editor would."""
        template = yaml.safe_load(next((self.folder / "lora").glob("*.yaml")).read_text())
        document = template | {"metadata": {"name": name}}
        document["spec"] = template["spec"] | {"tenant": tenant, "source": {"uri": f"file:{source}"}, **spec}
        document["spec"].pop("adapter", None)
        path = self.folder / "lora" / f"{name}.yaml"
        _write(path, document)
        return path

    def adapter_object(self, name: str) -> dict[str, Any] | None:
        path = self._state / "objects" / "loraadapter" / "default" / f"{name}.json"
        return dict(json.loads(path.read_text())) if path.exists() else None

    def condition(self, name: str, kind: str) -> dict[str, Any]:
        status = (self.adapter_object(name) or {}).get("status") or {}
        return next((c for c in status.get("conditions") or [] if c["type"] == kind), {"status": "Unknown"})

    def ready_replicas(self, name: str) -> int:
        status = (self.adapter_object(name) or {}).get("status") or {}
        return int(status.get("readyReplicas") or 0)

    # -- requests

    async def ask(self, tenant: str, model: str, question: str, **options: Any) -> Answer:
        """One streamed chat answer with the tenant's key."""
        body = {
            "model": model,
            "messages": [{"role": "user", "content": question}],
            "max_tokens": 64,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        } | options
        key = self.env[f"LORAPLANE_KEY_{tenant.upper().replace('-', '_')}"]
        url = self.env["LORAPLANE_GATEWAY_URL"] + "/v1/chat/completions"
        headers = {"authorization": f"Bearer {key}"}
        async with (
            httpx.AsyncClient(timeout=ANSWER_DEADLINE_S) as client,
            client.stream("POST", url, json=body, headers=headers) as response,
        ):
            if response.status_code != 200:
                return Answer(response.status_code, "", response.headers, body=json.loads(await response.aread()))
            return await _fold(response)

    async def ask_all(self, asked: Sequence[tuple[str, str, str]], **options: Any) -> list[Answer]:
        return list(await asyncio.gather(*(self.ask(*each, **options) for each in asked)))

    async def metrics(self) -> dict[str, dict[str, float]]:
        """{pod: {sample name, with le for histogram buckets: value}} of every engine."""
        found: dict[str, dict[str, float]] = {}
        for path in sorted((self._state / "endpoints").glob("*.json")):
            manifest = json.loads(path.read_text())
            port = next(port["port"] for port in manifest["ports"] if port["name"] == "metrics")
            with contextlib.suppress(httpx.TransportError):  # it is being replaced
                async with httpx.AsyncClient(timeout=5) as client:
                    text = (await client.get(f"http://127.0.0.1:{port}/metrics")).text
                found[manifest["metadata"]["name"]] = _samples(text)
        return found

    async def steps_with(self, adapters: int) -> float:
        """Steps, over all engines and since their starts, whose batch held at least `adapters` distinct ones."""
        total = 0.0
        for samples in (await self.metrics()).values():
            fewer = samples.get(f"adapters_per_step_bucket{{le={adapters - 1:g}}}", 0.0)
            total += samples.get("adapters_per_step_bucket{le=inf}", 0.0) - fewer
        return total

    async def metric_sum(self, name: str) -> float:
        return sum(samples.get(name, 0.0) for samples in (await self.metrics()).values())


async def wait_until(condition: Callable[[], bool], what: str, seconds: float = 30.0) -> float:
    """Seconds waited. Raises TimeoutError that says what never came."""
    start = time.monotonic()
    while not condition():
        if time.monotonic() - start > seconds:
            raise TimeoutError(f"after {seconds:.0f} s still not: {what}")
        await asyncio.sleep(0.05)
    return time.monotonic() - start


async def _fold(response: httpx.Response) -> Answer:
    text: list[str] = []
    tokens = 0
    error = None
    async for line in response.aiter_lines():
        if not line.startswith("data: ") or line == "data: [DONE]":
            continue
        event = json.loads(line.removeprefix("data: "))
        error = event.get("error") or error
        tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
        text += [choice["delta"].get("content") or "" for choice in event.get("choices") or []]
    return Answer(200, "".join(text), response.headers, tokens, error)


def _samples(text: str) -> dict[str, float]:
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            bound = f"{{le={float(sample.labels['le']):g}}}" if "le" in sample.labels else ""
            name = sample.name.removeprefix("loraplane_engine_") + bound
            found[name] = found.get(name, 0.0) + sample.value
    return found


def _write(path: Path, document: dict[str, Any]) -> None:
    """Whole or not at all: the folder is being watched."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(yaml.safe_dump(document, sort_keys=False))
    temporary.replace(path)
