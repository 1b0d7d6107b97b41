"""Everything at once."""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from loraplane_engine.messages import Abort, MarkAdapter, Output, UnloadAdapter
from tests.engine.harness import PAGE, Clock, drive, random_prompt, ticking


@settings(
    max_examples=15,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_any_order_of_events_ends_with_every_request_answered_rightly(
    data: st.DataObject, base: Path, artifacts: list[Path], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Requests, aborts, unloads and reloads in little memory; every token is that of the request's own weights."""
    clock = Clock()
    engine = drive(
        tmp_path_factory.mktemp("fuzz"),
        base,
        clock=clock,
        max_model_len=64,
        max_batch_tokens=16,
        max_sequences=4,
        device_memory=data.draw(st.sampled_from([11, 14, 24])) * PAGE,
        adapter_memory=6 * PAGE,
        host_cache=9 * PAGE,
    )
    prompts = [random_prompt(number, 3 + 9 * number) for number in range(3)]
    truth: dict[tuple[str, int], list[int]] = {}
    keys = [engine.load(artifact, f"t{i}/a@1") for i, artifact in enumerate(artifacts[:3])]
    for number, prompt in enumerate(prompts):
        truth["base", number] = engine.complete(prompt, max_tokens=20)
        for key in keys:
            truth[key.ref, number] = engine.complete(prompt, key, max_tokens=20)
    ticking(engine, clock, 0.3)
    open_requests: dict[str, tuple[str, int]] = {}
    for event in range(data.draw(st.integers(5, 30))):
        match data.draw(st.sampled_from(["ask", "ask", "ask", "step", "step", "abort", "unload", "load", "pin"])):
            case "ask":
                number, who = data.draw(st.integers(0, 2)), data.draw(st.integers(-1, 2))
                asked = None if who < 0 else keys[who]
                open_requests[f"q{event}"] = ("base" if asked is None else asked.ref, number)
                engine.generate(f"q{event}", prompts[number], asked, max_tokens=20)
            case "step":
                engine.step()
            case "abort" if open_requests:
                engine.core.handle(Abort(data.draw(st.sampled_from(sorted(open_requests)))))
            case "unload":
                key = keys[data.draw(st.integers(0, 2))]
                engine.core.handle(UnloadAdapter(key=key, drain_s=data.draw(st.sampled_from([0.0, 1.0, 60.0]))))
            case "load":
                who = data.draw(st.integers(0, 2))
                engine.load(artifacts[who], keys[who].ref, wait=data.draw(st.booleans()))
            case "pin":
                key = keys[data.draw(st.integers(0, 2))]
                engine.core.handle(MarkAdapter(key=key, pinned=data.draw(st.booleans())))
    engine.finish(*open_requests)
    for request, pair in open_requests.items():
        end, wanted = engine.ended[request], truth[pair]
        if isinstance(end, Output) and end.finish == "length":
            assert engine.tokens[request] == wanted
        else:
            got = engine.tokens.get(request, [])
            assert got == wanted[: len(got)]
            assert isinstance(end, Output) or end.code in (
                "artifact_unavailable", "adapter_withdrawn", "insufficient_memory",
            )  # fmt: skip
    engine.until(lambda: not engine.core.residency.loading)
    engine.assert_everything_free()
    for key in keys:
        engine.core.handle(UnloadAdapter(key=key, drain_s=0))
    engine.drain()
    assert engine.core.base.arena.pages.free == engine.core.base.arena.pages.total
    assert engine.core.residency.host_used == 0
    assert all(state.residency == "absent" and state.in_use == 0 for state in engine.states.values())
    engine.core.close()
