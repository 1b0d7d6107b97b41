"""A request's way through the gateway, against a fake engine."""

import json
from functools import partial

import psycopg
import pytest

from loraplane_core.identity import ReplicaId
from tests.fakes.engine import FakeEngine, Plan, engines
from tests.gateway.data.harness import (
    ALIAS,
    BASE,
    BASE_DIGEST,
    POOL,
    Gateway,
    Place,
    World,
    activate,
    add_pool,
    add_version,
    digest_of,
    events,
    gateway,
    until,
)

PATHS = ("/v1/completions", "/v1/chat/completions")


async def test_an_adapter_is_served_with_the_trusted_reference_and_nothing_of_the_clients(
    world: World, place: Place
) -> None:
    forged = {
        "X-Loraplane-Adapter": "globex/secret@1",
        "x-loraplane-digest": "f" * 64,
        "X-LORAPLANE-PATH": "/etc",
        "cookie": "a=b",
        "x-forwarded-for": "10.0.0.1",
        "x-request-id": "mine-1",
    }
    engine = place.engine()
    async with engines(engine):
        engine.publish(place.endpoints)
        async with gateway(place.settings(world.url), replicas=1) as gw:
            answer = await gw.ask(world.keys.acme, "pirate", headers=forged)
            assert answer.status_code == 200
            sent = engine.requests[0].headers
            assert {name: value for name, value in sent.items() if name.startswith("x-loraplane-")} == {
                "x-loraplane-adapter": "acme/pirate@1",
                "x-loraplane-digest": digest_of("pirate"),
                "x-loraplane-bytes": "4096",
                "x-loraplane-rank": "8",
                "x-loraplane-base-digest": BASE_DIGEST,
                "x-loraplane-tenant": "acme",
                "x-loraplane-protocol": "1",
            }
            assert world.keys.acme not in str(sent)
            assert not {"cookie", "x-forwarded-for"} & sent.keys()
            assert engine.requests[0].raw == answer.request.content  # what was parsed is what was sent
            assert sent["x-request-id"] == answer.headers["x-request-id"] == "mine-1"
            assert answer.headers["x-loraplane-replica"] == "models/one/0"
            assert answer.headers["x-loraplane-adapter-id"] == f"acme/pirate@1#{digest_of('pirate')[:12]}"
            assert answer.headers["x-loraplane-residency"] == "cold"
            assert "x-loraplane-internal" not in answer.headers
            await gw.until_idle()


@pytest.mark.parametrize("name", [BASE, ALIAS])
async def test_the_base_is_asked_for_as_base(world: World, place: Place, name: str) -> None:
    engine = place.engine()
    async with engines(engine):
        engine.publish(place.endpoints)
        async with gateway(place.settings(world.url), replicas=1) as gw:
            assert (await gw.ask(world.keys.acme, name)).json()["model"] == name
            sent = engine.requests[0].headers
            assert sent["x-loraplane-adapter"] == "base"
            assert sent["x-loraplane-tenant"] == "acme"
            assert sent["x-loraplane-base-digest"] == BASE_DIGEST
            assert not {"x-loraplane-digest", "x-loraplane-rank"} & sent.keys()


async def test_the_answer_names_the_model_as_it_was_asked_for_e14(world: World, place: Place) -> None:
    engine = place.engine()
    forms = ["pirate", "acme/pirate", "pirate@1", "acme/pirate@1", f"{BASE}:pirate", f"{ALIAS}:acme/pirate@1"]
    async with engines(engine):
        engine.publish(place.endpoints)
        async with gateway(place.settings(world.url), replicas=1) as gw:
            for form in forms:
                assert (await gw.ask(world.keys.acme, form)).json()["model"] == form
                streamed = await gw.ask(world.keys.acme, form, stream=True)
                assert {event["model"] for event in events(streamed.text)[:-1]} == {form}
            assert {request.headers["x-loraplane-adapter"] for request in engine.requests} == {"acme/pirate@1"}


async def test_both_modes_of_both_routes_go_one_way_e16(world: World, place: Place) -> None:
    engine = place.engine()
    async with engines(engine):
        engine.publish(place.endpoints)
        async with gateway(place.settings(world.url), replicas=1) as gw:
            references = []
            for path in PATHS:
                for stream in (False, True):
                    answer = await gw.ask(world.keys.acme, "pirate", path=path, stream=stream)
                    assert answer.status_code == 200
                    sent = engine.requests[-1]
                    assert sent.path == path
                    references.append({k: v for k, v in sent.headers.items() if k.startswith("x-loraplane-")})
            assert all(reference == references[0] for reference in references)
            assert references[0]["x-loraplane-adapter"] == "acme/pirate@1"


async def test_a_misspelt_adapter_is_404_and_never_the_base_e17(world: World, place: Place) -> None:
    engine = place.engine()
    async with engines(engine):
        engine.publish(place.endpoints)
        async with gateway(place.settings(world.url), replicas=1) as gw:
            for name in ("pirat", "Pirate", "pirate ", f"{BASE}:pirat", "pirate@9", "pirate@01", "../pirate"):
                answer = await gw.ask(world.keys.acme, name)
                assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found"), name
            assert engine.requests == []


async def test_a_stream_passes_byte_for_byte_when_the_client_asked_for_usage(world: World, place: Place) -> None:
    engine = place.engine()
    async with engines(engine):
        engine.publish(place.endpoints)
        async with gateway(place.settings(world.url), replicas=1) as gw:
            answer = await gw.ask(world.keys.acme, "pirate", stream=True, stream_options={"include_usage": True})
            assert engine.requests[0].raw == answer.request.content
            found = events(answer.text)
            assert [event["choices"][0]["text"] for event in found[:3]] == ["one", "two", "three"]
            assert found[3]["usage"]["completion_tokens"] == 3
            assert found[4] == "[DONE]"
            assert answer.headers["content-type"] == "text/event-stream"
            assert answer.headers["cache-control"] == "no-cache, no-transform"
            assert answer.headers["x-accel-buffering"] == "no"


async def test_usage_is_always_asked_for_and_taken_out_when_the_client_did_not_ask(world: World, place: Place) -> None:
    engine = place.engine()
    async with engines(engine):
        engine.publish(place.endpoints)
        async with gateway(place.settings(world.url), replicas=1) as gw:
            for options in (None, {}, {"include_usage": False}, {"include_usage": None}):
                answer = await gw.ask(world.keys.acme, "pirate", stream=True, stream_options=options)
                assert engine.requests[-1].body["stream_options"]["include_usage"] is True
                assert engine.requests[-1].body["prompt"] == "hello"
                found = events(answer.text)
                assert [event["choices"][0]["text"] for event in found[:-1]] == ["one", "two", "three"]
                assert found[-1] == "[DONE]"


async def test_chunks_arrive_as_the_engine_sends_them(world: World, place: Place) -> None:
    engine = place.engine()
    engine.default = plan = Plan(hold=1)
    async with engines(engine):
        engine.publish(place.endpoints)
        async with gateway(place.settings(world.url), replicas=1) as gw:
            body = {"model": "pirate", "prompt": "x", "stream": True}
            headers = {"authorization": f"Bearer {world.keys.acme}"}
            async with gw.client.stream("POST", "/v1/completions", json=body, headers=headers) as answer:
                pieces = answer.aiter_bytes()
                first = await anext(pieces)
                assert [event["choices"][0]["text"] for event in events(first.decode())] == ["one"]
                assert not engine.requests[0].finished.is_set()
                plan.release.set()
                rest = b"".join([piece async for piece in pieces])
            assert events(rest.decode())[-1] == "[DONE]"


async def test_a_bad_request_id_is_replaced(world: World, place: Place) -> None:
    engine = place.engine()
    async with engines(engine):
        engine.publish(place.endpoints)
        async with gateway(place.settings(world.url), replicas=1) as gw:
            for given in ("", "a b", "x" * 129):
                answer = await gw.ask(world.keys.acme, "pirate", headers={"x-request-id": given})
                made = answer.headers["x-request-id"]
                assert made.startswith("req-") and made != given
                assert engine.requests[-1].headers["x-request-id"] == made


async def test_an_engines_refusal_passes_unchanged(world: World, place: Place) -> None:
    engine = place.engine()
    engine.default = Plan(status=400, error_code="context_length_exceeded")
    async with engines(engine):
        engine.publish(place.endpoints)
        async with gateway(place.settings(world.url), replicas=1) as gw:
            for stream in (False, True):
                answer = await gw.ask(world.keys.acme, "pirate", stream=stream)
                assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
            assert len(engine.requests) == 2


async def test_a_credential_the_engine_refuses_is_not_the_clients_401(world: World, place: Place) -> None:
    engine = place.engine()
    engine.default = Plan(status=401, error_code="invalid_api_key")
    async with engines(engine):
        engine.publish(place.endpoints)
        async with gateway(place.settings(world.url), replicas=1) as gw:
            answer = await gw.ask(world.keys.acme, "pirate")
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable")


async def test_an_activation_is_seen_within_a_second_and_the_next_request_uses_it(
    own_world: World, place: Place
) -> None:
    engine = place.engine()
    async with engines(engine):
        engine.publish(place.endpoints)
        async with gateway(place.settings(own_world.url), replicas=1) as gw:
            assert (await gw.ask(own_world.keys.acme, "pirate@2")).status_code == 404
            for version in (2, 1):
                activate(own_world.database, "acme", "pirate", version)
                await until(partial(_is_active, gw, "pirate", version), 1.0)
                assert (await gw.ask(own_world.keys.acme, "pirate")).status_code == 200
                assert engine.requests[-1].headers["x-loraplane-adapter"] == f"acme/pirate@{version}"
                assert engine.requests[-1].headers["x-loraplane-digest"] == digest_of("pirate", version)


def _is_active(gw: Gateway, adapter: str, version: int) -> bool:
    return gw.app.snapshot.adapters["acme", adapter].versions[0].id.version == version


async def test_usage_is_written_once_per_request_also_under_one_request_id(own_world: World, place: Place) -> None:
    engine = place.engine()
    async with engines(engine):
        engine.publish(place.endpoints)
        async with gateway(place.settings(own_world.url), replicas=1) as gw:
            for stream in (False, True):
                await gw.ask(own_world.keys.acme, "pirate", stream=stream, headers={"x-request-id": "same"})
            await gw.ask(own_world.keys.acme, BASE)
            await gw.until_idle()
            assert gw.metric("disconnects_total") == 0
    with psycopg.connect(own_world.database.owner_url) as connection:
        rows = connection.execute(
            "SELECT request_id, tenant_id, pool, base_model, adapter, version, status, prompt_tokens,"
            " completion_tokens FROM usage_events ORDER BY adapter, request_id"
        ).fetchall()
    assert [row[1:] for row in rows] == [
        ("acme", "/".join(POOL), BASE, "", 0, 200, 7, 3),
        ("acme", "/".join(POOL), BASE, "pirate", 1, 200, 7, 3),
        ("acme", "/".join(POOL), BASE, "pirate", 1, 200, 7, 3),
    ]
    assert rows[1][0].startswith("same:") and rows[2][0].startswith("same:")


async def test_big_numbers_and_unicode_survive_the_rewriting_of_a_stream_request(world: World, place: Place) -> None:
    engine = place.engine()
    async with engines(engine):
        engine.publish(place.endpoints)
        async with gateway(place.settings(world.url), replicas=1) as gw:
            raw = '{"model":"pirate","stream":true,"prompt":"\\ud83d\\ude00 é","seed":12345678901234567890,"t":0.1}'
            headers = {"authorization": f"Bearer {world.keys.acme}"}
            answer = await gw.client.post("/v1/completions", content=raw, headers=headers)
            assert answer.status_code == 200
            sent = dict(engine.requests[0].body)
            del sent["stream_options"]
            assert sent == json.loads(raw)


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_says_hit_or_cold_to_its_client_and_to_the_metrics_o38(
    world: World, place: Place, stream: bool
) -> None:
    """Which weights answered, where, and what it cost to have them there: no peer tells that per request."""
    engine = place.engine()

    def counted(gw: Gateway, residency: str) -> float:
        labels = {"tenant": "acme", "adapter": "pirate", "residency": residency}
        return gw.app.metrics.registry.get_sample_value("loraplane_gateway_answers_total", labels) or 0.0

    async with engines(engine):
        engine.publish(place.endpoints)
        async with gateway(place.settings(world.url), replicas=1) as gw:
            for residency in ("cold", "hit"):
                answer = await gw.ask(world.keys.acme, "pirate", stream=stream)
                assert answer.status_code == 200
                assert answer.headers["x-loraplane-residency"] == residency
                assert answer.headers["x-loraplane-adapter-id"] == f"acme/pirate@1#{digest_of('pirate')[:12]}"
                assert (answer.headers["x-loraplane-replica"], answer.headers["x-loraplane-boot"]) == (
                    "models/one/0",
                    "boot-1",
                )
                assert answer.headers["x-loraplane-queue-ms"].isdecimal()
                await gw.until_idle()
                assert counted(gw, residency) == 1
                engine.set_residency("acme/pirate@1", digest_of("pirate"), "device")


async def test_pools_of_one_name_in_two_namespaces_are_two_o70(own_world: World, place: Place) -> None:
    """Neither their replicas nor their bases meet, though `one` is what both are called."""
    twin, digest = ("team-b", "one"), "b3" * 32
    with psycopg.connect(own_world.database.owner_url, autocommit=True) as connection:
        add_pool(connection, twin, "base-three", [], digest, [])
        add_version(connection, "globex", "twin", 1, pool="/".join(twin), base_digest=digest)
    mine = place.engine()
    other = FakeEngine(ReplicaId(*twin, 0), "base-three", digest, place.role_keys)
    async with engines(mine, other):
        mine.publish(place.endpoints)
        other.publish(place.endpoints)
        async with gateway(place.settings(own_world.url), replicas=2) as gw:
            for key, model, replica in (
                (own_world.keys.acme, "pirate", "models/one/0"),
                (own_world.keys.globex, "twin", "team-b/one/0"),
                (own_world.keys.acme, BASE, "models/one/0"),
                (own_world.keys.acme, "base-three", "team-b/one/0"),
            ):
                answer = await gw.ask(key, model)
                assert (answer.status_code, answer.headers["x-loraplane-replica"]) == (200, replica)
    assert (len(mine.requests), len(other.requests)) == (2, 2)
