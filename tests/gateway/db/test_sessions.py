"""One request, one transaction: what happens when the connection that it got is dead."""

from collections.abc import AsyncIterator

import psycopg
import pytest
from sqlalchemy import text

from loraplane_gateway.db.engine import AWAY, create_engine, named
from loraplane_gateway.db.sessions import PLATFORM, Scope, Sessions, session_maker, transaction
from tests.gateway.postgres import Database, PostgresServer

_CUT = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'sessions-test'"


@pytest.fixture
async def sessions(database: Database) -> AsyncIterator[Sessions]:
    engine = create_engine(database.registry_url, application="sessions-test", pool_size=3)
    yield session_maker(engine)
    await engine.dispose()


async def test_connections_lost_while_idle_cost_no_request(
    sessions: Sessions, database: Database, postgres: PostgresServer
) -> None:
    async with transaction(sessions, PLATFORM) as one, transaction(sessions, PLATFORM) as two:
        for session in (one, two):
            await session.execute(text("SELECT 1"))
    with psycopg.connect(postgres.url(), autocommit=True) as root:
        root.execute(_CUT)
    for _ in range(2):
        async with transaction(sessions, Scope("acme")) as session:
            told = await session.execute(text("SELECT current_setting('loraplane.tenant'), pg_backend_pid()"))
            assert told.one()[0] == "acme"
            await session.execute(text("INSERT INTO tenants (name) VALUES ('acme') ON CONFLICT DO NOTHING"))
    with psycopg.connect(database.owner_url) as owner:
        assert owner.execute("SELECT name FROM tenants").fetchall() == [("acme",)]


async def test_a_connection_lost_in_use_is_told_and_nothing_is_done_twice(
    sessions: Sessions, database: Database, postgres: PostgresServer
) -> None:
    with pytest.raises(psycopg.OperationalError) as caught:
        async with transaction(sessions, PLATFORM) as session:
            await session.execute(text("INSERT INTO tenants (name) VALUES ('acme')"))
            with psycopg.connect(postgres.url(), autocommit=True) as root:
                root.execute(_CUT)
            await session.execute(text("SELECT 1"))
    assert isinstance(caught.value, AWAY)
    assert named(caught.value) in ("AdminShutdown", "OperationalError")
    with psycopg.connect(database.owner_url) as owner:
        assert owner.execute("SELECT count(*) FROM tenants").fetchone() == (0,)


async def test_the_end_of_the_block_commits_and_an_error_does_not(sessions: Sessions, database: Database) -> None:
    with pytest.raises(LookupError):
        async with transaction(sessions, PLATFORM) as session:
            await session.execute(text("INSERT INTO tenants (name) VALUES ('acme')"))
            raise LookupError
    async with transaction(sessions, PLATFORM) as session:
        await session.execute(text("INSERT INTO tenants (name) VALUES ('globex')"))
    with psycopg.connect(database.owner_url) as owner:
        assert owner.execute("SELECT name FROM tenants").fetchall() == [("globex",)]


@pytest.mark.parametrize(
    ("statement", "away"),
    [
        ("SELECT pg_sleep(20)", True),  # the statement's deadline
        ("SELECT nothing FROM tenants", False),
        ("DELETE FROM audit_log", False),
        ("INSERT INTO tenants (name) VALUES ('a'), ('a')", False),
        ("SELECT 1 / 0", False),
    ],
)
async def test_only_what_time_may_mend_counts_as_away(sessions: Sessions, statement: str, away: bool) -> None:
    with pytest.raises(psycopg.Error) as caught:
        async with transaction(sessions, PLATFORM) as session:
            await session.execute(text("SET LOCAL statement_timeout = '100ms'"))
            await session.execute(text(statement))
    assert isinstance(caught.value, AWAY) is away, named(caught.value)


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("infinity", "9999-12-31"),
        ("20000-01-01", "9999-12-31"),
        ("-infinity", "0001-01-01"),
        ("0044-03-15 BC", "0001-01-01"),
        ("2026-11-30", "2026-11-30"),
    ],
)
async def test_time_that_only_postgres_has_is_read_as_the_nearest(sessions: Sessions, written: str, read: str) -> None:
    async with transaction(sessions, PLATFORM) as session:
        rows = await session.execute(text("SELECT CAST(:written AS timestamptz) AS at"), {"written": written})
    assert rows.one().at.isoformat().startswith(read)
