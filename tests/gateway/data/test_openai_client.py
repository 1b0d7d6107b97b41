"""The official client works unchanged; errors become its own exception classes."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import openai
import pytest
from openai.types.chat import ChatCompletionUserMessageParam

from tests.fakes.engine import Plan, engines
from tests.gateway.data.harness import BASE, Gateway, Place, World, gateway

pytestmark = pytest.mark.timeout(30)
MESSAGES = [ChatCompletionUserMessageParam(role="user", content="hello")]


@asynccontextmanager
async def client_of(gw: Gateway, key: str) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{gw.port}/v1", api_key=key, max_retries=0) as client:
        yield client


async def test_models_completions_chat_and_streams(world: World, place: Place) -> None:
    engine = place.engine()
    async with engines(engine):
        engine.publish(place.endpoints)
        async with gateway(place.settings(world.url), replicas=1) as gw, client_of(gw, world.keys.acme) as client:
            listed = [model.id async for model in client.models.list()]
            assert {"pirate", BASE} <= set(listed)
            assert (await client.models.retrieve("pirate")).id == "pirate"
            plain = await client.completions.create(model="pirate", prompt="hello")
            assert plain.choices[0].text == "one two three" and plain.usage is not None
            chat = await client.chat.completions.create(model="pirate", messages=MESSAGES)
            assert chat.choices[0].message.content == "one two three"
            deltas = await client.chat.completions.create(model="pirate", messages=MESSAGES, stream=True)
            assert [piece.choices[0].delta.content async for piece in deltas] == ["one", "two", "three"]
            pieces = await client.completions.create(
                model="pirate", prompt="x", stream=True, stream_options={"include_usage": True}
            )
            found = [piece async for piece in pieces]
            assert found[-1].usage is not None and found[-1].usage.completion_tokens == 3


async def test_errors_are_its_own_exceptions(world: World, place: Place) -> None:
    engine = place.engine()
    async with engines(engine):
        engine.publish(place.endpoints)
        async with gateway(place.settings(world.url, max_body=2048), replicas=1) as gw:
            async with client_of(gw, world.keys.acme) as client:
                with pytest.raises(openai.NotFoundError) as missing:
                    await client.completions.create(model="nothing", prompt="x")
                assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
                with pytest.raises(openai.BadRequestError):
                    await client.completions.create(model="other:pirate", prompt="x")
                with pytest.raises(openai.APIStatusError) as large:
                    await client.completions.create(model="pirate", prompt="x" * 5000)
                assert large.value.status_code == 413
                engine.plans = [Plan(status=500, error_code="internal_error")]
                with pytest.raises(openai.InternalServerError):
                    await client.completions.create(model="pirate", prompt="x")
                engine.default = Plan(die=2)
                pieces = await client.completions.create(model="pirate", prompt="x", stream=True)
                with pytest.raises(openai.APIError) as broken:
                    async for _ in pieces:
                        pass
                assert broken.value.code == "replica_lost"
            async with client_of(gw, "lp_wrong") as client:
                with pytest.raises(openai.AuthenticationError):
                    await client.models.list()
