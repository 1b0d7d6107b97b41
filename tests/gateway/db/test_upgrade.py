"""From one release's schema to the next: what is filled in, and that the previous release still works on it."""

from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from loraplane_core.wire.registry import Adapter, Rollback
from loraplane_gateway.__main__ import main
from loraplane_gateway.db.engine import create_engine
from loraplane_gateway.db.migrate import migrate
from loraplane_gateway.db.roles import REGISTRY_ROLE
from loraplane_gateway.db.sessions import Scope, session_maker, transaction
from loraplane_gateway.registry.activation.service import ActivationService
from loraplane_gateway.registry.adapters.repository import AdapterRepository
from tests.gateway import conftest as databases
from tests.gateway.postgres import Database, PostgresServer

#: As release 1 wrote them.
VERSION = (
    "INSERT INTO tenant_adapters (tenant_id, adapter, version, state, digest, base_digest, bytes, is_active)"
    " VALUES ('acme', %s, %s, 'validated', repeat('a', 64), repeat('b', 64), 10, %s)"
)
OFF = (
    "UPDATE tenant_adapters SET is_active = FALSE, weight = 0"
    " WHERE tenant_id = 'acme' AND adapter = 'pirate' AND is_active AND version <> %s"
)
ON = (
    "UPDATE tenant_adapters SET is_active = TRUE, weight = 100"
    " WHERE tenant_id = 'acme' AND adapter = 'pirate' AND version = %s"
)
REMEMBER = "UPDATE adapters SET previous_version = %s WHERE tenant_id = 'acme' AND name = 'pirate'"
CLAIM = "UPDATE adapters SET claim_uid = %s, claim_ref = 'team/pirate' WHERE tenant_id = 'acme' AND name = %s"
RELEASE = "UPDATE adapters SET claim_uid = NULL, claim_ref = '' WHERE tenant_id = 'acme' AND name = %s"
REGISTRATION = (
    "INSERT INTO registrations (uid, source_hash, tenant_id, adapter, version) VALUES (%s, %s, 'acme', %s, %s)"
)
AUDIT = (
    "INSERT INTO audit_log (actor, action, tenant_id, subject, version, from_version) VALUES ('a', 'b', '', '', 1, 2)"
)


@pytest.fixture
def first(postgres: PostgresServer, migrated_template: str) -> Iterator[Database]:
    """A database with the schema of release 1 and what it had written."""
    name, owner = "loraplane_upgrade", databases._OWNER
    owner_url = postgres.url(name, owner, databases._OWNER_PASSWORD)
    with psycopg.connect(postgres.url(), autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name} OWNER {owner}")
    migrate(owner_url, "r0001")
    with psycopg.connect(owner_url) as connection:
        for adapter in ("pirate", "poet"):
            for number in (1, 2, 3):
                connection.execute(VERSION, (adapter, number, number == 3))
            connection.execute(CLAIM, (f"u-{adapter}", adapter))
        connection.execute(REMEMBER, (2,))
        for hashed, adapter, number in (("one", "pirate", 3), ("two", "poet", 1), ("three", "poet", 3)):
            connection.execute(REGISTRATION, (f"u-{adapter}", hashed, adapter, number))
    yield Database(
        name, owner_url, postgres.url(name, REGISTRY_ROLE, databases._REGISTRY_PASSWORD), "", postgres.binaries
    )
    with psycopg.connect(postgres.url(), autocommit=True) as connection:
        connection.execute(f"DROP DATABASE {name} WITH (FORCE)")


async def _now(database: Database, *, roll_back: bool = False) -> Adapter:
    engine = create_engine(database.registry_url, application="test", pool_size=1)
    scope = Scope("acme")
    try:
        async with transaction(session_maker(engine), scope) as session:
            if roll_back:
                await ActivationService(session, scope, "test").rollback("pirate", Rollback())
            found = await AdapterRepository(session, scope).get("pirate")
    finally:
        await engine.dispose()
    assert found is not None
    return found


async def test_an_upgrade_knows_what_served_and_the_one_source_that_was_registered(first: Database) -> None:
    migrate(first.owner_url)
    with psycopg.connect(first.owner_url) as connection:
        rows = connection.execute("SELECT name, last_sole, source_hash FROM adapters ORDER BY name").fetchall()
    assert rows == [("pirate", 3, "one"), ("poet", 3, "")]  # of two sources nobody knows the present one
    found = await _now(first)
    assert (found.active_version, found.previous_version, found.source_version) == (3, 2, 3)
    found = await _now(first, roll_back=True)
    assert (found.active_version, found.previous_version) == (2, 3)


async def test_the_previous_release_goes_on_working_on_the_new_schema(first: Database) -> None:
    migrate(first.owner_url)
    with psycopg.connect(first.owner_url) as connection:
        connection.execute(VERSION, ("pirate", 4, False))
        for number, before in ((4, 3), (1, 4)):
            connection.execute(OFF, (number,))
            connection.execute(ON, (number,))
            connection.execute(REMEMBER, (before,))
        connection.execute(RELEASE, ("pirate",))
        connection.execute(AUDIT)
    found = await _now(first)
    assert (found.active_version, found.previous_version) == (1, 4)
    # It left the source behind, which means nothing without its claim.
    assert (found.source_hash, found.source_version) == ("", 0)
    found = await _now(first, roll_back=True)
    assert (found.active_version, found.previous_version) == (4, 1)


def _revision(database: Database, now: str = "") -> str:
    """After setting it to `now`, if that is given."""
    with psycopg.connect(database.owner_url) as connection:
        if now:
            connection.execute("UPDATE alembic_version SET version_num = %s", (now,))
        row = connection.execute("SELECT version_num FROM alembic_version").fetchone()
    assert row is not None
    return str(row[0])


async def test_a_release_that_was_rolled_back_takes_the_schema_of_the_newer_one(
    first: Database, caplog: pytest.LogCaptureFixture
) -> None:
    """`helm rollback` runs the old release's init step on the new release's schema."""
    migrate(first.owner_url)
    _revision(first, "r9999")
    assert main(["migrate", "--owner-url", first.owner_url]) == 0
    assert _revision(first) == "r9999"
    assert "r9999, of a newer release" in caplog.text
    assert (await _now(first)).active_version == 3


def test_a_database_that_another_program_migrates_is_refused(
    first: Database, capsys: pytest.CaptureFixture[str]
) -> None:
    _revision(first, "ae1027a6acf")
    assert main(["migrate", "--owner-url", first.owner_url]) == 2
    assert "migrated by somebody else (to ae1027a6acf)" in capsys.readouterr().err
    assert _revision(first) == "ae1027a6acf"


def test_an_owner_that_may_not_is_told_so_in_a_line(
    postgres: PostgresServer, first: Database, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not a trace of our own calls: the init step's log is all that people see."""
    for name in ("registry", "data"):
        (tmp_path / name).write_text("a-password\n")
    passwords = [f"--registry-password-file={tmp_path / 'registry'}", f"--data-password-file={tmp_path / 'data'}"]
    with psycopg.connect(postgres.url(), autocommit=True) as connection:
        connection.execute("CREATE ROLE powerless LOGIN PASSWORD 'a-password'")
    url = postgres.url(first.name, "powerless", "a-password")
    try:
        for more in (["--create-roles", *passwords], []):
            assert main(["migrate", "--owner-url", url, *more]) == 1
            told = capsys.readouterr().err
            assert told.startswith("loraplane-gateway migrate: permission denied")
            assert "a-password" not in told
    finally:
        with psycopg.connect(postgres.url(), autocommit=True) as connection:
            connection.execute("DROP ROLE powerless")


def test_an_empty_password_is_refused(first: Database, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty = tmp_path / "empty"
    empty.write_text("\n")
    files = [f"--registry-password-file={empty}", f"--data-password-file={empty}"]
    assert main(["migrate", "--owner-url", first.owner_url, "--create-roles", *files]) == 2
    assert f"{empty} holds no password" in capsys.readouterr().err
