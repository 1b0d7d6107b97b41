"""How fast the registry takes many objects at once: `python -m bench.registry_scale` prints JSON lines.

A real registry process over a real Postgres (of the tests: without fsync), a feed reader, and the operator's
calls as it makes them: claim and register each adapter, a bounded number at a time. Bounded in count and time.
"""

import argparse
import asyncio
import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
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
from loraplane_gateway.db.roles import REGISTRY_ROLE, create_roles
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
        with _registry(folder, server.url("bench", REGISTRY_ROLE, "bench-registry"), given.workers) as (url, process):
            token = operator_credential(read_key(folder / "master.key"))
            found = asyncio.run(_run(url, token, (folder / "admin.key").read_text(), given.adapters, given.parallel))
            usage = Path(f"/proc/{process.pid}/status").read_text()
            found["registry_rss_mb"] = int(usage.partition("VmRSS:")[2].split()[0]) // 1024
            found["registry_cpu_s"] = _cpu_seconds(process.pid)
    everything = resource.getrusage(resource.RUSAGE_CHILDREN)
    found["all_cpu_s"] = round(everything.ru_utime + everything.ru_stime, 1)  # registry, workers, Postgres
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


@contextlib.contextmanager
def _registry(folder: Path, database: str, workers: int | None) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    for name in ("master", "pepper"):
        (folder / f"{name}.key").write_text(new_master().hex())
    (folder / "admin.key").write_text("bench-admin-key-0123456789-0123456789")
    values = {"DATABASE_URL": database, "ADAPTER_ROOT": folder / "adapters", "STORE_DIR": folder / "store"}
    values |= {"MASTER_KEY_FILE": folder / "master.key", "KEY_PEPPER_FILE": folder / "pepper.key"}
    values |= {"ADMIN_KEY_FILE": folder / "admin.key", "PORTS_FILE": folder / "ports.json"}
    values |= {"ADMIN_PORT": 0, "ARTIFACT_PORT": 0} | ({"WORKERS": workers} if workers else {})
    environment = dict(os.environ) | {f"LORAPLANE_{name}": str(value) for name, value in values.items()}
    command = [str(Path(sys.executable).with_name("loraplane-gateway")), "registry"]
    process = subprocess.Popen(
        command,
        env=environment,
        stderr=subprocess.DEVNULL,
        preexec_fn=die_with_parent(signal.SIGTERM),  # noqa: PLW1509 - nothing here runs threads
    )
    try:
        deadline = time.monotonic() + 30
        while not (folder / "ports.json").exists():
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError("the registry did not start")
            time.sleep(0.05)
        yield f"http://127.0.0.1:{json.loads((folder / 'ports.json').read_text())['admin']}", process
    finally:
        process.terminate()
        process.wait(30)


async def _run(url: str, token: str, admin: str, adapters: int, parallel: int) -> dict[str, Any]:
    limits = httpx.Limits(max_connections=parallel + 2)
    headers = {"authorization": f"Bearer {token}"}
    async with (
        asyncio.timeout(DEADLINE_S),
        httpx.AsyncClient(base_url=url, headers=headers, limits=limits, timeout=30, trust_env=False) as client,
    ):
        tenant = {"name": "bench", "namespaces": ["bench"]}
        (
            await client.post("/admin/tenants", json=tenant, headers={"authorization": f"Bearer {admin}"})
        ).raise_for_status()
        (await client.put("/operator/pools/bench/pool", json=POOL)).raise_for_status()
        seen, connected = Seen(), asyncio.Event()
        reader = asyncio.create_task(_follow(client, seen, connected, adapters))
        await connected.wait()
        started = time.monotonic()
        slots = asyncio.Semaphore(parallel)
        await asyncio.gather(*(_object(client, slots, number) for number in range(adapters)))
        registered = time.monotonic() - started
        await reader
    told = sorted(at - started for at in seen.active.values())
    return {
        "adapters": adapters,
        "parallel": parallel,
        "registered_s": round(registered, 2),
        "registrations_per_s": round(adapters / registered, 1),
        "all_active_s": round(told[-1], 2),
        "ingestions_per_s": round(adapters / told[-1], 1),
        "feed_events": seen.events,
        "feed_bytes": seen.bytes,
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


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
