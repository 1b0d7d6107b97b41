"""What is refused, with which status, code and param; and what two refusals must not tell apart."""

import asyncio
import json
from typing import Any

import pytest

from loraplane_core import listener
from tests.fakes.engine import engines
from tests.gateway.data.harness import BASE, OTHER_BASE, Gateway, Place, World, gateway

pytestmark = pytest.mark.timeout(30)
HEAD = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\n{framing}\r\n\r\n"
PATHS = ("/v1/completions", "/v1/chat/completions")

BODIES: list[tuple[bytes, str, str | None]] = [
    (b"", "invalid_json", None),
    (b"{", "invalid_json", None),
    (b"[]", "invalid_json", None),
    (b"\xff{}", "invalid_json", None),
    (b'{"model":"pirate","model":"pirate"}', "invalid_json", "model"),
    (b'{"model":"pirate","prompt":"a","prompt":"b"}', "invalid_json", "prompt"),
    (b'{"model":"pirate","stream_options":{"a":1,"a":2}}', "invalid_json", "a"),
    (b'{"model":"pirate","temperature":NaN}', "invalid_json", None),
    (b"[" * 100_000, "invalid_json", None),
    (b'{"prompt":"x"}', "missing_model", "model"),
    (b'{"model":null}', "missing_model", "model"),
    (b'{"model":7}', "invalid_parameter", "model"),
    (b'{"model":["pirate"]}', "invalid_parameter", "model"),
    (b'{"model":""}', "invalid_parameter", "model"),
    (json.dumps({"model": "m" * 513}).encode(), "invalid_parameter", "model"),
    (b'{"model":"pirate","stream":"true"}', "invalid_parameter", "stream"),
    (b'{"model":"pirate","stream":1}', "invalid_parameter", "stream"),
    (b'{"model":"pirate","stream_options":[]}', "invalid_parameter", "stream_options"),
    (
        b'{"model":"pirate","stream":true,"stream_options":{"include_usage":"yes"}}',
        "invalid_parameter",
        "stream_options",
    ),
]


def _check_shape(body: Any) -> None:
    assert body.keys() == {"error"}
    assert body["error"].keys() == {"message", "type", "param", "code"}


async def test_bad_bodies_are_400_with_code_and_param_and_reach_no_engine(world: World, place: Place) -> None:
    engine = place.engine()
    async with engines(engine):
        engine.publish(place.endpoints)
        async with gateway(place.settings(world.url), replicas=1) as gw:
            headers = {"authorization": f"Bearer {world.keys.acme}"}
            for body, code, param in BODIES:
                for path in PATHS:
                    answer = await gw.client.post(path, content=body, headers=headers)
                    error = answer.json()["error"]
                    _check_shape(answer.json())
                    assert (answer.status_code, error["code"], error["param"]) == (400, code, param), body[:60]
            assert engine.requests == []
            assert (await gw.ask(world.keys.acme, "pirate")).status_code == 200


async def test_a_model_in_the_url_is_refused_whatever_it_says_g11(world: World, place: Place) -> None:
    engine = place.engine()
    async with engines(engine):
        engine.publish(place.endpoints)
        async with gateway(place.settings(world.url), replicas=1) as gw:
            for path in PATHS:
                for query in ("?model=secret", "?model=pirate", "?MODEL=x", "?x=1", "?%6dodel=secret", "?model"):
                    answer = await gw.ask(world.keys.acme, "pirate", path=path + query)
                    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_request"), query
            assert engine.requests == []


async def test_keys_that_are_missing_garbled_unknown_revoked_or_of_another_scope(world: World, place: Place) -> None:
    typo = world.keys.acme[:-1] + ("A" if world.keys.acme[-1] != "A" else "B")
    cases = [None, "lp_x y", "lp_x", "sk-123", typo, world.keys.expired, world.keys.revoked]
    async with gateway(place.settings(world.url)) as gw:
        for key in cases:
            for answer in (await gw.ask(key, "pirate"), await _get(gw, "/v1/models", key)):
                _check_shape(answer.json())
                assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key"), key
                assert answer.headers["www-authenticate"] == "Bearer"
                assert key is None or key not in answer.text
        answer = await gw.ask(world.keys.admin_only, "pirate")
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "forbidden")
        answer = await gw.client.post("/v1/completions", json={"model": "pirate"}, headers={"authorization": "Basic x"})
        assert answer.status_code == 401


async def test_unknown_foreign_idle_unverified_and_rejected_models_get_one_answer(world: World, place: Place) -> None:
    """Byte-equal bodies but for the name, which is echoed as it was asked for."""
    names = ["nothing", "secret", "globex/secret", "globex/pirate", "globex/nothing", "globex/secret@1"]
    names += ["idle", "raw", "bad"]
    names += [
        "pirate@2",
        "nobody/x",
        "barred",
        OTHER_BASE,
        f"{OTHER_BASE}:secret",
        f"{BASE}:globex/secret",
        ":x",
        "a/b/c",
    ]
    async with gateway(place.settings(world.url)) as gw:
        seen = set()
        for name in names:
            answer = await gw.ask(world.keys.acme, name)
            assert answer.status_code == 404, name
            assert f"`{name}`" in answer.json()["error"]["message"]
            one = await _get(gw, f"/v1/models/{name}", world.keys.acme)
            assert (one.status_code, one.content) == (404, answer.content), name
            headers = sorted(key for key in answer.headers if key not in ("date", "content-length"))
            seen.add((answer.text.replace(name, "NAME"), tuple(headers)))
        assert len(seen) == 1


async def test_an_asserted_base_that_is_not_the_adapters_is_400(world: World, place: Place) -> None:
    async with gateway(place.settings(world.url)) as gw:
        for name in (f"{OTHER_BASE}:pirate", f"{OTHER_BASE}:acme/pirate@1", "anything:pirate", "hub/x:y:pirate"):
            answer = await gw.ask(world.keys.acme, name)
            error = answer.json()["error"]
            assert (answer.status_code, error["code"], error["param"]) == (400, "base_model_mismatch", "model"), name


async def test_an_adapter_of_another_base_than_its_pools_is_400(world: World, place: Place) -> None:
    engine = place.engine()
    async with engines(engine):
        engine.publish(place.endpoints)
        async with gateway(place.settings(world.url), replicas=1) as gw:
            answer = await gw.ask(world.keys.acme, "stale")
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, "base_model_mismatch")
            assert engine.requests == []


async def test_models_lists_exactly_what_would_resolve(world: World, place: Place) -> None:
    engines_of = [place.engine(), place.engine(("models", "two"))]
    async with engines(*engines_of):
        for engine in engines_of:
            engine.publish(place.endpoints)
        async with gateway(place.settings(world.url), replicas=2) as gw:
            for key, expected in (
                (world.keys.acme, {BASE: None, "org/Base-One": None, "pirate": BASE}),
                (world.keys.globex, {BASE: None, "org/Base-One": None, OTHER_BASE: None, "secret": OTHER_BASE}),
            ):
                listed = (await _get(gw, "/v1/models", key)).json()
                assert listed["object"] == "list"
                assert {model["id"]: model["parent"] for model in listed["data"]} == expected
                for model in listed["data"]:
                    assert model["object"] == "model"
                    assert (await _get(gw, f"/v1/models/{model['id']}", key)).json() == model
                    assert (await gw.ask(key, model["id"])).status_code == 200


async def test_too_large_a_body_is_413_and_is_never_collected(world: World, place: Place) -> None:
    async with gateway(place.settings(world.url, max_body=2048)) as gw:
        headers = {"authorization": f"Bearer {world.keys.acme}"}
        body = b'{"model":"pirate","prompt":"' + b"x" * 300_000 + b'"}'

        async def pieces() -> Any:
            for start in range(0, len(body), 1000):
                yield body[start : start + 1000]

        for content in (body, pieces()):
            answer = await gw.client.post("/v1/completions", content=content, headers=headers)
            assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")
            assert answer.headers["x-should-retry"] == "false"
        fits = json.dumps({"model": "nothing", "prompt": "x" * 1000}).encode()
        assert (await gw.client.post("/v1/completions", content=fits, headers=headers)).status_code == 404


async def test_a_body_that_does_not_arrive_is_504(world: World, place: Place) -> None:
    async with gateway(place.settings(world.url, body_timeout=0.2)) as gw:
        head = HEAD.format(key=world.keys.acme, framing="Content-Length: 9")
        status, body = await _raw(gw, head.encode())
        assert (status, body["error"]["code"]) == (504, "deadline_exceeded")


@pytest.mark.parametrize("start", [b"", b"POST /v1/compl", b"GET /health/live HTTP/1.1\r\nHost: x\r\n\r\nGET /health"])
async def test_a_head_that_does_not_end_does_not_hold_its_connection(
    world: World, place: Place, monkeypatch: pytest.MonkeyPatch, start: bytes
) -> None:
    """A new connection, half a head, and half of a second one; dripping bytes win no time."""
    monkeypatch.setattr(listener, "HEAD_SECONDS", 0.3)
    async with gateway(place.settings(world.url)) as gw:
        reader, writer = await asyncio.open_connection("127.0.0.1", gw.port)
        writer.write(start)
        if start.endswith(b"GET /health"):
            assert (await reader.readuntil(b'{"status":"ok"}')).startswith(b"HTTP/1.1 200")
            writer.write(b"/li")
        async with asyncio.timeout(5):
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 408")
            assert json.loads(await reader.read())["error"]["code"] == "deadline_exceeded"
        writer.close()


async def test_a_deadline_for_heads_ends_no_request_whose_head_has_come(
    world: World, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "HEAD_SECONDS", 0.2)
    async with gateway(place.settings(world.url, body_timeout=0.8)) as gw:
        head = HEAD.format(key=world.keys.acme, framing="Content-Length: 9")
        status, _ = await _raw(gw, head.encode())
        assert status == 504  # by the body's own deadline


FRAMINGS = [
    ("Content-Length: 4\r\nTransfer-Encoding: chunked", b"0\r\n\r\n"),
    ("Transfer-Encoding: chunked\r\nContent-Length: 4", b"0\r\n\r\n"),
    ("Transfer-Encoding: gzip, chunked", b"0\r\n\r\n"),
    ("Transfer-Encoding: identity", b""),
    ("Transfer-Encoding: xchunked", b"0\r\n\r\n"),
    ("Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked", b"0\r\n\r\n"),
    ("Content-Length: 4\r\nContent-Length: 5", b"abcd"),
    ("Content-Length: +4", b"abcd"),
    ("Content-Length: 4\r\n\tx: y", b"abcd"),
    ("Transfer-Encoding : chunked", b"0\r\n\r\n"),
    ("Transfer-Encoding: chunked", b"3\r\nabcXX0\r\n\r\n"),  # CVE-2025-43859: a lenient chunk end
    ("Transfer-Encoding: chunked", b"-3\r\nabc\r\n0\r\n\r\n"),
]


async def test_ambiguous_framing_is_400_and_the_connection_ends_g85(world: World, place: Place) -> None:
    engine = place.engine()
    async with engines(engine):
        engine.publish(place.endpoints)
        async with gateway(place.settings(world.url), replicas=1) as gw:
            for framing, body in FRAMINGS:
                head = HEAD.format(key=world.keys.acme, framing=framing)
                smuggled = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n"
                status, answer = await _raw(gw, head.encode() + body + smuggled)
                assert status == 400, framing
                _check_shape(answer)
            assert engine.requests == []


async def test_unknown_routes_and_methods_are_json(world: World, place: Place) -> None:
    async with gateway(place.settings(world.url)) as gw:
        for method, path, status in (
            ("POST", "/v1/embeddings", 404),
            ("POST", "/v1/load_lora_adapter", 404),
            ("GET", "/", 404),
            ("POST", "/v1/completions/", 404),
            ("GET", "/v1/completions", 405),
            ("POST", "/v1/models", 405),
            ("DELETE", "/v1/models/pirate", 405),
        ):
            headers = {"authorization": f"Bearer {world.keys.acme}"}
            answer = await gw.client.request(method, path, headers=headers)
            _check_shape(answer.json())
            assert answer.status_code == status, (method, path)


#: Of other engines' APIs: what embeds, scores, tokenises, loads adapters or weights, profiles, and tells of the inside.
FOREIGN = (
    *("/v2/embed", "/v1/embeddings", "/pooling", "/score", "/v1/score", "/rerank", "/classify", "/v1/responses"),
    *("/tokenize", "/detokenize", "/generate", "/invocations", "/get_model_info", "/server_info", "/metrics", "/state"),
    *("/v1/load_lora_adapter", "/load_lora_adapter", "/load_lora_adapter_from_tensors", "/v1/unload_lora_adapter"),
    *("/adapters", "/adapters/acme/pirate/1", "/model", "/start_profile", "/sleep", "/collective_rpc", "/docs"),
    *("/v1//completions", "/v1/completions/../../adapters", "/v1/completions%2f..%2f..%2fadapters"),
)


async def test_only_the_listed_paths_reach_an_engine_g7(world: World, place: Place) -> None:
    engine = place.engine()
    async with engines(engine):
        engine.publish(place.endpoints)
        async with gateway(place.settings(world.url), replicas=1) as gw:
            headers = {"authorization": f"Bearer {world.keys.acme}"}
            body = {"model": "pirate", "prompt": "hello"}
            for path in FOREIGN:
                for method in ("POST", "GET"):
                    answer = await gw.client.request(method, path, json=body, headers=headers)
                    assert answer.status_code == 404, (method, path)
            assert engine.requests == []
            for path in PATHS:
                assert (await gw.ask(world.keys.acme, "pirate", path=path)).status_code == 200
            assert [each.path for each in engine.requests] == list(PATHS)


async def test_a_full_gateway_is_429(world: World, place: Place) -> None:
    engine = place.engine()
    engine.default.hold = "headers"
    async with engines(engine):
        engine.publish(place.endpoints)
        async with gateway(place.settings(world.url, max_in_flight=1), replicas=1) as gw:
            first = asyncio.create_task(gw.ask(world.keys.acme, "pirate"))
            await (await engine.request()).reached.wait()
            answer = await gw.ask(world.keys.acme, "pirate")
            assert (answer.status_code, answer.json()["error"]["code"]) == (429, "engine_busy")
            assert answer.headers["retry-after"] == "1"
            engine.default.release.set()
            assert (await first).status_code == 200
            assert (await gw.ask(world.keys.acme, "pirate")).status_code == 200


async def _get(gw: Gateway, path: str, key: str | None) -> Any:
    return await gw.client.get(path, headers={"authorization": f"Bearer {key}"} if key is not None else {})


async def _raw(gw: Gateway, request: bytes) -> tuple[int, Any]:
    """The one answer that came before the connection ended, without a second one after it."""
    async with asyncio.timeout(5):
        reader, writer = await asyncio.open_connection("127.0.0.1", gw.port)
        writer.write(request)
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
        body = await reader.readexactly(length)
        rest = await reader.read()
        writer.close()
        await writer.wait_closed()
    assert rest == b""
    return int(head.split(b" ")[1]), json.loads(body)
