"""The metrics port: what adapters cost, with labels that cannot explode."""

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from loraplane_engine.messages import StepStats
from loraplane_engine.server.metrics import TOP_ADAPTERS, Metrics
from tests.engine.server.artifacts import Source
from tests.engine.server.fake_core import stats
from tests.engine.server.managed import Known, ask
from tests.engine.server.world import World

pytestmark = pytest.mark.asyncio(loop_scope="session")

Sample = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def samples(text: str) -> Sample:
    return {
        (sample.name.removeprefix("loraplane_engine_"), tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def scrape(now: StepStats) -> Sample:
    metrics = Metrics(lambda: now, lambda: None)
    metrics.stepped(now)
    return samples(generate_latest(metrics.registry).decode())


async def test_the_metrics_port_needs_no_credential_and_counts_outcomes(engine: World) -> None:
    await engine.complete()
    await engine.complete(max_tokens=0)
    found = samples((await engine.metrics.get("/metrics")).text)
    assert found["requests_total", (("outcome", "ok"),)] >= 1
    assert found["requests_total", (("outcome", "invalid_parameter"),)] >= 1
    assert found["time_to_first_token_seconds_count", (("residency", "hit"),)] >= 1
    assert found["queue_seconds_count", ()] >= 1
    assert found["kv_tokens", ()] == 4096
    assert found["core_info", (("layout", "v1/float32/65536"), ("lora_form", "torch"), ("threads", "1"))] == 1
    assert (await engine.metrics.get("/v1/models")).status_code == 404


async def test_a_cold_request_and_a_hit_are_told_apart_in_headers_and_metrics_o38(
    pool: World, source: Source, known: Known
) -> None:
    async def counted() -> dict[str, float]:
        found = samples((await pool.metrics.get("/metrics")).text)
        first = {
            at: found.get(("time_to_first_token_seconds_count", (("residency", at),)), 0.0) for at in ("cold", "hit")
        }
        loads = sum(value for (name, _), value in found.items() if name == "adapter_load_seconds_count")
        return {**first, "loads": loads}

    before = await counted()
    answers = [await ask(pool, known) for _ in range(3)]
    assert [answer.headers["x-loraplane-residency"] for answer in answers] == ["cold", "hit", "hit"]
    assert len({answer.headers["x-loraplane-boot"] for answer in answers}) == 1
    after = await counted()
    assert {name: after[name] - before[name] for name in after} == {"cold": 1, "hit": 2, "loads": 1}


async def test_what_adapters_cost_is_told() -> None:
    now = stats(
        kv_tokens_total=1000,
        kv_tokens_displaced=160,
        kv_tokens_free=840,
        adapter_used_bytes=5,
        swaps_in=7,
        evictions=2,
        padded_tokens=0,
        adapters_in_step_max=3,
        adapters_in_step_histogram=[4, 3, 2, 1],
    )
    found = scrape(now)
    assert found["kv_tokens_displaced", ()] == 160
    assert found["adapter_swaps_total", ()] == 7
    assert found["adapter_evictions_total", ()] == 2
    assert found["padded_tokens_total", ()] == 0
    assert found["adapters_per_step_max", ()] == 3
    assert found["adapters_per_step_bucket", (("le", "1.0"),)] == 7
    assert found["adapters_per_step_bucket", (("le", "+Inf"),)] == 10
    assert found["adapters_per_step_count", ()] == 10
    assert found["adapters_per_step_sum", ()] == 10


async def test_labels_are_tenant_and_adapter_the_busiest_and_other() -> None:
    tokens = {f"t{number}/a@1": 1000 - number for number in range(TOP_ADAPTERS + 5)}
    found = scrape(stats(tokens_by_adapter=tokens | {"t0/a@2": 5}))
    series = {labels: value for (name, labels), value in found.items() if name == "adapter_tokens_total"}
    assert len(series) == TOP_ADAPTERS + 1
    assert series[("adapter", "a"), ("tenant", "t0")] == 1005  # versions are one series
    assert series[("adapter", "other"), ("tenant", "other")] == sum(1000 - n for n in range(20, 25))
    assert all({name for name, _ in labels} == {"tenant", "adapter"} for labels in series)
