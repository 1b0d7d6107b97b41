"""Fixtures of the tests that run the whole product; conftest.py takes them in."""

from collections.abc import Iterator

import pytest

from tests.cluster.system import FAKE_IMAGE, REAL_IMAGE, ClusterAccess, System, running_system

#: More than one real engine on two cores is slow, not wrong.
REAL_REPLICAS = 3


@pytest.fixture(scope="session")
def real_system(cluster: ClusterAccess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    """REAL_REPLICAS real `loraplane-engine` processes with SmolLM2-135M-Instruct on the CPU."""
    with running_system(cluster, tmp_path_factory.mktemp("real"), REAL_IMAGE) as system:
        system.pool(replicas=REAL_REPLICAS)
        system.until_available(120)
        yield system


@pytest.fixture
def system(real_system: System) -> Iterator[System]:
    """The shared real system with its operator running and no adapter in it, before and after."""
    if not real_system.operator().running():
        real_system.start_operator()
        real_system.until_operator_ready()
    yield real_system
    real_system.clear()


@pytest.fixture
def fake_system(cluster: ClusterAccess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    """A system of its own whose engines are processes without a model (fake_engine); no pool yet."""
    with running_system(cluster, tmp_path_factory.mktemp("fake"), FAKE_IMAGE) as system:
        yield system
