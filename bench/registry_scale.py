"""What it costs to take many objects: `python -m bench.registry_scale` prints a JSON line.

A real registry process over a real Postgres (of the tests: without fsync), a data gateway on the same database, a
feed reader, and the operator's calls as it makes them: claim and register each adapter, a bounded number at a time,
all at once or (--rate) as an operator that has other things to do makes them. Bounded in count and time.

`cpu_ms_per_adapter`: processor time from the first call until all are active, without anybody's start.
"""

import argparse
import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psycopg
from safetensors.numpy import save_file

from loraplane_core.credentials import new_master, operator_credential, read_key
from loraplane_core.process import die_with_parent
from loraplane_gateway.db.migrate import migrate
from loraplane_gateway.db.roles import DATA_ROLE, REGISTRY_ROLE, create_roles
from tests.gateway.postgres import running_postgres

DEADLINE_S = 300.0
HIDDEN, LAYERS, RANK = 256, 4, 16
BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": 2 * HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 64,
}
POOL = {"base_model": "bench", "base_digest": "b" * 64, "config": BASE}


@dataclass
class Seen:
    """What the feed told."""

    active: dict[str, float] = field(default_factory=dict)  # adapter -> when
    events: int = 0
    bytes: int = 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--adapters", type=int, default=1000)
    parser.add_argument("--parallel", type=int, default=24, help="calls of the operator at a time")
    parser.add_argument("--rate", type=float, default=None, help="adapters a second; default: as fast as it goes")
    parser.add_argument("--workers", type=int, default=None, help="ingestion processes; default: the registry's own")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that nothing outlives it
    with tempfile.TemporaryDirectory(prefix="loraplane-bench-") as name, running_postgres() as server:
        folder = Path(name)
        owner = server.url("bench", "bench_owner", "bench-owner")
        with psycopg.connect(server.url(), autocommit=True) as connection:
            connection.execute("CREATE ROLE bench_owner LOGIN CREATEROLE PASSWORD 'bench-owner'")
            connection.execute("CREATE DATABASE bench OWNER bench_owner")
        create_roles(owner, registry_password="bench-registry", data_password="bench-data")
        migrate(owner)
        size = _write_artifacts(folder / "adapters", given.adapters)
        settings = _settings(folder)
        registry = settings | {"DATABASE_URL": server.url("bench", REGISTRY_ROLE, "bench-registry")}
        registry |= {"WORKERS": given.workers} if given.workers else {}
        gateway = settings | {"DATABASE_URL": server.url("bench", DATA_ROLE, "bench-data")}
        with _process("registry", folder, registry) as registered, _process("data", folder, gateway) as served:
            bench = Bench(folder, registered.port, given.adapters, given.parallel, given.rate)
            processes = {"registry": registered.pid, "gateway": served.pid}
            found = asyncio.run(bench.run(lambda: _cpu_seconds(processes)))
            usage = Path(f"/proc/{registered.pid}/status").read_text()
            found["registry_rss_mb"] = int(usage.partition("VmRSS:")[2].split()[0]) // 1024
    print(json.dumps({"artifact_bytes": size, "cores": os.cpu_count(), "load": os.getloadavg()[0], **found}))


def _write_artifacts(root: Path, count: int) -> int:
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": ["q_proj", "v_proj"]}
    random = np.random.default_rng(0)
    shapes = {"lora_A": (RANK, HIDDEN), "lora_B": (HIDDEN, RANK)}
    tensors = {
        f"base_model.model.model.layers.{layer}.self_attn.{module}.{side}.weight": random.standard_normal(shape)
        .astype(np.float32)
        for layer in range(LAYERS)
        for module in ("q_proj", "v_proj")
        for side, shape in shapes.items()
    }  # fmt: skip
    first = next(iter(tensors.values()))
    for number in range(count):
        folder = root / f"a{number}"
        folder.mkdir(parents=True)
        first[0, 0] = number + 1  # other bytes, so that nothing is stored twice
        save_file(tensors, folder / "adapter_model.safetensors")
        (folder / "adapter_config.json").write_text(json.dumps(config))
    return (root / "a0" / "adapter_model.safetensors").stat().st_size


def _settings(folder: Path) -> dict[str, object]:
    """Of both processes."""
    for name in ("master", "pepper", "data", "state"):
        (folder / f"{name}.key").write_text(new_master().hex())
    (folder / "admin.key").write_text("bench-admin-key-0123456789-0123456789")
    (folder / "endpoints").mkdir()
    files = {"MASTER_KEY": "master", "KEY_PEPPER": "pepper", "ADMIN_KEY": "admin", "DATA_KEY": "data"}
    files |= {"STATE_KEY": "state"}
    values: dict[str, object] = {f"{name}_FILE": folder / f"{file}.key" for name, file in files.items()}
    values |= {"ADAPTER_ROOT": folder / "adapters", "STORE_DIR": folder / "store"}
    values |= {"ENDPOINTS_DIR": folder / "endpoints"}
    return values | {"ADMIN_PORT": 0, "ARTIFACT_PORT": 0, "PORT": 0}


@dataclass
class Running:
    pid: int
    port: int


@contextlib.contextmanager
def _process(command: str, folder: Path, settings: dict[str, object]) -> Iterator[Running]:
    ports = folder / f"{command}.ports.json"
    environment = {f"LORAPLANE_{name}": str(value) for name, value in (settings | {"PORTS_FILE": ports}).items()}
    child = subprocess.Popen(
        [str(Path(sys.executable).with_name("loraplane-gateway")), command],
        env=dict(os.environ) | environment,
        stderr=subprocess.DEVNULL,
        preexec_fn=die_with_parent(signal.SIGTERM),  # noqa: PLW1509 - nothing here runs threads
    )
    try:
        deadline = time.monotonic() + 60
        while not ports.exists():
            if child.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{command} did not start")
            time.sleep(0.05)
        found = json.loads(ports.read_text())
        yield Running(child.pid, found.get("admin") or found["data"])
    finally:
        child.terminate()
        child.wait(30)


@dataclass
class Bench:
    folder: Path
    port: int
    adapters: int
    parallel: int
    rate: float | None

    async def run(self, cpu_seconds: Callable[[], dict[str, float]]) -> dict[str, Any]:
        limits = httpx.Limits(max_connections=self.parallel + 2)
        headers = {"authorization": f"Bearer {operator_credential(read_key(self.folder / 'master.key'))}"}
        admin = {"authorization": f"Bearer {(self.folder / 'admin.key').read_text()}"}
        url = f"http://127.0.0.1:{self.port}"
        async with (
            asyncio.timeout(DEADLINE_S),
            httpx.AsyncClient(base_url=url, headers=headers, limits=limits, timeout=30, trust_env=False) as client,
        ):
            tenant = {"name": "bench", "namespaces": ["bench"]}
            (await client.post("/admin/tenants", json=tenant, headers=admin)).raise_for_status()
            (await client.put("/operator/pools/bench/pool", json=POOL)).raise_for_status()
            seen, connected = Seen(), asyncio.Event()
            reader = asyncio.create_task(_follow(client, seen, connected, self.adapters))
            await connected.wait()
            return await self._measured(client, seen, reader, cpu_seconds)

    async def _measured(
        self,
        client: httpx.AsyncClient,
        seen: Seen,
        reader: "asyncio.Task[None]",
        cpu_seconds: Callable[[], dict[str, float]],
    ) -> dict[str, Any]:
        started, before = time.monotonic(), cpu_seconds()
        slots = asyncio.Semaphore(self.parallel)
        async with asyncio.TaskGroup() as group:
            for number in range(self.adapters):
                if self.rate is not None:
                    await asyncio.sleep(max(0.0, started + number / self.rate - time.monotonic()))
                group.create_task(_object(client, slots, number))
        registered = time.monotonic() - started
        await reader
        spent = {name: seconds - before.get(name, 0.0) for name, seconds in cpu_seconds().items()}
        told = sorted(at - started for at in seen.active.values())
        return {
            "adapters": self.adapters,
            "parallel": self.parallel,
            "rate": self.rate,
            "registered_s": round(registered, 2),
            "registrations_per_s": round(self.adapters / registered, 1),
            "all_active_s": round(told[-1], 2),
            "ingestions_per_s": round(self.adapters / told[-1], 1),
            "feed_events": seen.events,
            "feed_bytes": seen.bytes,
            "cpu_ms_per_adapter": {name: round(1000 * s / self.adapters, 2) for name, s in spent.items()},
        }


async def _object(client: httpx.AsyncClient, slots: asyncio.Semaphore, number: int) -> None:
    name = f"a{number}"
    claim = {"ref": f"bench/{name}", "tenant": "bench", "adapter": name, "pool": "bench/pool"}
    source = {"source": {"uri": f"file:{name}"}, "source_hash": name}
    async with slots:
        (await client.put(f"/operator/claims/u-{name}", json=claim)).raise_for_status()
        (await client.post(f"/operator/claims/u-{name}/register", json=source)).raise_for_status()


async def _follow(client: httpx.AsyncClient, seen: Seen, connected: asyncio.Event, adapters: int) -> None:
    """Until the feed has told that every adapter is active. Raises RuntimeError on a version that was refused."""
    async with client.stream("GET", "/operator/feed") as answer:
        async for line in _data(answer):
            connected.set()
            seen.events, seen.bytes = seen.events + 1, seen.bytes + len(line)
            adapter = json.loads(line).get("adapter")
            if not adapter or isinstance(adapter, list):
                continue
            refused = [version for version in adapter.get("versions", ()) if version["state"] == "rejected"]
            if refused:
                raise RuntimeError(f"{refused[0]['reason']}: {refused[0]['message']}")
            if adapter.get("active_version"):
                seen.active.setdefault(adapter["adapter"], time.monotonic())
            if len(seen.active) == adapters:
                return


async def _data(answer: httpx.Response) -> AsyncIterator[str]:
    async for line in answer.aiter_lines():
        if line.startswith("data: "):
            yield line.removeprefix("data: ")


def _cpu_seconds(processes: dict[str, int]) -> dict[str, float]:
    """By process, and of all workers that the registry has had."""
    found = {name: sum(_ticks(pid)[:2]) for name, pid in processes.items()}
    registry = processes["registry"]
    children = Path(f"/proc/{registry}/task/{registry}/children").read_text().split()
    found["workers"] = sum(_ticks(registry)[2:]) + sum(sum(_ticks(int(child))) for child in children)
    return {name: ticks / os.sysconf("SC_CLK_TCK") for name, ticks in found.items()}


def _ticks(pid: int) -> list[int]:
    """utime, stime, and those of children that have ended."""
    return [int(field) for field in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:15]]


if __name__ == "__main__":
    main()
