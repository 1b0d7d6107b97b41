"""The operator in this process over a temporary folder, with fake registry, supervisor and engines."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import yaml

from loraplane_core import credentials
from loraplane_core.identity import ReplicaId
from loraplane_operator.cluster.local import LocalCluster
from loraplane_operator.reconcile import Reconciler
from tests.operator.fakes.engine import FakeEngine
from tests.operator.fakes.registry import FakeRegistry
from tests.operator.fakes.supervisor import FakeSupervisor

MASTER = bytes(range(32))


def pool_manifest(name: str = "pool", replicas: int = 2, **spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "loraplane.dev/v1alpha1",
        "kind": "BaseModelPool",
        "metadata": {"name": name},
        "spec": {"baseModel": {"name": "base-a", "uri": "file:base-a"}, "replicas": replicas, **spec},
    }


def adapter_manifest(name: str = "pirate", tenant: str = "acme", **spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "loraplane.dev/v1alpha1",
        "kind": "LoRAAdapter",
        "metadata": {"name": name},
        "spec": {"tenant": tenant, "poolRef": {"name": "pool"}, "source": {"uri": f"file:{name}"}, **spec},
    }


class System:
    def __init__(self, root: Path) -> None:
        self.folder = root / "yaml"
        self.state = root / "state"
        self.models = root / "models"
        self.folder.mkdir(parents=True)
        (self.models / "base-a").mkdir(parents=True)
        (self.models / "base-a" / "config.json").write_text("{}")
        self.registry = FakeRegistry(credentials.operator_credential(MASTER))
        self.supervisor = FakeSupervisor(root / "s.sock", MASTER)
        self.reconciler: Reconciler | None = None
        self._task: asyncio.Task[None] | None = None

    def write(self, file: str, *documents: dict[str, Any]) -> None:
        (self.folder / file).write_text(yaml.safe_dump_all(documents))

    async def start_operator(self) -> None:
        cluster = LocalCluster(
            folder=self.folder,
            state_dir=self.state,
            supervisor_socket=self.supervisor._socket,
            model_root=self.models,
        )
        self.reconciler = Reconciler(
            cluster, registry_url=self.registry.url, master=MASTER, artifacts_url="http://127.0.0.1:9"
        )
        self._task = asyncio.create_task(self.reconciler.run())

    async def stop_operator(self) -> None:
        if self.reconciler is not None and self._task is not None:
            self.reconciler.stop()
            await self._task
            self.reconciler = self._task = None

    def object(self, kind: str, name: str) -> dict[str, Any] | None:
        path = self.state / "objects" / kind / "default" / f"{name}.json"
        with contextlib.suppress(FileNotFoundError):
            found: dict[str, Any] = json.loads(path.read_text())
            return found
        return None

    def condition(self, kind: str, name: str, type_: str) -> tuple[str, str]:
        found = self.object(kind, name) or {}
        for condition in found.get("status", {}).get("conditions", []):
            if condition["type"] == type_:
                return condition["status"], condition["reason"]
        return "", ""

    def ready(self, name: str = "pirate") -> bool:
        return self.condition("loraadapter", name, "Ready")[0] == "True"

    def engine(self, ordinal: int, pool: str = "pool") -> FakeEngine:
        return self.supervisor.engines[ReplicaId("default", pool, ordinal)]

    def holders(self, ref: str) -> set[int]:
        return {id_.ordinal for id_, engine in self.supervisor.engines.items() if ref in engine.residences}

    def events(self) -> list[dict[str, Any]]:
        path = self.state / "events.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


async def until(holds: Callable[[], object], seconds: float = 8.0, what: str = "") -> None:
    """Wait for a condition with a deadline."""
    try:
        async with asyncio.timeout(seconds):
            while not holds():  # noqa: ASYNC110 - the condition is about files and fakes
                await asyncio.sleep(0.02)
    except TimeoutError:
        raise AssertionError(f"not within {seconds} s: {what or holds}") from None


@contextlib.asynccontextmanager
async def running(root: Path) -> AsyncIterator[System]:
    system = System(root)
    await system.registry.start()
    await system.supervisor.start()
    await system.registry.create_tenant("acme", "default")
    try:
        await system.start_operator()
        yield system
    finally:
        await system.stop_operator()
        await system.supervisor.stop()
        await system.registry.stop()
