"""Answers of the OpenAI routes over a scripted core."""

import json
from typing import Any

import httpx
import pytest

from loraplane_engine import messages as m
from tests.engine.server.fake_core import answer
from tests.engine.server.world import BASE, World

pytestmark = pytest.mark.asyncio(loop_scope="session")


def events(response: httpx.Response) -> list[Any]:
    """The parsed data of a stream; the end mark must be there and is left out."""
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


async def test_a_completion_has_text_finish_reason_and_usage(engine: World) -> None:
    response = await engine.complete(max_tokens=50)
    body = response.json()
    assert response.status_code == 200
    assert body["choices"] == [{"index": 0, "text": "hello", "logprobs": None, "finish_reason": "stop"}]
    assert body["usage"] == {"prompt_tokens": 2, "completion_tokens": 6, "total_tokens": 8}
    assert body["object"] == "text_completion"
    assert response.headers["x-loraplane-residency"] == "hit"
    assert response.headers["x-loraplane-adapter-id"] == f"base#{engine.base_digest[:12]}"
    assert response.headers["x-loraplane-queue-ms"] == "1.5"


async def test_max_tokens_ends_with_length_and_defaults_to_sixteen(engine: World) -> None:
    engine.core.script = lambda generate: answer(generate, "x" * 100)
    body = (await engine.complete()).json()
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] == 16


@pytest.mark.parametrize("chat", [False, True])
async def test_case_e16_a_stream_and_a_whole_answer_say_the_same(engine: World, chat: bool) -> None:
    engine.core.script = lambda generate: answer(generate, "grüße, 世界 🎉!")
    path, prompt = (
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]})
        if chat
        else (
            "/v1/completions",
            {"prompt": "hi"},
        )
    )
    body = {"model": BASE, "max_tokens": 60, **prompt}
    whole = (await engine.data.post(path, json=body)).json()["choices"][0]
    streamed = events(await engine.data.post(path, json=body | {"stream": True}))
    parts = [choice for event in streamed for choice in event["choices"]]
    text = "".join(part["delta"].get("content", "") if chat else part["text"] for part in parts)
    assert text == (whole["message"]["content"] if chat else whole["text"]) == "grüße, 世界 🎉!"
    assert parts[-1]["finish_reason"] == whole["finish_reason"] == "stop"
    first, second = engine.core.of(m.Generate)
    assert (first.prompt, first.sampling, first.adapter) == (second.prompt, second.sampling, second.adapter)


async def test_include_usage_gives_one_last_chunk_without_choices(engine: World) -> None:
    response = await engine.complete(stream=True, stream_options={"include_usage": True})
    found = events(response)
    assert found[-1]["choices"] == []
    assert found[-1]["usage"] == {"prompt_tokens": 2, "completion_tokens": 6, "total_tokens": 8}
    assert all(event["usage"] is None for event in found[:-1])


async def test_without_include_usage_no_chunk_mentions_it(engine: World) -> None:
    assert all("usage" not in event for event in events(await engine.complete(stream=True)))


async def test_chat_renders_the_template_and_opens_with_the_role(engine: World) -> None:
    messages = [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": [{"type": "text", "text": "hi "}, {"type": "text", "text": "you"}]},
    ]
    response = await engine.data.post(
        "/v1/chat/completions", json={"model": BASE, "messages": messages, "stream": True}
    )
    deltas = [event["choices"][0]["delta"] for event in events(response)]
    assert deltas[0] == {"role": "assistant", "content": ""}
    prompt = engine.core.of(m.Generate)[0].prompt
    text = bytes(token for token in prompt if token < 256).decode()
    assert text == "system\nbe kind\nuser\nhi you\nassistant\n"
    assert prompt.count(256) == 3


async def test_chat_may_use_the_whole_context_by_default(engine: World) -> None:
    await engine.data.post("/v1/chat/completions", json={"model": BASE, "messages": [{"role": "user", "content": "x"}]})
    generate = engine.core.of(m.Generate)[0]
    assert generate.sampling.max_tokens == 512 - len(generate.prompt)


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [("ab", [[97, 98]]), (["a", "b"], [[97], [98]]), ([97, 98], [[97, 98]]), ([[97], [98, 99]], [[97], [98, 99]])],
)
async def test_every_form_of_prompt(engine: World, prompt: Any, expected: list[list[int]]) -> None:
    body = (await engine.complete(prompt=prompt)).json()
    assert [generate.prompt for generate in engine.core.of(m.Generate)] == expected
    assert [choice["index"] for choice in body["choices"]] == list(range(len(expected)))
    assert body["usage"]["prompt_tokens"] == sum(len(each) for each in expected)


async def test_n_choices_have_their_own_seeds_and_count_the_prompt_once(engine: World) -> None:
    body = (await engine.complete(n=3, seed=7)).json()
    assert [generate.sampling.seed for generate in engine.core.of(m.Generate)] == [7, 8, 9]
    assert len(body["choices"]) == 3
    assert body["usage"] == {"prompt_tokens": 2, "completion_tokens": 18, "total_tokens": 20}


async def test_sampling_parameters_reach_the_core(engine: World) -> None:
    await engine.complete(
        max_tokens=9,
        min_tokens=2,
        temperature=0,
        top_p=0.5,
        top_k=-1,
        seed=3,
        presence_penalty=1,
        frequency_penalty=-1,
        repetition_penalty=1.1,
        stop_token_ids=[5],
        ignore_eos=True,
    )
    assert engine.core.of(m.Generate)[0].sampling == m.SamplingParams(
        max_tokens=9,
        min_tokens=2,
        temperature=0.0,
        top_p=0.5,
        top_k=0,
        seed=3,
        stop_token_ids=(5,),
        ignore_eos=True,
        presence_penalty=1.0,
        frequency_penalty=-1.0,
        repetition_penalty=1.1,
    )


async def test_echo_begins_with_the_prompt(engine: World) -> None:
    assert (await engine.complete(prompt="say: ", echo=True)).json()["choices"][0]["text"] == "say: hello"


async def test_completion_logprobs_are_four_parallel_lists(engine: World) -> None:
    engine.core.script = lambda generate: answer(generate, "né")
    logprobs = (await engine.complete(logprobs=2)).json()["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["n", "bytes:\\xc3", "bytes:\\xa9"]
    assert logprobs["token_logprobs"] == [-0.5] * 3
    assert logprobs["top_logprobs"][0] == {"n": -0.5, "A": -2.0}
    assert logprobs["text_offset"] == [0, 1, 11]


async def test_chat_logprobs_carry_bytes(engine: World) -> None:
    engine.core.script = lambda generate: answer(generate, "é")
    body = {"model": BASE, "messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": 1}
    content = (await engine.data.post("/v1/chat/completions", json=body)).json()["choices"][0]["logprobs"]["content"]
    assert [each["bytes"] for each in content] == [[0xC3], [0xA9]]
    assert content[0]["top_logprobs"][0]["logprob"] == -0.5


async def test_case_e14_the_answer_echoes_the_requested_model(pool_engine: World) -> None:
    for stream in (False, True):
        body = {"model": "acme/support@3", "prompt": "x", "stream": stream}
        response = await pool_engine.data.post("/v1/completions", json=body, headers=pool_engine.headers())
        models = [event["model"] for event in events(response)] if stream else [response.json()["model"]]
        assert set(models) == {"acme/support@3"}


async def test_models_lists_the_base_without_a_parent(engine: World) -> None:
    data = (await engine.data.get("/v1/models")).json()["data"]
    assert [(card["id"], card["parent"]) for card in data] == [(BASE, None)]
    assert (await engine.data.get(f"/v1/models/{BASE}")).json()["id"] == BASE
    assert (await engine.data.get("/v1/models/other")).status_code == 404


async def test_unknown_fields_are_ignored_and_named(engine: World) -> None:
    response = await engine.complete(**{"user": "u", "wörld\r\nx: y": 1})
    assert response.status_code == 200
    assert response.headers["x-loraplane-ignored-params"] == "user,w?rld??x??y"


async def test_request_id_is_taken_over_when_it_is_safe_and_made_otherwise(engine: World) -> None:
    kept = await engine.data.post("/v1/completions", json={}, headers={"x-request-id": "abc-1"})
    made = await engine.data.post("/v1/completions", json={}, headers={"x-request-id": "a b"})
    assert kept.headers["x-request-id"] == "abc-1"
    assert made.headers["x-request-id"].startswith("req-")
