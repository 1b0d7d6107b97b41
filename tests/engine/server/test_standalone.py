"""A standalone engine: adapters named on its command line."""

import asyncio
from pathlib import Path

import pytest

from loraplane_engine import messages as m
from tests.engine.server.artifacts import make_artifact
from tests.engine.server.world import World, running, standalone

pytestmark = pytest.mark.asyncio(loop_scope="session")


def _evict(world: World, name: str) -> None:
    key = next(key for key in world.core.adapters if f"/{name}@" in key.ref)
    world.core.say(
        m.AdapterState(key=key, residency="absent", bytes=0, rank=4, pinned=False, warm_wanted=False, in_use=0)
    )


async def test_an_adapter_that_left_memory_and_disk_is_made_again_from_its_folder(model: Path, tmp_path: Path) -> None:
    adapters = []
    for seed, name in enumerate(("one", "two")):
        make_artifact(tmp_path / name, seed=seed)
        adapters += ["--adapter", f"{name}={tmp_path / name}"]
    settings = standalone(model, tmp_path, *adapters, "--disk-cache", "100Ki")  # room for one image
    async with running(settings, tmp_path) as world:
        for name in ("one", "two", "one"):
            _evict(world, name)
            async with asyncio.timeout(10):
                while (await world.complete(model=name)).headers["x-loraplane-residency"] != "cold":
                    pass  # the server has not heard of it yet
