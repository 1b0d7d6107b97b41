"""Several weighted versions: shares hold, callers keep theirs, and a change of weights moves no more than it must."""

import asyncio
import math
from collections import Counter
from collections.abc import Mapping
from functools import partial
from typing import Any

import psycopg
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplane_core.identity import AdapterId, AdapterRef
from loraplane_core.placement import order
from loraplane_gateway.data.traffic import pick_version
from loraplane_gateway.db.serving import ActiveVersion
from tests.fakes.engine import engines
from tests.gateway.data.harness import Gateway, Place, World, digest_of, gateway, until
from tests.gateway.postgres import Database

pytestmark = pytest.mark.timeout(60)
KEYS = [f"user-{number}" for number in range(4000)]


def _versions(weights: Mapping[int, int]) -> list[ActiveVersion]:
    return [
        ActiveVersion(
            AdapterId.of(AdapterRef("acme", "pirate", version), digest_of("pirate", version)), "", 1, 8, share
        )
        for version, share in weights.items()
    ]


def _picked(weights: Mapping[int, int], keys: list[str] = KEYS) -> list[int]:
    versions = _versions(weights)
    return [pick_version("acme", "pirate", versions, key).id.version for key in keys]


def _moved(before: Mapping[int, int], after: Mapping[int, int]) -> Counter[tuple[int, int]]:
    pairs = zip(_picked(before), _picked(after), strict=True)
    return Counter(pair for pair in pairs if pair[0] != pair[1])


@pytest.mark.parametrize("weights", [{3: 90, 4: 10}, {1: 50, 2: 50}, {1: 1, 2: 99}, {1: 20, 5: 30, 9: 50}])
def test_keys_are_shared_out_by_weight(weights: Mapping[int, int]) -> None:
    found = Counter(_picked(weights))
    expected = {version: len(KEYS) * share / 100 for version, share in weights.items()}
    chi_square = sum((found[version] - count) ** 2 / count for version, count in expected.items())
    assert chi_square < 10.8 + 5 * (len(weights) - 2)  # beyond p = 0.001 of that many degrees of freedom


def test_another_adapter_shares_its_keys_out_otherwise() -> None:
    versions = _versions({1: 50, 2: 50})
    other = [pick_version("acme", "poet", versions, key).id.version for key in KEYS]
    same = sum(one == two for one, two in zip(_picked({1: 50, 2: 50}), other, strict=True))
    assert abs(same / len(KEYS) - 0.5) < 4 * math.sqrt(0.25 / len(KEYS))


@given(
    first=st.integers(1, 99),
    second=st.integers(1, 99),
    key=st.text(st.characters(), max_size=20),
)
def test_a_key_moves_only_to_the_version_that_gained(first: int, second: int, key: str) -> None:
    before, after = (_picked({3: share, 4: 100 - share}, [key])[0] for share in (first, second))
    if before != after:
        assert after == (3 if second > first else 4)


@pytest.mark.parametrize(
    ("before", "after", "least"),
    [
        ({3: 90, 4: 10}, {3: 80, 4: 20}, 0.10),
        ({3: 100}, {3: 95, 4: 5}, 0.05),
        ({3: 50, 4: 50}, {4: 100}, 0.50),
        ({3: 50, 4: 30}, {3: 50, 4: 30, 5: 20}, 0.20),
    ],
)
def test_no_more_keys_move_than_the_weights_say(
    before: Mapping[int, int], after: Mapping[int, int], least: float
) -> None:
    share = sum(_moved(before, after).values()) / len(KEYS)
    assert share < least + 4 * math.sqrt(least * (1 - least) / len(KEYS))


def test_of_three_versions_few_keys_move_besides() -> None:
    moved = _moved({1: 50, 2: 30, 3: 20}, {1: 60, 2: 30, 3: 10})
    assert sum(moved.values()) / len(KEYS) < 0.16  # the weights ask for 0.10
    assert {target for _, target in moved} <= {1, 2}


def _share(database: Database, weights: Mapping[int, int]) -> None:
    with psycopg.connect(database.owner_url) as connection:
        connection.execute("UPDATE tenant_adapters SET weight = 0, is_active = FALSE WHERE adapter = 'pirate'")
        for version, weight in weights.items():
            connection.execute(
                "UPDATE tenant_adapters SET weight = %s, is_active = TRUE WHERE adapter = 'pirate' AND version = %s",
                (weight, version),
            )


async def _shared(gw: Gateway, database: Database, weights: Mapping[int, int]) -> None:
    """Until the gateway's snapshot has these weights."""
    _share(database, weights)

    def seen() -> bool:
        adapter = gw.app._registry.current().adapters[("acme", "pirate")]
        return {each.id.version: each.weight for each in adapter.versions} == weights

    await until(seen)


async def _version(gw: Gateway, key: str, *, sticky: str = "", user: object = None, model: str = "pirate") -> int:
    headers = {"x-loraplane-sticky": sticky} if sticky else {}
    fields: dict[str, Any] = {} if user is None else {"user": user}
    answer = await gw.ask(key, model, headers=headers, **fields)
    assert answer.status_code == 200, answer.text
    ref, _, digest = answer.headers["x-loraplane-adapter-id"].partition("#")
    version = int(ref.removeprefix("acme/pirate@"))
    assert digest == digest_of("pirate", version)[:12]
    return version


async def _versions_of(gw: Gateway, key: str, names: list[str]) -> list[int]:
    return await asyncio.gather(*(_version(gw, key, sticky=name) for name in names))


async def test_a_caller_keeps_its_version_by_header_or_user_over_changes_of_weights(
    own_world: World, place: Place
) -> None:
    engine = place.engine()
    async with engines(engine):
        engine.publish(place.endpoints)
        async with gateway(place.settings(own_world.url), replicas=1) as gw:
            key = own_world.keys.acme
            await _shared(gw, own_world.database, {1: 50, 2: 50})
            names = [f"caller-{number}" for number in range(24)]
            first = await _versions_of(gw, key, names)
            assert set(first) == {1, 2}
            assert await asyncio.gather(*(_version(gw, key, user=name) for name in names)) == first
            both = (_version(gw, key, sticky=name, user="another") for name in names)
            assert await asyncio.gather(*both) == first
            await _shared(gw, own_world.database, {1: 30, 2: 70})
            second = await _versions_of(gw, key, names)
            assert all(now == 2 for was, now in zip(first, second, strict=True) if was == 2)
            await _shared(gw, own_world.database, {1: 50, 2: 50})
            assert await _versions_of(gw, key, names) == first
            assert {await _version(gw, key, model=f"pirate@{number}") for number in (1, 2)} == {1, 2}
            sent = engine.requests[0]
            assert "x-loraplane-sticky" not in sent.headers
            await gw.until_idle()


async def test_without_a_key_each_request_is_picked_alone_and_usage_names_its_version(
    own_world: World, place: Place
) -> None:
    engine = place.engine()
    async with engines(engine):
        engine.publish(place.endpoints)
        async with gateway(place.settings(own_world.url), replicas=1) as gw:
            await _shared(gw, own_world.database, {1: 50, 2: 50})
            found = Counter(await asyncio.gather(*(_version(gw, own_world.keys.acme) for _ in range(40))))
            assert min(found[1], found[2]) > 5
            # What is not a string is the engine's to refuse; it sticks nobody to anything.
            assert set(await asyncio.gather(*(_version(gw, own_world.keys.acme, user=7) for _ in range(40)))) == {1, 2}
            await gw.until_idle()
        with psycopg.connect(own_world.database.owner_url) as owner:
            rows = owner.execute("SELECT version, count(*) FROM usage_events GROUP BY version").fetchall()
    assert sum(count for _, count in rows) == 80 and {version for version, _ in rows} == {1, 2}


async def test_a_request_goes_where_its_own_version_is_warm_o71(own_world: World, place: Place) -> None:
    """Residency is looked up by version: that another version of the adapter is warm somewhere counts for nothing."""
    replicas = [place.engine(ordinal=number) for number in range(2)]
    home, other = sorted(
        replicas, key=lambda one: order("acme", "pirate", [r.replica for r in replicas]).index(one.replica)
    )
    async with engines(home, other):
        for engine in (home, other):
            engine.publish(place.endpoints)
        home.set_residency("acme/pirate@1", digest_of("pirate", 1), "device")
        other.set_residency("acme/pirate@2", digest_of("pirate", 2), "device")
        with psycopg.connect(own_world.database.owner_url) as owner:
            owner.execute("UPDATE adapters SET warm_replicas = 2 WHERE name = 'pirate'")
        async with gateway(place.settings(own_world.url), replicas=2) as gw:
            await _shared(gw, own_world.database, {1: 50, 2: 50})
            for number, engine in ((1, home), (2, other), (1, home)):
                answer = await gw.ask(own_world.keys.acme, f"pirate@{number}")
                assert answer.headers["x-loraplane-replica"] == str(engine.replica)
                assert answer.headers["x-loraplane-residency"] == "hit"
            await gw.until_idle()


async def test_requests_race_with_changes_of_what_they_resolve_o32(own_world: World, place: Place) -> None:
    """Snapshots are replaced whole: whatever a request sees is one state that was, never parts of two."""
    engine = place.engine()
    async with engines(engine):
        engine.publish(place.endpoints)
        async with gateway(place.settings(own_world.url), replicas=1) as gw:
            stop = asyncio.Event()

            async def change() -> None:
                number = 0
                while not stop.is_set():
                    number += 1
                    await asyncio.to_thread(_share, own_world.database, {1: 50, 2: 50} if number % 2 else {2: 100})

            async def ask(name: int) -> set[int]:
                return {await _version(gw, own_world.keys.acme, sticky=f"{name}-{turn}") for turn in range(12)}

            changing = asyncio.create_task(change())
            answered = await asyncio.gather(*(ask(name) for name in range(8)))
            stop.set()
            await changing
            assert set().union(*answered) <= {1, 2}
            await gw.until_idle()


async def test_what_is_loaded_stays_known_while_endpoints_are_told_again_o8(world: World, place: Place) -> None:
    """A replica whose readiness comes and goes takes nothing away from what is known of the others."""
    first, second, restless = (place.engine(ordinal=number) for number in range(3))
    async with engines(first, second, restless):
        for engine in (first, second, restless):
            engine.publish(place.endpoints)
            engine.set_residency("acme/pirate@1", digest_of("pirate"), "device")
        async with gateway(place.settings(world.url), replicas=3) as gw:
            seen: list[float] = []

            def alive(count: int) -> bool:
                seen.append(gw.metric("replicas_alive"))
                return seen[-1] == count

            for turn in range(6):
                restless.publish(place.endpoints, ready=turn % 2 == 1)
                await until(partial(alive, 3 if turn % 2 else 2))
                answer = await gw.ask(world.keys.acme, "pirate")
                assert (answer.status_code, answer.headers["x-loraplane-residency"]) == (200, "hit")
            assert min(seen) == 2
