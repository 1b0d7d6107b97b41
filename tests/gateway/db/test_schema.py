"""The schema by itself: what psql may do, what the two service roles may not, what the feed promises."""

import os
import subprocess
import threading
import time
from collections.abc import Iterator

import psycopg
import pytest

from loraplane_gateway.db.migrate import migrate
from tests.gateway.postgres import Database

INSERT_BY_HAND = (
    "INSERT INTO tenant_adapters (tenant_id, version, path, rank, base_model)"
    " VALUES ('acme', 1, '/models/adapters/acme', 8, 'Llama-3.1-8B');"
)
SELECT_ACTIVE = (
    "SELECT tenant_id, path, rank FROM tenant_adapters WHERE is_active = TRUE AND base_model = 'Llama-3.1-8B';"
)
VALIDATED = (
    "INSERT INTO tenant_adapters (tenant_id, adapter, version, state, digest, base_digest, bytes, is_active, weight)"
    " VALUES (%s, %s, %s, 'validated', repeat('a', 64), repeat('b', 64), 10, %s, %s)"
)


@pytest.fixture
def owner(database: Database) -> Iterator[psycopg.Connection]:
    with psycopg.connect(database.owner_url) as connection:
        yield connection


def _psql(database: Database, statement: str) -> str:
    done = subprocess.run(
        [database.psql, "-v", "ON_ERROR_STOP=1", "-At", database.owner_url, "-c", statement],
        check=False,
        capture_output=True,
        text=True,
        timeout=30,
        env={"PATH": os.defpath, "LC_ALL": "C.UTF-8"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_two_statements_of_the_design_run_in_psql(database: Database) -> None:
    assert _psql(database, INSERT_BY_HAND) == "INSERT 0 1"
    assert _psql(database, SELECT_ACTIVE) == ""
    row = _psql(database, "SELECT adapter, state, is_active, weight FROM tenant_adapters")
    assert row == "default|unverified|f|0"
    assert _psql(database, "SELECT tenant_id, name, next_version FROM adapters") == "acme|default|2"
    assert _psql(database, "SELECT kind, tenant_id, name FROM changes") == "adapter|acme|default"


def test_the_second_statement_finds_an_active_version(database: Database) -> None:
    _psql(
        database,
        "INSERT INTO tenant_adapters (tenant_id, version, path, rank, base_model, state, digest, base_digest, bytes,"
        " is_active) VALUES ('acme', 1, '/models/adapters/acme', 8, 'Llama-3.1-8B', 'validated',"
        " repeat('a', 64), repeat('b', 64), 10, TRUE)",
    )
    assert _psql(database, SELECT_ACTIVE) == "acme|/models/adapters/acme|8"


def test_an_unverified_version_cannot_be_made_active_by_hand(owner: psycopg.Connection) -> None:
    owner.execute(INSERT_BY_HAND)
    with pytest.raises(psycopg.errors.CheckViolation):
        owner.execute("UPDATE tenant_adapters SET is_active = TRUE, weight = 100")


@pytest.mark.parametrize("name", ["Acme", "a_b", "-a", "a-", "", "a" * 64, "a/b", "..", "a\nb", "a\n"])
def test_names_outside_the_grammar_are_refused(owner: psycopg.Connection, name: str) -> None:
    with pytest.raises(psycopg.errors.CheckViolation):
        owner.execute("INSERT INTO tenant_adapters (tenant_id, version) VALUES (%s, 1)", (name,))


@pytest.mark.parametrize("weights", [[50], [60, 30], [100, 1]])
def test_weights_that_do_not_sum_to_100_stop_the_commit(owner: psycopg.Connection, weights: list[int]) -> None:
    for number, weight in enumerate(weights, start=1):
        owner.execute(VALIDATED, ("acme", "default", number, True, weight))
    with pytest.raises(psycopg.errors.CheckViolation, match="sum to"):
        owner.commit()


def test_weights_may_pass_through_other_sums_inside_a_transaction(owner: psycopg.Connection) -> None:
    owner.execute(VALIDATED, ("acme", "default", 1, True, 100))
    owner.execute(VALIDATED, ("acme", "default", 2, False, None))
    owner.commit()
    owner.execute("UPDATE tenant_adapters SET is_active = FALSE, weight = 0 WHERE version = 1")
    owner.execute("UPDATE tenant_adapters SET is_active = TRUE, weight = 100 WHERE version = 2")
    owner.commit()
    assert owner.execute("SELECT version FROM tenant_adapters WHERE is_active").fetchall() == [(2,)]


def test_deleting_a_weighted_version_alone_is_refused(owner: psycopg.Connection) -> None:
    owner.execute(VALIDATED, ("acme", "default", 1, True, 60))
    owner.execute(VALIDATED, ("acme", "default", 2, True, 40))
    owner.commit()
    owner.execute("DELETE FROM tenant_adapters WHERE version = 2")
    with pytest.raises(psycopg.errors.CheckViolation, match="sum to 60"):
        owner.commit()


def test_migrating_twice_changes_nothing(database: Database) -> None:
    migrate(database.owner_url)


def test_the_data_role_reaches_keys_only_by_their_digest(database: Database, owner: psycopg.Connection) -> None:
    owner.execute("INSERT INTO tenants (name) VALUES ('acme')")
    owner.execute(
        "INSERT INTO api_keys (id, tenant_id, digest, scopes) VALUES ('k1', 'acme', %s, '{inference}')", (b"d" * 32,)
    )
    owner.commit()
    with psycopg.connect(database.data_url, autocommit=True) as data:
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            data.execute("SELECT * FROM api_keys")
        found = data.execute("SELECT key_id, tenant_id, scopes FROM loraplane_find_key(%s)", (b"d" * 32,)).fetchall()
        assert found == [("k1", "acme", ["inference"])]
        assert data.execute("SELECT * FROM loraplane_find_key(%s)", (b"e" * 32,)).fetchall() == []


@pytest.mark.parametrize(
    "statement",
    [
        "INSERT INTO tenants (name) VALUES ('x')",
        "UPDATE tenant_adapters SET rank = 1",
        "DELETE FROM changes",
        "SELECT * FROM audit_log",
        "SELECT * FROM usage_events",
        "SELECT * FROM uploads",
        "SELECT loraplane_note_change('tenant', 'x', '')",
        "SET ROLE loraplane_registry",
        "CREATE TABLE mine (a int)",
    ],
)
def test_the_data_role_may_not(database: Database, statement: str) -> None:
    with (
        psycopg.connect(database.data_url, autocommit=True) as data,
        pytest.raises(psycopg.errors.InsufficientPrivilege),
    ):
        data.execute(statement)


def test_the_data_role_may_insert_usage_again_without_a_second_row(
    database: Database, owner: psycopg.Connection
) -> None:
    with psycopg.connect(database.data_url) as data:
        data.execute("SELECT set_config('loraplane.scope', 'platform', false)")
        for _ in range(2):
            data.execute(
                "INSERT INTO usage_events (day, request_id, tenant_id, key_id, status)"
                " VALUES ('2026-01-01', 'r1', 'acme', 'k1', 200) ON CONFLICT DO NOTHING"
            )
    assert owner.execute("SELECT count(*) FROM usage_events").fetchone() == (1,)


@pytest.mark.parametrize("url", ["registry_url", "data_url"])
def test_a_tenant_scope_sees_only_its_own_rows(database: Database, owner: psycopg.Connection, url: str) -> None:
    for tenant in ("alpha", "beta"):
        owner.execute(VALIDATED, (tenant, "default", 1, True, 100))
    owner.commit()
    with psycopg.connect(getattr(database, url), autocommit=True) as service:
        query = "SELECT tenant_id FROM tenant_adapters ORDER BY tenant_id"
        assert service.execute(query).fetchall() == []
        service.execute("SELECT set_config('loraplane.tenant', 'alpha', false)")
        assert service.execute(query).fetchall() == [("alpha",)]
        assert service.execute("SELECT tenant_id FROM adapters").fetchall() == [("alpha",)]
        service.execute("SELECT set_config('loraplane.scope', 'platform', false)")
        assert service.execute(query).fetchall() == [("alpha",), ("beta",)]


def test_the_registry_role_cannot_write_into_another_tenant(database: Database) -> None:
    with psycopg.connect(database.registry_url) as registry:
        registry.execute("SELECT set_config('loraplane.tenant', 'alpha', false)")
        with pytest.raises(psycopg.errors.InsufficientPrivilege, match="row-level security"):
            registry.execute("INSERT INTO tenant_adapters (tenant_id, version) VALUES ('beta', 1)")


@pytest.mark.parametrize(
    "statement",
    ["DELETE FROM audit_log", "UPDATE audit_log SET actor = 'x'", "TRUNCATE usage_events", "TRUNCATE tenants CASCADE"],
)
def test_logs_only_grow_and_fed_tables_are_not_truncated(owner: psycopg.Connection, statement: str) -> None:
    with pytest.raises(psycopg.errors.RestrictViolation):
        owner.execute(statement)


def test_every_hand_edit_reaches_the_feed_once_per_transaction(owner: psycopg.Connection) -> None:
    owner.execute("INSERT INTO tenants (name) VALUES ('acme')")
    owner.execute(VALIDATED, ("acme", "default", 1, True, 100))
    owner.execute("UPDATE tenant_adapters SET rank = 4")
    owner.commit()
    owner.execute("UPDATE tenant_adapters SET rank = 4")
    owner.commit()
    owner.execute("UPDATE tenant_adapters SET rank = 5")
    owner.execute("INSERT INTO pools (namespace, name, base_model, max_rank) VALUES ('n', 'p', 'b', 8)")
    owner.commit()
    owner.execute("DELETE FROM tenant_adapters")
    owner.commit()
    found = owner.execute("SELECT kind, tenant_id, name FROM changes ORDER BY cursor").fetchall()
    adapter = ("adapter", "acme", "default")
    assert found == [("tenant", "acme", ""), adapter, adapter, ("pool", "", "n/p"), adapter]


def test_cursors_become_visible_in_their_order(database: Database, owner: psycopg.Connection) -> None:
    """Writers race; a reader that advances to the largest cursor it saw must still see every change."""
    writers, rounds = 4, 25

    def write(number: int) -> None:
        with psycopg.connect(database.owner_url) as connection:
            for turn in range(rounds):
                connection.execute("INSERT INTO tenants (name) VALUES (%s)", (f"t{number}-{turn}",))
                connection.execute(
                    "INSERT INTO tenant_adapters (tenant_id, version) VALUES (%s, 1)", (f"t{number}-{turn}",)
                )
                connection.rollback() if turn % 5 == 4 else connection.commit()

    threads = [threading.Thread(target=write, args=(number,)) for number in range(writers)]
    for thread in threads:
        thread.start()
    seen: set[tuple[str, str]] = set()
    cursor = 0
    owner.autocommit = True
    while any(thread.is_alive() for thread in threads):
        for position, kind, tenant in owner.execute(
            "SELECT cursor, kind, tenant_id FROM changes WHERE cursor > %s ORDER BY cursor", (cursor,)
        ).fetchall():
            seen.add((kind, tenant))
            cursor = position
    for thread in threads:
        thread.join(timeout=30)
    rest = owner.execute("SELECT kind, tenant_id FROM changes WHERE cursor > %s", (cursor,)).fetchall()
    everything = owner.execute("SELECT kind, tenant_id FROM changes").fetchall()
    assert len(everything) == writers * rounds * 2 * 4 // 5
    assert seen | set(rest) == set(everything)


def test_two_writers_of_one_adapter_queue_up_instead_of_breaking_the_sum(
    database: Database, owner: psycopg.Connection
) -> None:
    activate = "UPDATE tenant_adapters SET is_active = TRUE, weight = 100 WHERE version = %s"
    owner.execute(VALIDATED, ("acme", "default", 1, False, 0))
    owner.execute(VALIDATED, ("acme", "default", 2, False, 0))
    owner.commit()
    outcome: list[psycopg.Error | None] = []
    with psycopg.connect(database.owner_url) as second:

        def activate_another() -> None:
            try:
                second.execute(activate, (2,))
                second.commit()
                outcome.append(None)
            except psycopg.Error as error:
                outcome.append(error)

        owner.execute(activate, (1,))
        other = threading.Thread(target=activate_another)
        other.start()
        _wait_until_blocked_or_done(database, second.info.backend_pid, outcome)
        owner.commit()
        other.join(timeout=30)
    assert isinstance(outcome[0], psycopg.errors.CheckViolation)
    assert owner.execute("SELECT sum(weight) FROM tenant_adapters").fetchone() == (100,)


def _wait_until_blocked_or_done(database: Database, pid: int, outcome: list[psycopg.Error | None]) -> None:
    deadline = time.monotonic() + 30
    with psycopg.connect(database.owner_url, autocommit=True) as watcher:
        while not outcome and watcher.execute("SELECT pg_blocking_pids(%s)", (pid,)).fetchone() == ([],):
            assert time.monotonic() < deadline
            time.sleep(0.01)
