"""The key cache: when it is believed, when it is dropped, and what it does while Postgres is away."""

import asyncio
import datetime

import psycopg
import pytest
from sqlalchemy.exc import OperationalError

from loraplane_core.errors import Forbidden, Unauthenticated, Unavailable
from loraplane_gateway import keys
from loraplane_gateway.data import auth as auth_module
from loraplane_gateway.data.auth import Authenticator
from loraplane_gateway.db.serving import KeyRow, Principal
from tests.gateway.data.harness import Place, World, gateway, until

pytestmark = pytest.mark.timeout(30)
PEPPER = b"p" * 32
TTL, LIMIT = 20.0, 900.0


class Store:
    def __init__(self) -> None:
        self.rows: dict[bytes, KeyRow] = {}
        self.away = False
        self.asked = 0
        self.gate: asyncio.Event | None = None
        self.entered = asyncio.Event()

    async def find_key(self, digest: bytes) -> KeyRow | None:
        self.asked += 1
        row = self.rows.get(digest)
        self.entered.set()
        if self.gate is not None:
            await self.gate.wait()
        if self.away:
            raise OperationalError("select", {}, Exception("away"))
        return row

    def add(self, tenant: str = "acme", *, revoked: bool = False, scope: str = "inference") -> tuple[str, str]:
        key_id, key = keys.mint()
        principal = Principal(tenant, key_id, frozenset({scope}), None)
        self.rows[keys.digest(PEPPER, key)] = KeyRow(principal, revoked)
        return key_id, f"Bearer {key}"

    def revoke(self, header: str) -> None:
        digest = keys.digest(PEPPER, header.removeprefix("Bearer "))
        self.rows[digest] = KeyRow(self.rows[digest].principal, revoked=True)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def auth(store: Store, clock: Clock) -> Authenticator:
    return Authenticator(store, PEPPER, ttl=TTL, limit=LIMIT, clock=clock)


async def test_a_known_key_is_looked_up_once_per_ttl(auth: Authenticator, store: Store, clock: Clock) -> None:
    key_id, header = store.add()
    for _ in range(3):
        assert (await auth.authenticate(header)).key_id == key_id
    assert store.asked == 1
    clock.now += TTL
    await auth.authenticate(header)
    assert store.asked == 2


async def test_garbled_keys_never_reach_the_store_and_unknown_ones_once(auth: Authenticator, store: Store) -> None:
    for header in (None, "", "Bearer", "Bearer x", "Basic abc", "Bearer lp_" + "a" * 51):
        with pytest.raises(Unauthenticated):
            await auth.authenticate(header)
    assert store.asked == 0
    unknown = f"Bearer {keys.mint()[1]}"
    for _ in range(3):
        with pytest.raises(Unauthenticated):
            await auth.authenticate(unknown)
    assert store.asked == 1


async def test_a_revocation_without_a_notice_holds_within_the_ttl(
    auth: Authenticator, store: Store, clock: Clock
) -> None:
    _, header = store.add()
    await auth.authenticate(header)
    store.revoke(header)
    clock.now += TTL
    with pytest.raises(Unauthenticated):
        await auth.authenticate(header)


@pytest.mark.parametrize("how", ["key", "tenant", "distrust"])
async def test_a_notice_makes_the_next_use_look_again(auth: Authenticator, store: Store, how: str) -> None:
    key_id, header = store.add()
    await auth.authenticate(header)
    store.revoke(header)
    match how:
        case "key":
            auth.drop_keys([key_id])
        case "tenant":
            auth.drop_tenants(["acme"])
        case "distrust":
            auth.distrust()
    with pytest.raises(Unauthenticated):
        await auth.authenticate(header)


async def test_a_look_up_begun_before_a_notice_is_not_believed_g22(auth: Authenticator, store: Store) -> None:
    key_id, header = store.add()
    store.gate = asyncio.Event()
    asking = asyncio.create_task(auth.authenticate(header))
    await store.entered.wait()  # it has read the row as it was
    store.revoke(header)
    auth.drop_keys([key_id])
    store.gate.set()
    with pytest.raises(Unauthenticated):
        await asking


async def test_other_keys_stay_cached_on_a_notice(auth: Authenticator, store: Store) -> None:
    _, header = store.add()
    other_id, _ = store.add("globex")
    await auth.authenticate(header)
    auth.drop_keys([other_id])
    auth.drop_tenants(["globex"])
    await auth.authenticate(header)
    assert store.asked == 1


async def test_while_postgres_is_away_known_keys_work_up_to_the_limit_and_unknown_ones_are_503(
    auth: Authenticator, store: Store, clock: Clock
) -> None:
    _, header = store.add()
    await auth.authenticate(header)
    store.away = True
    for step in (TTL, LIMIT - TTL - 1):
        clock.now += step
        await auth.authenticate(header)
    auth.distrust()
    await auth.authenticate(header)
    with pytest.raises(Unavailable) as unknown:
        await auth.authenticate(f"Bearer {keys.mint()[1]}")
    assert unknown.value.retry_after
    clock.now += 1
    with pytest.raises(Unavailable):
        await auth.authenticate(header)


async def test_a_frozen_postgres_holds_a_known_key_up_once_and_an_unknown_one_no_longer_than_its_deadline(
    auth: Authenticator, store: Store, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auth_module, "LOOKUP_SECONDS", 0.05)
    key_id, header = store.add()
    await auth.authenticate(header)
    clock.now += TTL
    store.gate = asyncio.Event()  # from here on no answer comes
    asked = store.asked
    for _ in range(3):
        async with asyncio.timeout(1):
            assert (await auth.authenticate(header)).key_id == key_id
    assert store.asked == asked + 1
    with pytest.raises(Unavailable):
        async with asyncio.timeout(1):
            await auth.authenticate(f"Bearer {keys.mint()[1]}")
    store.gate.set()
    clock.now += auth_module.AWAY_SECONDS
    store.revoke(header)
    await until(lambda: not auth._lookups)
    clock.now += TTL
    with pytest.raises(Unauthenticated):
        await auth.authenticate(header)


async def test_a_revoked_key_does_not_come_back_while_postgres_is_away(auth: Authenticator, store: Store) -> None:
    key_id, header = store.add()
    await auth.authenticate(header)
    auth.drop_keys([key_id])
    store.away = True
    with pytest.raises(Unavailable):
        await auth.authenticate(header)


async def test_many_at_once_ask_the_store_once_and_one_that_leaves_takes_nothing_away(
    auth: Authenticator, store: Store
) -> None:
    _, header = store.add()
    store.gate = asyncio.Event()
    asking = [asyncio.create_task(auth.authenticate(header)) for _ in range(10)]
    await store.entered.wait()
    asking[0].cancel()
    store.gate.set()
    found = await asyncio.gather(*asking, return_exceptions=True)
    assert isinstance(found[0], asyncio.CancelledError)
    assert all(isinstance(principal, Principal) for principal in found[1:])
    assert store.asked == 1


async def test_scope_and_expiry_are_checked_on_every_use(auth: Authenticator, store: Store) -> None:
    _, header = store.add(scope="admin")
    with pytest.raises(Forbidden):
        await auth.authenticate(header)
    key_id, key = keys.mint()
    soon = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=0.2)
    store.rows[keys.digest(PEPPER, key)] = KeyRow(Principal("acme", key_id, frozenset({"inference"}), soon), False)
    await auth.authenticate(f"Bearer {key}")
    await until(lambda: datetime.datetime.now(datetime.UTC) > soon)
    with pytest.raises(Unauthenticated):
        await auth.authenticate(f"Bearer {key}")
    assert store.asked == 2


async def test_a_revoked_key_is_refused_within_a_second_also_without_redis(own_world: World, place: Place) -> None:
    """The change feed carries it; the cached key was good a moment ago."""
    async with gateway(place.settings(own_world.url)) as gw:
        key = own_world.keys.acme
        assert (await gw.ask(key, "nothing")).status_code == 404
        with psycopg.connect(own_world.database.owner_url) as connection:
            connection.execute("UPDATE api_keys SET revoked_at = now() WHERE id = %s", (keys.key_id(key),))
        await gw.until_refused(key, 1.0)
        assert (await gw.ask(own_world.keys.globex, "nothing")).status_code == 404


async def test_deleting_a_tenant_ends_its_keys_within_a_second_g23(own_world: World, place: Place) -> None:
    async with gateway(place.settings(own_world.url)) as gw:
        assert (await gw.ask(own_world.keys.acme, "nothing")).status_code == 404
        with psycopg.connect(own_world.database.owner_url) as connection:
            connection.execute("DELETE FROM tenants WHERE name = 'acme'")
        await gw.until_refused(own_world.keys.acme, 1.0)
