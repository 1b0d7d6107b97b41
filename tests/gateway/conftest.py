"""Database fixtures: one server per session, one migrated database (a copy of a template) per test."""

from collections.abc import Iterator
from itertools import count

import psycopg
import pytest

from loraplane_gateway.db.migrate import migrate
from loraplane_gateway.db.roles import DATA_ROLE, REGISTRY_ROLE, create_roles
from tests.gateway.postgres import Database, PostgresServer, running_postgres, running_valkey

_REGISTRY_PASSWORD = "registry-test-password"
_DATA_PASSWORD = "data-test-password"
_TEMPLATE = "loraplane_template"
_numbers = count(1)


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    with running_postgres() as server:
        yield server


@pytest.fixture(scope="session")
def valkey_url() -> Iterator[str]:
    with running_valkey() as url:
        yield url


@pytest.fixture(scope="session")
def migrated_template(postgres: PostgresServer) -> str:
    """The real roles and the real migrations, run once."""
    create_roles(postgres.url(), registry_password=_REGISTRY_PASSWORD, data_password=_DATA_PASSWORD)
    with psycopg.connect(postgres.url(), autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {_TEMPLATE}")
    migrate(postgres.url(_TEMPLATE))
    return _TEMPLATE


@pytest.fixture
def database(postgres: PostgresServer, migrated_template: str) -> Iterator[Database]:
    name = f"test_{next(_numbers)}"
    with psycopg.connect(postgres.url(), autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name} TEMPLATE {migrated_template}")
        yield Database(
            name=name,
            owner_url=postgres.url(name),
            registry_url=postgres.url(name, REGISTRY_ROLE, _REGISTRY_PASSWORD),
            data_url=postgres.url(name, DATA_ROLE, _DATA_PASSWORD),
            psql=postgres.binaries / "psql",
        )
        connection.execute(f"DROP DATABASE {name} WITH (FORCE)")
