"""Fixtures of the data gateway's tests."""

from pathlib import Path

import pytest

from tests.gateway.data.harness import Place, Seeded, prepare, seed
from tests.gateway.postgres import Database


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return prepare(tmp_path)


@pytest.fixture
def seeded(database: Database, place: Place) -> Seeded:
    return seed(database, place.pepper)
