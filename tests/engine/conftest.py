"""What the core's tests share: a tiny base, equal-sized artifacts, and cores that are closed."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine.harness import PAGE, Clock, Driven, Make, drive, make_artifact, make_base


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_base(tmp_path_factory.mktemp("base") / "tiny")


@pytest.fixture(scope="session")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Six of equal size (3 pages each) and different weights."""
    folder = tmp_path_factory.mktemp("artifacts")
    return [make_artifact(folder / f"a{i}", seed=i, rank=3) for i in range(6)]


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def make(base: Path, tmp_path: Path, clock: Clock) -> Iterator[Make]:
    made: list[Driven] = []

    def build(**options: Any) -> Driven:
        settings = {"max_model_len": 128, "max_batch_tokens": 32, "max_sequences": 8, **options}
        made.append(drive(tmp_path, base, clock=clock, **settings))
        return made[-1]

    yield build
    for driven in made:
        driven.core.close()


@pytest.fixture
def engine(make: Make) -> Driven:
    """With room for everything."""
    return make(device_memory=128 * PAGE, adapter_memory=64 * PAGE)
