"""Database fixtures: one server and one migrated database per session, empty for every test."""

from collections.abc import Iterator

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


@pytest.fixture(scope="session")
def shared_database(postgres: PostgresServer, migrated_template: str) -> Database:
    with psycopg.connect(postgres.url(), autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE loraplane_test TEMPLATE {migrated_template} OWNER {_OWNER}")
    return Database(
        name="loraplane_test",
        owner_url=postgres.url("loraplane_test", _OWNER, _OWNER_PASSWORD),
        registry_url=postgres.url("loraplane_test", REGISTRY_ROLE, _REGISTRY_PASSWORD),
        data_url=postgres.url("loraplane_test", DATA_ROLE, _DATA_PASSWORD),
        psql=postgres.binaries / "psql",
    )


@pytest.fixture
def database(postgres: PostgresServer, shared_database: Database) -> Iterator[Database]:
    """Empty for every test. Emptied, not made anew: that takes a thousandth of the time."""
    yield shared_database
    with psycopg.connect(postgres.url(shared_database.name)) as connection:
        # What a killed process left must not hold a lock on what is deleted.
        connection.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s AND pid <> pg_backend_pid()",
            (shared_database.name,),
        )
        connection.execute("SET LOCAL session_replication_role = replica")  # no triggers, no foreign keys
        tables = connection.execute("SELECT tablename FROM pg_tables WHERE schemaname = 'public'").fetchall()
        for (table,) in tables:
            if table != "alembic_version":
                connection.execute(f"DELETE FROM {table}")
