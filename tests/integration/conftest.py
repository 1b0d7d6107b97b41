"""One whole system for all integration tests: real processes, real model, real adapters."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from examples.demo_system import ROOT, System

MODELS = ROOT / ".loraplane" / "models"


@pytest.fixture(scope="session")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    running = System(tmp_path_factory.mktemp("integration"), MODELS)
    try:
        running.start(replicas=1)
        yield running
    finally:
        running.stop()


@pytest.fixture(scope="session")
def folder(system: System) -> Path:
    return system.folder
