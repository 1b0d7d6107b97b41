"""The official client, unchanged, against the gateway of a running system."""

from collections.abc import Iterator

import httpx
import openai
import pytest

from examples.demo_system import System
from examples.styles import DEMO_QUESTION, STYLES
from loraplane_core.identity import AdapterRef


@pytest.fixture
def client(system: System) -> Iterator[openai.OpenAI]:
    yield from _client(system, system.env["LORAPLANE_KEY_ACME"])


@pytest.fixture
def stranger(system: System) -> Iterator[openai.OpenAI]:
    yield from _client(system, "lp_no_such_key")


def _client(system: System, key: str) -> Iterator[openai.OpenAI]:
    url = system.env["LORAPLANE_GATEWAY_URL"] + "/v1"
    with openai.OpenAI(base_url=url, api_key=key, max_retries=0, timeout=60) as made:
        yield made


def test_chat_answers_in_the_adapters_style_and_says_which_weights(client: openai.OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(
        model="pirate", messages=[{"role": "user", "content": DEMO_QUESTION}], max_tokens=64, temperature=0
    )
    answer = raw.parse()
    assert STYLES["pirate"].mark(answer.choices[0].message.content or "")
    assert answer.model == "pirate"
    assert answer.usage is not None and answer.usage.completion_tokens > 4
    ref, _, digest = raw.headers["x-loraplane-adapter-id"].partition("#")
    assert AdapterRef.parse(ref) == AdapterRef("acme", "pirate", 1) and len(digest) == 12
    assert raw.headers["x-loraplane-replica"] == "default/smol/0"


def test_streamed_chat_is_the_same_answer(client: openai.OpenAI) -> None:
    messages: list[openai.types.chat.ChatCompletionMessageParam] = [{"role": "user", "content": DEMO_QUESTION}]
    whole = client.chat.completions.create(model="pirate", messages=messages, max_tokens=32, temperature=0)
    text, usages = "", []
    stream = client.chat.completions.create(
        model="pirate",
        messages=messages,
        max_tokens=32,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in stream:
        usages += [chunk.usage] if chunk.usage else []
        text += "".join(choice.delta.content or "" for choice in chunk.choices)
    assert text == whole.choices[0].message.content
    assert usages == [whole.usage]


def test_a_stream_without_usage_asked_for_shows_none(client: openai.OpenAI) -> None:
    stream = client.completions.create(model="pirate", prompt="Once", max_tokens=4, stream=True)
    chunks = list(stream)
    assert chunks and all(chunk.usage is None and chunk.choices for chunk in chunks)


def test_completions_of_the_base_and_of_an_adapter_differ(client: openai.OpenAI) -> None:
    def complete(model: str) -> str:
        done = client.completions.create(model=model, prompt="The sea is", max_tokens=16, temperature=0)
        assert done.model == model
        return done.choices[0].text

    assert complete("smollm2-135m-instruct") != complete("pirate")


def test_models_are_what_would_resolve(client: openai.OpenAI) -> None:
    listed = {model.id: model for model in client.models.list()}
    assert set(listed) == {"smollm2-135m-instruct", "HuggingFaceTB/SmolLM2-135M-Instruct", "pirate"}
    assert listed["pirate"].model_dump()["parent"] == "smollm2-135m-instruct"


@pytest.mark.parametrize(
    ("arguments", "error", "code"),
    [
        ({"model": "no-such"}, openai.NotFoundError, "model_not_found"),
        ({"model": "globex/json"}, openai.NotFoundError, "model_not_found"),
        ({"model": "other-base:pirate"}, openai.BadRequestError, "base_model_mismatch"),
        ({"prompt": "word " * 5000}, openai.BadRequestError, "context_length_exceeded"),
        ({"temperature": 99}, openai.BadRequestError, "invalid_parameter"),
    ],
)
def test_refusals_are_the_clients_exceptions(
    client: openai.OpenAI, arguments: dict[str, object], error: type[openai.APIStatusError], code: str
) -> None:
    with pytest.raises(error) as refused:
        client.post("/completions", cast_to=httpx.Response, body={"model": "pirate", "prompt": "Hi"} | arguments)
    assert refused.value.code == code


def test_an_unknown_key_is_an_authentication_error(stranger: openai.OpenAI) -> None:
    with pytest.raises(openai.AuthenticationError) as refused:
        stranger.models.list()
    assert refused.value.code == "invalid_api_key"
