"""The serving snapshot: folding the change feed gives what reading everything gives, and a burst costs few looks."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass

import psycopg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from loraplane_gateway.data.auth import Authenticator
from loraplane_gateway.data.snapshot import Registry
from loraplane_gateway.db import serving
from loraplane_gateway.db.engine import create_engine
from loraplane_gateway.db.serving import ServingRepository, Snapshot, Update
from loraplane_gateway.db.sessions import session_maker
from tests.gateway.data.harness import BASE_DIGEST, Place, World, activate, digest_of, gateway, until
from tests.gateway.postgres import Database, PostgresServer

TENANTS, NAMES, VERSIONS, POOLS = ("acme", "globex"), ("one", "two"), (1, 2, 3), ("p1", "p2")


@pytest.fixture
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture
def repository(database: Database, runner: asyncio.Runner) -> Iterator[ServingRepository]:
    engine = create_engine(database.data_url, application="test", pool_size=2)
    yield ServingRepository(session_maker(engine))
    runner.run(engine.dispose())


# -- what may happen in one transaction

Statement = tuple[str, tuple[object, ...]]
tenant, name, version, pool = (st.sampled_from(each) for each in (TENANTS, NAMES, VERSIONS, POOLS))
_INSERT = (
    "INSERT INTO tenant_adapters (tenant_id, adapter, version, rank, digest, base_digest, bytes, state, is_active)"
    " VALUES (%s, %s, %s, 8, %s, %s, 9, 'validated', %s)"
)
_SHARE = (
    "UPDATE tenant_adapters SET is_active = (version = %s), weight = CASE WHEN version = %s THEN 100 ELSE 0 END"
    " WHERE tenant_id = %s AND adapter = %s"
)
_POOL = (
    "INSERT INTO pools (namespace, name, base_model, base_digest, max_rank, allowed_tenants)"
    " VALUES ('ns', %s, 'b', %s, 64, %s) ON CONFLICT (namespace, name)"
    " DO UPDATE SET base_digest = excluded.base_digest, allowed_tenants = excluded.allowed_tenants"
)
statements: st.SearchStrategy[Statement] = st.one_of(
    st.builds(
        lambda t, n, v, active: (_INSERT, (t, n, v, digest_of(n, v), BASE_DIGEST, active)),
        tenant, name, version, st.booleans(),
    ),
    st.builds(lambda t, n, v: (_SHARE, (v, v, t, n)), tenant, name, version),
    st.builds(
        lambda t, n, v: ("DELETE FROM tenant_adapters WHERE (tenant_id, adapter, version) = (%s, %s, %s)", (t, n, v)),
        tenant, name, version,
    ),
    st.builds(
        lambda t, n, to: ("UPDATE tenant_adapters SET adapter = %s WHERE tenant_id = %s AND adapter = %s", (to, t, n)),
        tenant, name, name,
    ),
    st.builds(
        lambda t, n, p, warm: (
            "UPDATE adapters SET pool = %s, warm_replicas = %s WHERE tenant_id = %s AND name = %s",
            (f"ns/{p}", warm, t, n),
        ),
        tenant, name, pool, st.integers(0, 3),
    ),
    st.builds(
        lambda p, digest, allowed: (_POOL, (p, digest, allowed)),
        pool, st.sampled_from(("", BASE_DIGEST)), st.lists(tenant, max_size=2, unique=True),
    ),
    st.builds(lambda p: ("DELETE FROM pools WHERE name = %s", (p,)), pool),
    st.builds(lambda t: ("INSERT INTO tenants (name) VALUES (%s)", (t,)), tenant),
    st.builds(lambda t: ("DELETE FROM tenants WHERE name = %s", (t,)), tenant),
    st.builds(
        lambda t, n: (
            "INSERT INTO api_keys (id, tenant_id, digest, scopes)"
            " VALUES (%s, %s, sha256(gen_random_uuid()::text::bytea), '{inference}')"
            " ON CONFLICT (id) DO UPDATE SET revoked_at = now()",
            (f"{t}-{n}", t),
        ),
        tenant, name,
    ),
)  # fmt: skip
#: Transactions, and whether the gateway looks after each.
histories = st.lists(st.tuples(st.lists(statements, min_size=1, max_size=4), st.booleans()), max_size=8)


def _commit(owner: psycopg.Connection[tuple[object, ...]], transaction: list[Statement]) -> None:
    """What the schema refuses does not happen."""
    with contextlib.suppress(psycopg.Error), owner.transaction():
        for statement, values in transaction:
            with contextlib.suppress(psycopg.Error), owner.transaction():
                owner.execute(statement, values)


async def _caught_up(repository: ServingRepository, before: Snapshot) -> Update:
    keys: frozenset[str] | None = frozenset()
    while True:
        update = await repository.update(before)
        before, keys = update.snapshot, None if keys is None or update.keys is None else keys | update.keys
        if update.caught_up:
            return Update(before, keys)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(history=histories, most=st.sampled_from((1, 3, 1000)))
def test_folding_the_feed_gives_what_reading_everything_gives(
    history: list[tuple[list[Statement], bool]],
    most: int,
    database: Database,
    repository: ServingRepository,
    runner: asyncio.Runner,
) -> None:
    with pytest.MonkeyPatch.context() as patch, psycopg.connect(database.owner_url, autocommit=True) as owner:
        patch.setattr(serving, "CHANGES_MAX", most)
        held = runner.run(repository.snapshot())
        first, told = held.cursor, set[str]()
        for transaction, looks in history:
            _commit(owner, transaction)
            if looks:
                update = runner.run(_caught_up(repository, held))
                held, told = update.snapshot, told | (update.keys or set())
        update = runner.run(_caught_up(repository, held))
        everything = runner.run(repository.snapshot())
        assert update.snapshot == everything
        if first:  # else there was no change to go on from
            changed = owner.execute("SELECT name FROM changes WHERE kind = 'key' AND cursor > %s", (first,)).fetchall()
            assert told | (update.keys or set()) == {key for (key,) in changed}
        assert runner.run(repository.update(everything)).snapshot is everything


def test_where_the_feed_was_cut_or_belongs_to_another_database_everything_is_read(
    own_world: World, repository: ServingRepository, runner: asyncio.Runner
) -> None:
    held = runner.run(repository.snapshot())
    with psycopg.connect(own_world.database.owner_url, autocommit=True) as owner:
        owner.execute("DELETE FROM pools WHERE name = 'two'")
        owner.execute("DELETE FROM changes WHERE cursor <= %s", (held.cursor,))
    everything = runner.run(repository.snapshot())
    assert runner.run(repository.update(held)) == Update(everything, None)
    later = Snapshot(held.cursor + 1000, held.tenants, held.pools, held.adapters)
    assert runner.run(repository.update(later)) == Update(everything, None)


# -- when it looks


@dataclass
class Counted:
    """A repository whose looks take a while of the test's clock, and are counted."""

    inner: ServingRepository
    looks: int = 0
    loads: int = 0

    async def snapshot(self) -> Snapshot:
        self.loads += 1
        return await self.inner.snapshot()

    async def update(self, before: Snapshot) -> Update:
        found = await self.inner.update(before)
        if found.snapshot is not before:
            self.looks += 1
            await asyncio.sleep(0.02)
        return found


@contextlib.asynccontextmanager
async def following(own_world: World) -> AsyncIterator[tuple[Registry, Counted]]:
    """A registry that follows Postgres, and what counts its looks."""
    engine = create_engine(own_world.url, application="test", pool_size=2)
    repository = Counted(ServingRepository(session_maker(engine)))
    authenticator = Authenticator(repository.inner, b"p" * 32, ttl=20, limit=900)
    registry = Registry(repository, authenticator, own_world.url, limit=900)
    running = asyncio.create_task(registry.run())
    try:
        yield registry, repository
    finally:
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
        await engine.dispose()


async def test_a_lone_change_is_seen_at_once_and_a_burst_with_few_looks(own_world: World) -> None:
    async with following(own_world) as (registry, repository):
        await until(lambda: registry.is_loaded)
        async with asyncio.timeout(0.5):  # a look every second would be later on average
            await asyncio.to_thread(activate, own_world.database, "acme", "pirate", 2)
            await until(lambda: _serves(registry, 2), 0.5)
        assert (repository.loads, repository.looks) == (1, 1)
        with psycopg.connect(own_world.database.owner_url, autocommit=True) as owner:
            for warm in range(60):
                await asyncio.to_thread(
                    owner.execute, "UPDATE adapters SET warm_replicas = %s WHERE name = 'pirate'", (warm + 2,)
                )
                await asyncio.sleep(0.005)
        await until(lambda: registry.current().adapters["acme", "pirate"].warm_replicas == 61, 2)
        assert repository.looks <= 8, repository.looks


async def test_a_gateway_that_is_there_before_the_tables_says_so_once_and_goes_on(
    own_world: World, caplog: pytest.LogCaptureFixture
) -> None:
    renamed = "ALTER TABLE {} RENAME TO {}"
    with psycopg.connect(own_world.database.owner_url, autocommit=True) as owner:
        owner.execute(renamed.format("changes", "unmade"))
        async with following(own_world) as (registry, repository):
            try:
                await until(lambda: repository.loads >= 3)
                told = [record.getMessage() for record in caplog.records if "cannot be read" in record.getMessage()]
                assert len(told) == 1
                assert "loraplane-gateway migrate" in told[0]
            finally:
                owner.execute(renamed.format("unmade", "changes"))
            await until(lambda: registry.is_loaded)


def _serves(registry: Registry, version: int) -> bool:
    return registry.current().adapters["acme", "pirate"].versions[0].id.version == version


async def test_changes_while_postgres_could_not_be_heard_are_in_the_snapshot_afterwards(
    own_world: World, place: Place, postgres: PostgresServer
) -> None:
    cut = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'loraplane-data-listen'"
    async with gateway(place.settings(own_world.url)) as gw:
        with psycopg.connect(own_world.database.owner_url, autocommit=True) as owner:
            owner.execute("DELETE FROM changes")  # as a database that was restored from an older day
            owner.execute("ALTER TABLE adapters DISABLE TRIGGER USER")
            try:
                owner.execute("UPDATE adapters SET warm_replicas = 9 WHERE name = 'pirate'")
            finally:
                owner.execute("ALTER TABLE adapters ENABLE TRIGGER USER")
        with psycopg.connect(postgres.url(), autocommit=True) as root:
            root.execute(cut)
        await until(lambda: gw.app.snapshot.adapters["acme", "pirate"].warm_replicas == 9)
