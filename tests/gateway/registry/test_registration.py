from pathlib import Path

import pytest

from loraplane_gateway.registry.ingestion.dispatcher import Dispatcher
from loraplane_gateway.settings import RegistrySettings
from tests.gateway.artifacts import BASE_DIGEST, BASE_NAME, write_adapter
from tests.gateway.registry.conftest import POOL, WAIT, Api


@pytest.fixture
def root(settings: RegistrySettings) -> Path:
    return settings.adapter_root


async def test_a_registered_adapter_is_validated_and_active(api: Api, ingesting: Dispatcher, root: Path) -> None:
    write_adapter(root / "a")
    await api.tenant("acme")
    await api.pool()
    version = await api.register("acme", "pirate", "a")
    assert (version.version, version.state, version.message) == (1, "validated", "")
    assert (version.rank, version.target_modules, version.base_evidence) == (4, ["q_proj"], "artifact")
    assert (version.base_model, version.base_digest) == (BASE_NAME, BASE_DIGEST)
    adapter = await api.adapter("acme", "pirate")
    assert (adapter.active_version, adapter.pool) == (1, POOL)
    assert adapter.versions[0].weight == 100
