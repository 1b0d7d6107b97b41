"""Fixtures of the data gateway's tests: one seeded database for all tests that only read it."""

import secrets
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from loraplane_gateway.db.roles import DATA_ROLE
from tests.gateway import conftest as databases
from tests.gateway.data.harness import Place, World, prepare, seed
from tests.gateway.postgres import Database, PostgresServer

_SHARED = "data_shared"


@pytest.fixture(scope="session")
def pepper() -> bytes:
    return secrets.token_bytes(32)


@pytest.fixture(scope="session")
def world(postgres: PostgresServer, migrated_template: str, pepper: bytes) -> Iterator[World]:
    """Tests must not change it; those that do take `own_world`."""
    owner = databases._OWNER
    with psycopg.connect(postgres.url(), autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {_SHARED} TEMPLATE {migrated_template} OWNER {owner}")
    database = Database(
        name=_SHARED,
        owner_url=postgres.url(_SHARED, owner, databases._OWNER_PASSWORD),
        registry_url="",
        data_url=postgres.url(_SHARED, DATA_ROLE, databases._DATA_PASSWORD),
        psql=postgres.binaries / "psql",
    )
    yield World(database, seed(database, pepper))


@pytest.fixture
def own_world(database: Database, pepper: bytes) -> World:
    return World(database, seed(database, pepper))


@pytest.fixture
def place(tmp_path: Path, pepper: bytes) -> Place:
    return prepare(tmp_path, pepper)
