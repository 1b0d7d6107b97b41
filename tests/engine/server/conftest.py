from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.engine.server.artifacts import Source, artifact_source
from tests.engine.server.managed import Known, offer
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


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def _shared_pool(model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    folder = tmp_path_factory.mktemp("pool")
    async with running(managed(model, folder, "http://127.0.0.1:9"), folder) as world:
        yield world


@pytest_asyncio.fixture(loop_scope="session")
async def pool_engine(_shared_pool: World) -> World:
    """A managed engine whose artifact source is away, shared; for tests that leave nothing in it."""
    _shared_pool.core.reset()
    return _shared_pool


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def _source() -> AsyncIterator[Source]:
    async with artifact_source() as found:
        yield found


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def _pool(model: Path, _source: Source, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    folder = tmp_path_factory.mktemp("fetching")
    async with running(managed(model, folder, _source.url), folder) as world:
        yield world


@pytest_asyncio.fixture(loop_scope="session")
async def source(_source: Source) -> Source:
    _source.reset()
    return _source


@pytest_asyncio.fixture(loop_scope="session")
async def pool(_pool: World, source: Source) -> World:
    """A managed engine whose artifact source is there, shared; each test has adapters of its own."""
    _pool.core.reset()
    return _pool


@pytest.fixture
def known(tmp_path: Path, source: Source) -> Known:
    return offer(source, tmp_path)
