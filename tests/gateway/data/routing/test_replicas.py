"""Who is routable: endpoints, `/state`, the base's digest (design §3)."""

import asyncio
import time

import psycopg
import pytest

from loraplane_core.identity import AdapterId
from loraplane_core.placement import order
from loraplane_core.wire.engine import Heartbeat, Hello, Load, Residence, Snapshot
from loraplane_gateway.data.routing.replicas import ReplicaView, StreamBroken
from tests.fakes.engine import CAPACITY, FakeEngine, engines
from tests.gateway.data.harness import BASE_DIGEST, OTHER_DIGEST, Gateway, Place, World, digest_of, gateway, until

pytestmark = pytest.mark.timeout(30)


async def _served_by(gw: Gateway, key: str) -> str:
    answer = await gw.ask(key, "pirate")
    return str(answer.headers["x-loraplane-replica"]) if answer.status_code == 200 else f"{answer.status_code}"


def _homes(place: Place, count: int) -> list[FakeEngine]:
    """That many replicas along the adapter's order."""
    by_id = {engine.replica: engine for engine in (place.engine(ordinal=number) for number in range(count))}
    return [by_id[replica] for replica in order("acme", "pirate", by_id)]


async def test_a_lost_state_stream_takes_a_replica_out_at_once_and_its_return_brings_it_back(
    world: World, place: Place
) -> None:
    home, other = _homes(place, 2)
    async with engines(home, other):
        for engine in (home, other):
            engine.publish(place.endpoints)
        async with gateway(place.settings(world.url), replicas=2) as gw:
            assert await _served_by(gw, world.keys.acme) == str(home.replica)
            home.state_status = 503
            home.drop_state()
            await until(lambda: gw.metric("replicas_alive") == 1, 0.9)  # well before the silence of a second would show
            assert await _served_by(gw, world.keys.acme) == str(other.replica)
            home.state_status = 200
            await until(lambda: gw.metric("replicas_alive") == 2)
            assert await _served_by(gw, world.keys.acme) == str(home.replica)


async def test_a_silent_state_stream_is_out_within_a_second(world: World, place: Place) -> None:
    home, other = _homes(place, 2)
    async with engines(home, other):
        for engine in (home, other):
            engine.publish(place.endpoints)
        async with gateway(place.settings(world.url), replicas=2) as gw:
            home.silent = True
            silent_since = time.monotonic()
            await until(lambda: gw.metric("replicas_alive") == 1)
            assert (
                time.monotonic() - silent_since < 2.0
            )  # a second and the load of the machine; the exact border: the view's own test below
            assert await _served_by(gw, world.keys.acme) == str(other.replica)


@pytest.mark.parametrize("fault", ["base", "protocol", "replica", "gap", "garbage", "credential"])
async def test_a_replica_that_is_not_what_it_should_be_is_never_asked(world: World, place: Place, fault: str) -> None:
    home, other = _homes(place, 2)
    match fault:
        case "base":
            home.base_digest = OTHER_DIGEST
        case "protocol":
            home.protocol = 7
        case "replica":
            home.state_replica = "models/one/9"
        case "gap":
            home.state_gap = True
        case "garbage":
            home.state_garbage = True
        case "credential":
            home.epoch = 5
    async with engines(home, other):
        other.publish(place.endpoints)
        home.publish(place.endpoints)
        if fault == "credential":
            home.epoch = 6  # its endpoint says 5
        async with gateway(place.settings(world.url)) as gw:
            await until(lambda: gw.metric("replicas") == 2 and gw.metric("replicas_alive") >= 1)
            for _ in range(5):
                assert await _served_by(gw, world.keys.acme) == str(other.replica)
            assert home.requests == []


async def test_endpoints_decide_with_it_not_ready_terminating_removed(world: World, place: Place) -> None:
    home, other = _homes(place, 2)
    async with engines(home, other):
        file = home.publish(place.endpoints)
        other.publish(place.endpoints)
        async with gateway(place.settings(world.url), replicas=2) as gw:
            for change in (
                lambda: home.publish(place.endpoints, ready=False),
                lambda: home.publish(place.endpoints, terminating=True),
                file.unlink,
            ):
                change()
                await until(lambda: gw.metric("replicas_alive") == 1)
                assert await _served_by(gw, world.keys.acme) == str(other.replica)
                home.publish(place.endpoints)
                await until(lambda: gw.metric("replicas_alive") == 2)
                assert await _served_by(gw, world.keys.acme) == str(home.replica)


async def test_a_file_torn_in_the_middle_changes_nothing(world: World, place: Place) -> None:
    engine = place.engine()
    async with engines(engine):
        file = engine.publish(place.endpoints)
        whole = file.read_text()
        async with gateway(place.settings(world.url), replicas=1) as gw:
            for torn in (whole[: len(whole) // 2], "", "[]", '{"metadata":{"labels":{"loraplane.dev/pool":"one"}}}'):
                file.write_text(torn)
                await asyncio.sleep(0.4)  # two polls and a half: nothing may happen, so there is nothing to wait for
                assert await _served_by(gw, world.keys.acme) == str(engine.replica)
            (place.endpoints / "notes.txt").write_text("not ours")
            engine.publish(place.endpoints, ready=False)
            await until(lambda: gw.metric("replicas_alive") == 0)


async def test_residency_decides_inside_the_set_and_a_new_boot_has_none(own_world: World, place: Place) -> None:
    with psycopg.connect(own_world.database.owner_url) as connection:
        connection.execute("UPDATE adapters SET warm_replicas = 2 WHERE name = 'pirate'")
    first, second, third = _homes(place, 3)
    async with engines(first, second, third):
        for engine in (first, second, third):
            engine.publish(place.endpoints)
        async with gateway(place.settings(own_world.url), replicas=3) as gw:
            key = own_world.keys.acme
            assert await _served_by(gw, key) == str(first.replica)  # none resident: the first home
            third.set_residency("acme/pirate@1", digest_of("pirate"), "device")  # outside the set: never mind
            second.set_residency("acme/pirate@1", digest_of("pirate", 2), "device")  # another digest: not it
            await until(lambda: gw.metric("residences") == 2)
            assert await _served_by(gw, key) == str(first.replica)
            second.set_residency("acme/pirate@1", digest_of("pirate"), "host")
            await until(lambda: gw.metric("residences") == 3)
            assert await _served_by(gw, key) == str(second.replica)
            second.boot, second.residency = "boot-2", {}
            second.drop_state()
            await until(lambda: gw.metric("replicas_alive") == 2)
            await until(lambda: gw.metric("replicas_alive") == 3)
            assert await _served_by(gw, key) == str(first.replica)


def test_a_view_counts_as_alive_for_one_second_after_the_last_message_only(place: Place) -> None:
    engine = place.engine()
    view = ReplicaView(engine.endpoint())
    assert not view.is_routable(BASE_DIGEST, 0.0)
    hello = Hello(replica=str(engine.replica), boot="b", base="x", base_digest=BASE_DIGEST, capacity=CAPACITY)
    view.hear(hello, 10.0)
    assert not view.is_routable(BASE_DIGEST, 10.0)  # the snapshot is missing
    residence = Residence(ref="acme/pirate@1", digest=digest_of("pirate"), residency="device")
    view.hear(Snapshot(seq=4, adapters=[residence], capacity=CAPACITY, load=Load()), 10.0)
    assert view.is_routable(BASE_DIGEST, 11.0) and not view.is_routable(BASE_DIGEST, 11.01)
    view.hear(Heartbeat(seq=5), 12.0)
    assert view.is_routable(BASE_DIGEST, 12.0)
    pirate = AdapterId("acme", "pirate", 1, digest_of("pirate"))
    assert view.residency_of(pirate) == "device"
    assert view.residency_of(pirate._replace(version=2)) == "absent"
    assert view.residency_of(pirate._replace(digest="0" * 64)) == "absent"
    with pytest.raises(StreamBroken):
        view.hear(Heartbeat(seq=7), 12.1)
    view.lose(12.1)
    assert not view.is_routable(BASE_DIGEST, 12.1) and view.residency_of(pirate) == "absent"
