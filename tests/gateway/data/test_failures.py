"""Replicas that die, refuse or fall silent under a request."""

import asyncio
from typing import Any

import pytest

from loraplane_core.placement import order
from tests.fakes.engine import FakeEngine, Plan, engines
from tests.gateway.data.harness import Gateway, Place, World, activate, events, gateway, until

pytestmark = pytest.mark.timeout(30)
MODES = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


def _pair(place: Place) -> tuple[FakeEngine, FakeEngine]:
    """Two replicas, the adapter's first home first."""
    by_id = {engine.replica: engine for engine in (place.engine(), place.engine(ordinal=1))}
    first, second = order("acme", "pirate", by_id)
    return by_id[first], by_id[second]


@MODES
@pytest.mark.parametrize("where", ["headers", "first"])
async def test_a_replica_killed_before_the_first_byte_costs_the_client_nothing(
    world: World, place: Place, stream: bool, where: str
) -> None:
    home, other = _pair(place)
    home.default = Plan(die=where)
    async with engines(home, other):
        for engine in (home, other):
            engine.publish(place.endpoints)
        async with gateway(place.settings(world.url), replicas=2) as gw:
            answer = await gw.ask(world.keys.acme, "pirate", stream=stream)
            assert answer.status_code == 200
            assert answer.headers["x-loraplane-replica"] == str(other.replica)
            if stream:
                assert events(answer.text)[-1] == "[DONE]"
            assert len(home.requests) == len(other.requests) == 1
            await gw.until_idle()
            assert gw.metric("dispatched") == 2


async def test_an_unstreamed_answer_that_breaks_off_is_had_elsewhere(world: World, place: Place) -> None:
    home, other = _pair(place)
    home.default = Plan(die="body")
    async with engines(home, other):
        for engine in (home, other):
            engine.publish(place.endpoints)
        async with gateway(place.settings(world.url), replicas=2) as gw:
            answer = await gw.ask(world.keys.acme, "pirate")
            assert (answer.status_code, answer.json()["choices"][0]["text"]) == (200, "one two three")
            assert answer.headers["x-loraplane-replica"] == str(other.replica)


async def test_a_stream_that_breaks_after_its_first_byte_ends_with_a_typed_error_and_no_retry(
    world: World, place: Place
) -> None:
    home, other = _pair(place)
    home.default = Plan(hold=1)
    async with engines(home, other):
        for engine in (home, other):
            engine.publish(place.endpoints)
        async with gateway(place.settings(world.url), replicas=2) as gw:
            body = {"model": "pirate", "prompt": "x", "stream": True}
            headers = {"authorization": f"Bearer {world.keys.acme}"}
            async with gw.client.stream("POST", "/v1/completions", json=body, headers=headers) as answer:
                pieces = answer.aiter_text()
                text = await anext(pieces)
                home.kill()
                text += "".join([piece async for piece in pieces])
            first, error = events(text)
            assert first["choices"][0]["text"] == "one"
            assert error["error"]["code"] == "replica_lost"
            assert error["error"]["type"] == "server_error"
            assert other.requests == []
            assert gw.metric("broken_streams_total") == 1
            await gw.until_idle()


async def test_other_streams_live_on_when_one_replica_dies(world: World, place: Place) -> None:
    home, other = _pair(place)
    other.default = Plan(hold=1)
    async with engines(home, other):
        other.publish(place.endpoints)
        async with gateway(place.settings(world.url), replicas=1) as gw:
            asking = asyncio.create_task(gw.ask(world.keys.acme, "pirate", stream=True))
            await (await other.request()).reached.wait()
            home.publish(place.endpoints)
            await until(lambda: gw.metric("replicas_alive") == 2)
            home.kill()
            await until(lambda: gw.metric("replicas_alive") == 1)
            other.default.release.set()
            assert events((await asking).text)[-1] == "[DONE]"


@pytest.mark.parametrize("code", ["unavailable", "engine_busy", "engine_failed"])
async def test_a_503_that_another_replica_may_not_give_is_asked_there(world: World, place: Place, code: str) -> None:
    home, other = _pair(place)
    home.default = Plan(status=503, error_code=code)
    async with engines(home, other):
        for engine in (home, other):
            engine.publish(place.endpoints)
        async with gateway(place.settings(world.url), replicas=2) as gw:
            assert (await gw.ask(world.keys.acme, "pirate")).status_code == 200
            other.default = Plan(status=503, error_code=code)
            async with asyncio.timeout(2):  # both refuse: the last refusal passes, without waiting for a third
                answer = await gw.ask(world.keys.acme, "pirate")
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, code)


async def test_an_error_as_a_streams_first_event_is_a_refusal_like_any_other(world: World, place: Place) -> None:
    home, other = _pair(place)
    home.default = Plan(error_code="engine_failed")
    async with engines(home, other):
        for engine in (home, other):
            engine.publish(place.endpoints)
        async with gateway(place.settings(world.url), replicas=2) as gw:
            answer = await gw.ask(world.keys.acme, "pirate", stream=True)
            assert events(answer.text)[-1] == "[DONE]"
            other.default = Plan(error_code="deadline_exceeded")
            answer = await gw.ask(world.keys.acme, "pirate", stream=True)
            assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline_exceeded")


async def test_an_artifact_that_cannot_be_had_passes_at_once(world: World, place: Place) -> None:
    home, other = _pair(place)
    home.default = Plan(status=503, error_code="artifact_unavailable")
    async with engines(home, other):
        for engine in (home, other):
            engine.publish(place.endpoints)
        async with gateway(place.settings(world.url), replicas=2) as gw:
            answer = await gw.ask(world.keys.acme, "pirate")
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "artifact_unavailable")
            assert other.requests == []


async def test_without_any_replica_the_answer_is_503_with_retry_after(world: World, place: Place) -> None:
    engine = place.engine()
    async with engines(engine), gateway(place.settings(world.url)) as gw:
        answer = await gw.ask(world.keys.acme, "pirate")  # none known: at once
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_replica")
        assert int(answer.headers["retry-after"]) >= 1
        engine.publish(place.endpoints, ready=False)
        await until(lambda: gw.metric("replicas") == 1)
        answer = await gw.ask(world.keys.acme, "pirate")  # known but not ready: within route_timeout
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_replica")


async def test_a_request_waits_for_the_replica_to_come_back(world: World, place: Place) -> None:
    engine = place.engine()
    async with engines(engine):
        engine.publish(place.endpoints, ready=False)
        async with gateway(place.settings(world.url, route_timeout=20)) as gw:
            await until(lambda: gw.metric("replicas") == 1)
            asking = asyncio.create_task(gw.ask(world.keys.acme, "pirate"))
            await until(lambda: gw.metric("in_flight") == 1)
            engine.publish(place.endpoints)
            assert (await asking).status_code == 200


async def test_a_broken_connection_to_the_only_replica_is_tried_again(world: World, place: Place) -> None:
    """The replica lives on (its /state says so), so the failure was the connection's."""
    engine = place.engine()
    engine.plans = [Plan(die="drop")]
    async with engines(engine):
        engine.publish(place.endpoints)
        async with gateway(place.settings(world.url), replicas=1) as gw:
            assert (await gw.ask(world.keys.acme, "pirate")).status_code == 200
            assert len(engine.requests) == 2


async def test_a_withdrawn_version_is_resolved_again_once(own_world: World, place: Place) -> None:
    engine = place.engine()
    engine.plans = [Plan(status=410, error_code="adapter_withdrawn", hold="headers")]
    async with engines(engine):
        engine.publish(place.endpoints)
        async with gateway(place.settings(own_world.url), replicas=1) as gw:
            plan = engine.plans[0]
            asking = asyncio.create_task(gw.ask(own_world.keys.acme, "pirate"))
            await (await engine.request()).reached.wait()
            activate(own_world.database, "acme", "pirate", 2)
            plan.release.set()
            answer = await asking
            assert answer.status_code == 200
            assert [request.headers["x-loraplane-adapter"] for request in engine.requests] == [
                "acme/pirate@1",
                "acme/pirate@2",
            ]
            engine.default = Plan(status=410, error_code="adapter_withdrawn")
            answer = await gw.ask(own_world.keys.acme, "pirate")
            assert (answer.status_code, answer.json()["error"]["code"]) == (410, "adapter_withdrawn")
            assert len(engine.requests) == 4


async def test_a_replica_that_has_yet_to_learn_that_a_version_is_served_again_is_passed_over(
    world: World, place: Place
) -> None:
    home, other = _pair(place)
    home.default = Plan(status=410, error_code="adapter_withdrawn")
    async with engines(home, other):
        for engine in (home, other):
            engine.publish(place.endpoints)
        async with gateway(place.settings(world.url), replicas=2) as gw:
            assert (await gw.ask(world.keys.acme, "pirate")).status_code == 200
            assert (len(home.requests), len(other.requests)) == (2, 1)


async def test_a_silent_engine_is_504_and_nobody_tries_again(world: World, place: Place) -> None:
    home, other = _pair(place)
    home.default = Plan(hold="headers")
    async with engines(home, other):
        for engine in (home, other):
            engine.publish(place.endpoints)
        async with gateway(place.settings(world.url, silence_timeout=0.3), replicas=2) as gw:
            answer = await gw.ask(world.keys.acme, "pirate")
            assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline_exceeded")
            assert other.requests == []
            await asyncio.wait_for(home.requests[0].gone.wait(), 5)


@pytest.mark.parametrize("begun", [False, True], ids=["before", "after"])
async def test_a_replica_that_froze_gives_its_requests_back(world: World, place: Place, begun: bool) -> None:
    """SIGSTOP, or a node that is lost: no connection closes, only /state falls silent."""
    home, other = _pair(place)
    home.default = Plan(hold=1 if begun else "headers")
    async with engines(home, other):
        for engine in (home, other):
            engine.publish(place.endpoints)
        async with gateway(place.settings(world.url, lost_timeout=0.5), replicas=2) as gw:
            asking = asyncio.create_task(gw.ask(world.keys.acme, "pirate", stream=True))
            await (await home.request()).reached.wait()
            home.silent = home.frozen = True
            answer = await asking
            found = events(answer.text)
            if begun:
                assert found[0]["choices"][0]["text"] == "one" and found[1]["error"]["code"] == "replica_lost"
                assert other.requests == []
            else:
                assert answer.headers["x-loraplane-replica"] == str(other.replica) and found[-1] == "[DONE]"
            await asyncio.wait_for(home.requests[0].gone.wait(), 5)
            await gw.until_idle()


async def test_a_restarted_process_gives_the_requests_of_the_old_one_back(world: World, place: Place) -> None:
    home, other = _pair(place)
    home.default = Plan(hold="headers")
    async with engines(home, other):
        for engine in (home, other):
            engine.publish(place.endpoints)
        async with gateway(place.settings(world.url), replicas=2) as gw:
            asking = asyncio.create_task(gw.ask(world.keys.acme, "pirate"))
            await (await home.request()).reached.wait()
            home.boot = "boot-2"
            home.default = Plan()
            home.drop_state()
            assert (await asking).status_code == 200
            await asyncio.wait_for(home.requests[0].gone.wait(), 5)


@MODES
async def test_a_short_loss_of_state_costs_running_requests_nothing(world: World, place: Place, stream: bool) -> None:
    engine = place.engine()
    engine.default = Plan(hold=1 if stream else "first")
    async with engines(engine):
        engine.publish(place.endpoints)
        async with gateway(place.settings(world.url), replicas=1) as gw:
            asking = asyncio.create_task(gw.ask(world.keys.acme, "pirate", stream=stream))
            await (await engine.request()).reached.wait()
            engine.state_status = 503
            engine.drop_state()
            await until(lambda: gw.metric("replicas_alive") == 0)
            engine.state_status = 200
            await until(lambda: gw.metric("replicas_alive") == 1)
            engine.default.release.set()
            answer = await asking
            assert answer.status_code == 200 and "error" not in answer.text
            assert len(engine.requests) == 1


@MODES
async def test_a_request_over_its_time_ends_and_is_aborted_in_the_engine(
    world: World, place: Place, stream: bool
) -> None:
    engine = place.engine()
    engine.default = Plan(hold=1 if stream else "first")
    async with engines(engine):
        engine.publish(place.endpoints)
        async with gateway(place.settings(world.url, request_timeout=0.4), replicas=1) as gw:
            answer = await gw.ask(world.keys.acme, "pirate", stream=stream)
            if stream:
                assert events(answer.text)[-1]["error"]["code"] == "deadline_exceeded"
            else:
                assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline_exceeded")
            await asyncio.wait_for(engine.requests[0].gone.wait(), 5)
            await gw.until_idle()


@MODES
async def test_a_gateway_that_stops_tells_the_clients_it_cannot_wait_for(
    world: World, place: Place, stream: bool
) -> None:
    engine = place.engine()
    engine.default = Plan(hold=1 if stream else "first")
    async with engines(engine):
        engine.publish(place.endpoints)
        async with gateway(place.settings(world.url, drain_timeout=0.1), replicas=1) as gw:
            asking = asyncio.create_task(gw.ask(world.keys.acme, "pirate", stream=stream))
            await (await engine.request()).reached.wait()
            gw.server.should_exit = True
            answer = await asking
            error = events(answer.text)[-1] if stream else answer.json()
            assert answer.status_code == (200 if stream else 503)
            assert error["error"]["code"] == "unavailable"
            await asyncio.wait_for(engine.requests[0].gone.wait(), 5)


async def test_whatever_happens_all_that_was_dispatched_is_released(world: World, place: Place) -> None:
    """Forty requests at once through deaths, refusals, silence and clients that leave (G37, G44, G68)."""
    home, other = _pair(place)
    plans = [
        Plan(),
        Plan(status=503, error_code="engine_busy"),
        Plan(status=500, error_code="internal_error"),
        Plan(die="drop"),
        Plan(hold="headers"),
        Plan(hold=1),
        Plan(status=410, error_code="adapter_withdrawn"),
        Plan(hold="first"),
    ]
    home.plans, other.plans = plans * 5, plans[::-1] * 5
    async with engines(home, other):
        for engine in (home, other):
            engine.publish(place.endpoints)
        settings = place.settings(world.url, silence_timeout=0.5)
        async with gateway(settings, replicas=2) as gw:
            asking = [asyncio.create_task(_impatient(gw, world.keys.acme, number)) for number in range(40)]
            await asyncio.gather(*asking)
            await gw.until_idle()
            assert gw.metric("dispatched") > 20
            home.plans.clear()
            other.plans.clear()
            assert (await gw.ask(world.keys.acme, "pirate")).status_code == 200


async def _impatient(gw: Gateway, key: str, number: int) -> Any:
    """Every third client leaves before the engine's silence is over."""
    try:
        async with asyncio.timeout(0.2 if number % 3 == 0 else 10):
            return await gw.ask(key, "pirate", stream=number % 2 == 0)
    except TimeoutError:
        return None
