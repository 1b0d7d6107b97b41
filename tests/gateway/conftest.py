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
_OWNER = "loraplane_owner"
_OWNER_PASSWORD = "owner-test-password"
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
    """The real roles and the real migrations, run once, by an owner who is no superuser."""
    with psycopg.connect(postgres.url(), autocommit=True) as connection:
        connection.execute(f"CREATE ROLE {_OWNER} LOGIN CREATEROLE PASSWORD '{_OWNER_PASSWORD}'")
        connection.execute(f"CREATE DATABASE {_TEMPLATE} OWNER {_OWNER}")
    owner_url = postgres.url(_TEMPLATE, _OWNER, _OWNER_PASSWORD)
    create_roles(owner_url, registry_password="before the second call", data_password="the same")
    create_roles(owner_url, registry_password=_REGISTRY_PASSWORD, data_password=_DATA_PASSWORD)
    migrate(owner_url)
    return _TEMPLATE


@pytest.fixture
def database(postgres: PostgresServer, migrated_template: str) -> Iterator[Database]:
    name = f"test_{next(_numbers)}"
    with psycopg.connect(postgres.url(), autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name} TEMPLATE {migrated_template} OWNER {_OWNER}")
        yield Database(
            name=name,
            owner_url=postgres.url(name, _OWNER, _OWNER_PASSWORD),
            registry_url=postgres.url(name, REGISTRY_ROLE, _REGISTRY_PASSWORD),
            data_url=postgres.url(name, DATA_ROLE, _DATA_PASSWORD),
            psql=postgres.binaries / "psql",
        )
        connection.execute(f"DROP DATABASE {name} WITH (FORCE)")
