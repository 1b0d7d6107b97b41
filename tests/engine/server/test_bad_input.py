"""Refusals: each has a status, a stable code and, where a field is at fault, its name."""

import asyncio
import contextlib
import json
from typing import Any

import pytest

from loraplane_core import listener
from loraplane_core.errors import InvalidParameter
from loraplane_engine import messages as m
from loraplane_engine.server.params import check_logprobs
from tests.engine.server.world import BASE, World

CHAT = {"messages": [{"role": "user", "content": "hi"}]}

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def post_raw(world: World, body: bytes, path: str = "/v1/completions") -> tuple[int, dict[str, Any]]:
    response = await world.data.post(path, content=body, headers={"content-type": "application/json"})
    return response.status_code, response.json()["error"]


async def send_bytes(world: World, request: bytes, port: str = "data") -> bytes:
    """What the server answers to these very bytes, until it closes or five seconds are over."""
    reader, writer = await asyncio.open_connection("127.0.0.1", world.ports[port])
    try:
        writer.write(request)
        async with asyncio.timeout(5):
            return await reader.read(64 << 10)
    finally:
        writer.close()


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": [99999]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["x"] * 100, "n": 2}, "prompt"),
        ({"model": 7}, "model"),
        ({"model": ""}, "model"),
        ({"max_tokens": "4"}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": 2.5}, "temperature"),
        ({"temperature": 10**400}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"seed": 1 << 70}, "seed"),
        ({"n": 0}, "n"),
        ({"n": 10_000}, "n"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"stream": True, "stream_options": []}, "stream_options"),
        ({"stop": 5}, "stop"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids"),
        ({"stop_token_ids": [99999]}, "stop_token_ids"),
        ({"min_tokens": 20, "max_tokens": 10}, "min_tokens"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"frequency_penalty": []}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"logprobs": 50}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"ignore_eos": 1}, "ignore_eos"),
        ({"echo": "x"}, "echo"),
        ({"best_of": 3}, "best_of"),
        ({"suffix": "end"}, "suffix"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"min_p": 0.5}, "min_p"),
    ],
)
async def test_a_bad_field_is_named(engine: World, changes: dict[str, Any], param: str) -> None:
    body = json.dumps({"model": BASE, "prompt": "hi"} | changes).encode()
    status, error = await post_raw(engine, body)
    assert (status, error["param"], error["type"]) == (400, param, "invalid_request_error")
    assert engine.core.of(m.Generate) == []


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": ["hi"]}, "messages[0]"),
        ({"messages": [{"role": "pirate", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": 1}, "logprobs"),
        ({"max_completion_tokens": "x"}, "max_completion_tokens"),
    ],
)
async def test_a_bad_chat_field_is_named(engine: World, changes: dict[str, Any], param: str) -> None:
    body = json.dumps({"model": BASE, **CHAT} | changes).encode()
    status, error = await post_raw(engine, body, "/v1/chat/completions")
    assert (status, error["param"]) == (400, param)


@pytest.mark.parametrize("name", ["min_p", "best_of", "length_penalty"])
async def test_a_number_too_large_for_a_float_is_refused_like_any_other(engine: World, name: str) -> None:
    response = await engine.complete(**{name: 10**400})
    assert (response.status_code, response.json()["error"]["param"]) == (400, name)


async def test_neutral_values_of_unsupported_fields_pass(engine: World) -> None:
    neutral: dict[str, Any] = {
        "best_of": 1,
        "suffix": None,
        "logit_bias": {},
        "min_p": 0.0,
        "n": 1,
        "tools": [],
        "stop": None,
    }
    assert (await engine.complete(**neutral)).status_code == 200
    chat = {"model": BASE, **CHAT, "response_format": {"type": "text"}, "tool_choice": "none", "stop": []}
    assert (await engine.data.post("/v1/chat/completions", json=chat)).status_code == 200


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'{"model": NaN}',
        b'{"model":"tiny"} x',
        b"\xff\xfe",
        b'{"model":"tiny","prompt":"\\ud800"}',
        b'{"model":"tiny","model":"tiny","prompt":"x"}',
        b'{"a":' * 5000 + b"1" + b"}" * 5000,
        b'{"seed":' + b"9" * 5000 + b"}",
    ],
)
async def test_what_is_not_one_json_object_is_refused(engine: World, body: bytes) -> None:
    status, error = await post_raw(engine, body)
    assert (status, error["code"]) == (400, "invalid_json")


async def test_an_over_long_prompt_says_the_numbers(engine: World) -> None:
    status, error = await post_raw(engine, json.dumps({"model": BASE, "prompt": "x" * 600}).encode())
    assert (status, error["code"]) == (400, "context_length_exceeded")
    assert "600" in error["message"]
    assert "512" in error["message"]


async def test_a_prompt_that_cannot_fit_is_refused_before_it_is_tokenised(engine: World) -> None:
    for messages in ([{"role": "user", "content": "x" * 1_000_000}], [{"role": "user", "content": ""}] * 10_000):
        response = await engine.data.post("/v1/chat/completions", json={"model": BASE, "messages": messages})
        assert response.json()["error"]["code"] == "context_length_exceeded"
        assert "at least" in response.json()["error"]["message"]


async def test_prompt_and_answer_must_fit_together(engine: World) -> None:
    response = await engine.complete(prompt="x" * 500, max_tokens=13)
    assert response.json()["error"]["code"] == "context_length_exceeded"
    assert (await engine.complete(prompt="x" * 500, max_tokens=12)).status_code == 200


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": [7] * 400, "n": 128, "echo": True, "logprobs": 5}),
        ("/v1/completions", {"prompt": [[7] * 400] * 64, "n": 2, "echo": True, "logprobs": 5}),
        ("/v1/completions", {"prompt": "x", "max_tokens": 400, "n": 128, "logprobs": 5}),
        ("/v1/chat/completions", CHAT | {"n": 128, "logprobs": True, "top_logprobs": 20}),
    ],
)
async def test_more_log_probabilities_than_memory_is_for_are_refused_with_the_arithmetic(
    engine: World, path: str, body: dict[str, Any]
) -> None:
    status, error = await post_raw(engine, json.dumps({"model": BASE} | body).encode(), path)
    assert (status, error["code"], error["param"]) == (400, "invalid_parameter", "logprobs")
    assert "entries; one request may ask for 262144" in error["message"]
    assert engine.core.of(m.Generate) == []


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": [7] * 400, "n": 128, "echo": True}),
        ("/v1/completions", {"prompt": [7] * 400, "n": 8, "echo": True, "logprobs": 20}),
        ("/v1/chat/completions", CHAT | {"n": 8, "logprobs": True, "top_logprobs": 20}),
    ],
)
async def test_log_probabilities_within_the_bound_pass(engine: World, path: str, body: dict[str, Any]) -> None:
    assert (await engine.data.post(path, json={"model": BASE} | body)).status_code == 200


async def test_one_answer_that_fills_the_context_may_carry_all_log_probabilities() -> None:
    check_logprobs(100_000, 20, max_model_len=100_000)
    with pytest.raises(InvalidParameter, match="2100042 entries"):
        check_logprobs(100_002, 20, max_model_len=100_000)


async def test_case_e17_an_unknown_model_is_404_and_never_the_base(engine: World) -> None:
    for path, rest in (("/v1/completions", {"prompt": "x"}), ("/v1/chat/completions", CHAT)):
        for model in ("tinny", "tiny ", "local/tiny@1", "../tiny", "base"):
            response = await engine.data.post(path, json={"model": model, **rest})
            assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")
    assert engine.core.of(m.Generate) == []


async def test_case_e37_no_field_or_header_of_a_request_names_a_path(engine: World) -> None:
    fields = {"adapter_id": "/etc", "adapter_source": "local", "lora_path": "/etc", "lora_request": {"path": "/etc"}}
    response = await engine.data.post(
        "/v1/completions",
        json={"model": BASE, "prompt": "x", **fields},
        headers={"x-loraplane-adapter": "acme/../../etc@1", "x-loraplane-digest": "0" * 64},
    )
    assert response.status_code == 200
    assert set(response.headers["x-loraplane-ignored-params"].split(",")) == set(fields)
    assert engine.core.of(m.Generate)[0].adapter is None
    assert (await engine.data.post("/v1/completions", json={"model": "/etc/passwd", "prompt": "x"})).status_code == 404


@pytest.mark.parametrize("query", ["?model=other", "?%6dodel=other", "?a=1&model="])
async def test_case_g11_a_model_in_the_url_is_refused(engine: World, query: str) -> None:
    response = await engine.data.post(f"/v1/completions{query}", json={"model": BASE, "prompt": "x"})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "model")


@pytest.mark.parametrize(
    "framing",
    [
        b"Content-Length: LENGTH\r\nTransfer-Encoding: chunked\r\n",
        b"Transfer-Encoding: chunked\r\nContent-Length: LENGTH\r\n",
        b"Transfer-Encoding: gzip, chunked\r\n",
        b"Transfer-Encoding: xchunked\r\n",
        b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n",
        b"Content-Length: LENGTH\r\nContent-Length: 9\r\n",
        b"Content-Length: +LENGTH\r\n",
    ],
)
async def test_case_g85_ambiguous_framing_is_refused(engine: World, framing: bytes) -> None:
    body = b'{"model":"tiny","prompt":"x"}'
    chunked = f"{len(body):x}\r\n".encode() + body + b"\r\n0\r\n\r\n"
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
    length = str(len(body)).encode()
    for content in (body, chunked):  # whichever framing a lenient reader would follow
        request = head + framing.replace(b"LENGTH", length) + b"\r\n" + content
        assert (await send_bytes(engine, request)).startswith(b"HTTP/1.1 400")
    assert engine.core.of(m.Generate) == []


async def test_case_g85_bad_chunk_terminators_are_refused(engine: World) -> None:
    body = b"2\r\n{}XX0\r\n\r\n"
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    assert (await send_bytes(engine, head + body)).startswith(b"HTTP/1.1 400")


async def test_an_oversized_body_is_413_without_being_read_whole(engine: World) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 999999999\r\n\r\n{"
    answer = await send_bytes(engine, head)
    assert answer.startswith(b"HTTP/1.1 413")
    assert b"body_too_large" in answer


async def test_an_oversized_chunked_body_is_413(engine: World) -> None:
    async def chunks() -> Any:
        for _ in range(80):
            yield b" " * (64 << 10)

    response = await engine.data.post("/v1/completions", content=chunks())
    assert (response.status_code, response.json()["error"]["code"]) == (413, "body_too_large")


async def test_a_body_that_never_arrives_is_given_up(engine: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loraplane_engine.server.asgi.BODY_SECONDS", 0.1)
    answer = await send_bytes(engine, b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{")
    assert answer.startswith(b"HTTP/1.1 400")
    assert b"body_timeout" in answer


@pytest.mark.parametrize("port", ["data", "metrics"])
@pytest.mark.parametrize("head", [b"", b"GET /health/live HTTP/1.1\r\nhost: x\r\nx-slow: "])
async def test_a_head_that_never_ends_is_given_up(
    engine: World, monkeypatch: pytest.MonkeyPatch, port: str, head: bytes
) -> None:
    monkeypatch.setattr(listener, "HEAD_SECONDS", 0.2)
    assert b" 408 " in await send_bytes(engine, head, port)


async def test_a_head_byte_by_byte_has_one_deadline_also_after_an_answer(
    engine: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "HEAD_SECONDS", 0.3)
    reader, writer = await asyncio.open_connection("127.0.0.1", engine.ports["data"])
    try:
        async with asyncio.timeout(5):
            writer.write(b"GET /health/live HTTP/1.1\r\nhost: x\r\n\r\n")
            assert b" 200 " in await reader.readuntil(b"}")
            writer.write(b"GET /health/live HTTP/1.1\r\n")
            answer = asyncio.create_task(reader.read())
            while not answer.done():
                writer.write(b"x")  # never silent, never done
                await asyncio.wait([answer], timeout=0.02)
            with contextlib.suppress(ConnectionResetError):  # what is still sent may take the refusal's bytes along
                assert b"deadline_exceeded" in answer.result()
    finally:
        writer.close()


async def test_the_deadline_for_heads_leaves_bodies_streams_and_idle_connections_alone(
    engine: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "HEAD_SECONDS", 0.1)
    for _ in range(2):  # the same connection, kept for longer than a head may take
        assert (await engine.complete()).status_code == 200
        await asyncio.sleep(0.2)
    body = b'{"model": "tiny", "prompt": "hi"}'
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", engine.ports["data"])
    try:
        writer.write(head.encode() + body[:5])
        await asyncio.sleep(0.2)
        writer.write(body[5:])
        async with asyncio.timeout(5):
            assert b" 200 " in await reader.read()
    finally:
        writer.close()


async def test_what_is_no_http_is_refused_in_our_form(engine: World) -> None:
    answer = await send_bytes(engine, b"NONSENSE\r\n\r\n")
    assert b" 400 " in answer and b'"code":"invalid_request"' in answer


async def test_unknown_paths_and_methods_get_an_openai_shaped_404(engine: World) -> None:
    for method, path in (("GET", "/v1/completions"), ("POST", "/v1/nothing"), ("GET", "/"), ("DELETE", "/v1/models")):
        response = await engine.data.request(method, path)
        assert (response.status_code, response.json()["error"]["code"]) == (404, "not_found")


async def test_nothing_above_hurt_the_process(engine: World) -> None:
    for body in (b"{", b'{"a":' * 5000, b"\x00" * 1000):
        await post_raw(engine, body)
    assert (await engine.complete()).status_code == 200
