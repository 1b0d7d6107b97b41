from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.engine.server.world import World, make_model, managed, running, standalone


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def _shared(model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    folder = tmp_path_factory.mktemp("engine")
    async with running(standalone(model, folder), folder) as world:
        yield world


@pytest_asyncio.fixture(loop_scope="session")
async def engine(_shared: World) -> World:
    """A standalone engine without adapters, shared; its tests run in the session's loop."""
    _shared.core.reset()
    return _shared


@pytest_asyncio.fixture(loop_scope="session")
async def pool_engine(model: Path, tmp_path: Path) -> AsyncIterator[World]:
    """A managed engine whose artifact source is away."""
    async with running(managed(model, tmp_path, "http://127.0.0.1:9"), tmp_path) as world:
        yield world
