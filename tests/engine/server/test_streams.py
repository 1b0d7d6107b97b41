"""What happens while tokens flow: stop strings, clients that leave, errors after the first byte, the core's death."""

import asyncio
import json
import socket
from pathlib import Path
from typing import Any

import httpx
import pytest

from loraplane_engine import messages as m
from tests.engine.server.fake_core import answer
from tests.engine.server.world import BASE, World, running, standalone, until, until_ready

pytestmark = pytest.mark.asyncio(loop_scope="session")


def begun(generate: m.Generate) -> list[m.FromCore]:
    """A request that has its first token and then nothing."""
    return [
        m.Scheduled(request=generate.request, queue_ms=0, cold=False),
        m.Output(request=generate.request, tokens=[65]),
    ]


def nothing(generate: m.Generate) -> list[m.FromCore]:
    return []


def streamed_text(response: httpx.Response) -> tuple[str, str]:
    """(text, finish reason); checks that every event is whole."""
    text, finish = "", ""
    for line in response.text.split("\n\n"):
        if line and line != "data: [DONE]":
            choice = json.loads(line.removeprefix("data: "))["choices"][0]
            text += choice["text"]
            finish = choice["finish_reason"] or finish
    return text, finish


@pytest.mark.parametrize(
    ("stop", "text", "shown", "tokens"),
    [
        ("END", "abENDcd", "ab", 5),
        (["xx", "D"], "abENDcd", "abEN", 5),
        ("界", "世界!", "世", 6),
        ("zz", "plain", "plain", 6),
        ("zz", "endz", "endz", 5),
    ],
)
async def test_a_stop_string_across_tokens_never_leaks(
    engine: World, stop: Any, text: str, shown: str, tokens: int
) -> None:
    engine.core.script = lambda generate: answer(generate, text)
    whole = (await engine.complete(stop=stop)).json()
    assert whole["choices"][0]["text"] == shown
    assert whole["choices"][0]["finish_reason"] == "stop"
    assert whole["usage"]["completion_tokens"] == tokens
    assert streamed_text(await engine.complete(stop=stop, stream=True)) == (shown, "stop")


async def test_a_stop_string_ends_the_request_in_the_core(engine: World) -> None:
    def script(generate: m.Generate) -> list[m.FromCore]:
        return answer(generate, "a STOP and more")[:-3]  # the core would go on

    engine.core.script = script
    assert (await engine.complete(stop=" STOP")).json()["choices"][0]["text"] == "a"
    await engine.core.wait_for(lambda: bool(engine.core.of(m.Abort)))


async def test_min_tokens_lets_an_early_stop_string_pass(engine: World) -> None:
    engine.core.script = lambda generate: answer(generate, "a.b.c")
    assert (await engine.complete(stop=".", min_tokens=4)).json()["choices"][0]["text"] == "a.b"


async def test_one_choice_that_stops_does_not_end_the_others(engine: World) -> None:
    def script(generate: m.Generate) -> list[m.FromCore]:
        return answer(generate, "aXb" if generate.sampling.seed == 1 else "abc")

    engine.core.script = script
    body = (await engine.complete(n=2, seed=1, stop="X")).json()
    assert [choice["text"] for choice in body["choices"]] == ["a", "abc"]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("script", [nothing, begun])
async def test_a_client_that_leaves_aborts_its_request_in_the_core(engine: World, stream: bool, script: Any) -> None:
    engine.core.script = script
    body = json.dumps({"model": BASE, "prompt": "hi", "stream": stream, "n": 2}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", engine.ports["data"])
    writer.write(head + body)
    await engine.core.wait_for(lambda: len(engine.core.of(m.Generate)) == 2)
    if script is begun and stream:
        async with asyncio.timeout(5):
            await reader.readuntil(b'"text":"A"')
    assert engine.core.of(m.Abort) == []
    writer.close()
    await engine.core.wait_for(lambda: len(engine.core.of(m.Abort)) == 2)
    wanted = {generate.request for generate in engine.core.of(m.Generate)}
    assert {abort.request for abort in engine.core.of(m.Abort)} == wanted


@pytest.mark.parametrize("stream", [True, False])
async def test_a_failure_before_the_first_token_is_a_proper_status(engine: World, stream: bool) -> None:
    engine.core.script = lambda generate: [
        m.RequestFailed(request=generate.request, status=503, code="insufficient_memory", message="3 GiB > 2 GiB")
    ]
    response = await engine.complete(stream=stream)
    assert (response.status_code, response.json()["error"]["code"]) == (503, "insufficient_memory")
    assert response.headers["retry-after"]


async def test_a_failure_after_the_first_token_is_a_typed_event_without_done(engine: World) -> None:
    def script(generate: m.Generate) -> list[m.FromCore]:
        failed = m.RequestFailed(request=generate.request, status=500, code="internal_error", message="step failed")
        return [*begun(generate), failed]

    engine.core.script = script
    response = await engine.complete(stream=True)
    assert response.status_code == 200
    last = response.text.strip().split("\n\n")[-1]
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "internal_error"
    assert "[DONE]" not in response.text
    whole = await engine.complete()
    assert (whole.status_code, whole.json()["error"]["code"]) == (500, "internal_error")


async def test_the_stream_starts_when_the_core_schedules_and_not_before(engine: World) -> None:
    engine.core.script = nothing
    request = engine.data.build_request("POST", "/v1/completions", json={"model": BASE, "prompt": "x", "stream": True})
    sending = asyncio.create_task(engine.data.send(request, stream=True))
    await engine.core.wait_for(lambda: bool(engine.core.of(m.Generate)))
    assert not sending.done()
    name = engine.core.of(m.Generate)[0].request
    engine.core.say(m.Scheduled(request=name, queue_ms=123.44, cold=True))
    async with asyncio.timeout(5):
        response = await sending
    assert response.headers["x-loraplane-queue-ms"] == "123.4"
    assert response.headers["x-loraplane-residency"] == "cold"
    await response.aclose()


async def test_messages_for_an_aborted_request_are_dropped(engine: World) -> None:
    engine.core.say(m.Output(request="gone", tokens=[1]), m.Scheduled(request="gone", queue_ms=0, cold=False))
    assert (await engine.complete()).status_code == 200


# -- the process


async def test_when_the_core_dies_everyone_hears_it_and_the_server_exits(model: Path, tmp_path: Path) -> None:
    async with running(standalone(model, tmp_path), tmp_path) as world:
        world.core.script = nothing
        waiting = asyncio.create_task(world.complete())
        await world.core.wait_for(lambda: len(world.core.of(m.Generate)) == 1)
        world.core.script = begun
        streaming = asyncio.create_task(world.complete(stream=True))
        await world.core.wait_for(lambda: len(world.core.of(m.Generate)) == 2)
        world.core.die()
        async with asyncio.timeout(5):
            assert await world.running == 1
            first, second = await asyncio.gather(waiting, streaming)
        assert (first.status_code, first.json()["error"]["code"]) == (503, "engine_failed")
        assert '"code":"engine_failed"' in second.text


async def test_stopping_lets_running_requests_end(model: Path, tmp_path: Path) -> None:
    async with running(standalone(model, tmp_path), tmp_path) as world:
        world.core.script = begun
        asking = asyncio.create_task(world.complete(stream=True))
        await world.core.wait_for(lambda: bool(world.core.of(m.Generate)))
        world.stop.set()

        def refused() -> bool:
            return world.running.done() or not _accepts(world.ports["data"])

        await until(refused)
        assert not world.running.done()
        name = world.core.of(m.Generate)[0].request
        world.core.say(m.Output(request=name, tokens=[66], finish="stop"))
        async with asyncio.timeout(5):
            response = await asking
            assert await world.running == 0
        assert streamed_text(response) == ("AB", "stop")
        assert len(world.core.of(m.Shutdown)) == 1


async def test_before_the_model_is_loaded_the_engine_is_live_but_not_ready(model: Path, tmp_path: Path) -> None:
    async with running(standalone(model, tmp_path), tmp_path, ready=False, hold=True) as world:
        assert (await world.data.get("/health/live")).status_code == 200
        for client in (world.data, world.metrics):
            response = await client.get("/health/ready")
            assert (response.status_code, response.json()["error"]["code"]) == (503, "unavailable")
        response = await world.complete()
        assert (response.status_code, response.headers["retry-after"]) == (503, "2")
        world.core.release()
        await until_ready(world)
        assert (await world.complete()).status_code == 200


def _accepts(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=0.2).close()
    except OSError:
        return False
    return True
