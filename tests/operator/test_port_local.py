"""The Cluster port's contract on one machine: a folder, its state, a supervisor."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from loraplane_operator.actions import ObjectRef
from loraplane_operator.cluster.local import LocalCluster
from tests.operator.eventually import eventually
from tests.operator.fakes.supervisor import FakeSupervisor
from tests.operator.port_contract import CONTRACT, Check
from tests.operator.system import MASTER


class LocalBench:
    namespace = "default"

    def __init__(self, root: Path) -> None:
        self.folder = root / "yaml"
        self.state = root / "state"
        self.models = root / "models"
        for made in (self.folder, self.models):
            made.mkdir()
        self.supervisor = FakeSupervisor(root / "s.sock", MASTER)
        self.wakes = 0
        self.cluster = self.fresh()
        self.cluster.subscribe(self._woken)

    def _woken(self) -> None:
        self.wakes += 1

    def fresh(self) -> LocalCluster:
        return LocalCluster(
            folder=self.folder,
            state_dir=self.state,
            supervisor_socket=self.supervisor._socket,
            model_root=self.models,
        )

    async def put(self, manifest: Mapping[str, Any]) -> None:
        self._file(manifest["kind"], manifest["metadata"]["name"]).write_text(yaml.safe_dump(dict(manifest)))

    async def remove(self, ref: ObjectRef) -> None:
        self._file(ref.kind, ref.name).unlink()

    async def raw(self, ref: ObjectRef) -> dict[str, Any] | None:
        path = self.state / "objects" / ref.kind.lower() / ref.namespace / f"{ref.name}.json"
        with contextlib.suppress(FileNotFoundError):
            found: dict[str, Any] = json.loads(path.read_text())
            return found
        return None

    async def events(self, ref: ObjectRef) -> list[tuple[str, str]]:
        lines = [json.loads(line) for line in (self.state / "events.jsonl").read_text().splitlines()]
        return [(each["reason"], each["message"]) for each in lines if each["object"]["name"] == ref.name]

    def _file(self, kind: str, name: str) -> Path:
        return self.folder / f"{kind.lower()}-{name}.yaml"


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[LocalBench]:
    made = LocalBench(tmp_path)
    await made.supervisor.start()
    stop = asyncio.Event()

    async def watch() -> None:
        """As LocalCluster.run does, more often, and ending between two calls."""
        while not stop.is_set():
            made.cluster.scan()
            await made.cluster.refresh()
            await asyncio.sleep(0.02)

    watching = asyncio.create_task(watch())
    try:
        await eventually(made.cluster.observe)
        yield made
    finally:
        stop.set()
        await watching
        await made.supervisor.stop()


@pytest.mark.parametrize("check", CONTRACT, ids=lambda check: check.__name__)
async def test_local(bench: LocalBench, check: Check) -> None:
    await check(bench)
