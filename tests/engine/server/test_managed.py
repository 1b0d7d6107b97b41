"""A managed engine: credentials, trusted references, and loading by digest for a request."""

import asyncio
import re
from pathlib import Path

import pytest

from loraplane_engine import messages as m
from tests.engine.server.artifacts import Source, make_artifact
from tests.engine.server.fake_core import answer
from tests.engine.server.managed import Known, ask, being_fetched, code, delete, offer, put, put_body
from tests.engine.server.world import BASE, World

pytestmark = pytest.mark.asyncio(loop_scope="session")


# -- who may ask, and for what


@pytest.mark.parametrize("token", [None, "data-3", "state-2", "admin-2", "data-2x"])
async def test_the_data_port_wants_its_own_credential(pool_engine: World, token: str | None) -> None:
    headers = pool_engine.headers() | {"authorization": f"Bearer {token}"}
    if token is None:
        del headers["authorization"]
    response = await pool_engine.data.post("/v1/completions", json={"model": "x", "prompt": "x"}, headers=headers)
    assert code(response) == (401, "invalid_api_key")
    assert (await pool_engine.data.get("/v1/models", headers=headers)).status_code == 401


@pytest.mark.parametrize(
    "path", ["/v1/completions", "/v1/models", "/v1/models/x", "/v2/embed", "/tokenize", "/pooling", "/metrics", "/"]
)
async def test_no_path_of_the_data_port_is_open_g7(pool_engine: World, path: str) -> None:
    """Not even whether there is such a path is told to whoever shows no credential."""
    for method in ("GET", "POST"):
        assert code(await pool_engine.data.request(method, path, json={})) == (401, "invalid_api_key")
    if not path.startswith("/v1/"):
        assert (await pool_engine.data.get(path, headers=pool_engine.headers())).status_code == 404


LOADING = ("/v1/load_lora_adapter", "/load_lora_adapter", "/load_lora_adapter_from_tensors", "/adapters/acme/pirate/1")


async def test_adapters_are_loaded_on_the_admin_port_alone_and_with_its_credential_g8(pool_engine: World) -> None:
    body = put_body("0" * 64)
    for path in LOADING:
        for method in ("PUT", "POST"):
            answer = await pool_engine.data.request(method, path, json=body, headers=pool_engine.headers())
            assert answer.status_code == 404, (method, path)
    for token, expected in (
        ("data-2", (401, "invalid_api_key")),
        ("state-2", (403, "forbidden")),
        ("nothing", (401, "invalid_api_key")),
    ):
        headers = {"authorization": f"Bearer {token}"}
        for method, path in (
            ("PUT", "/adapters/acme/pirate/1"),
            ("DELETE", "/adapters/acme/pirate/1"),
            ("POST", "/adapters/acme/pirate/1/pin"),
        ):
            assert code(await pool_engine.admin.request(method, path, json=body, headers=headers)) == expected
    for path in LOADING[:3]:
        assert (await pool_engine.admin.post(path, json=body)).status_code == 404
    assert pool_engine.core.of(m.LoadAdapter) == []


async def test_the_previous_epoch_is_still_accepted(pool_engine: World) -> None:
    headers = pool_engine.headers() | {"authorization": "Bearer data-1"}
    response = await pool_engine.data.post("/v1/completions", json={"model": "x", "prompt": "x"}, headers=headers)
    assert response.status_code == 200


async def test_the_admin_port_tells_reading_from_changing(pool_engine: World) -> None:
    reader, nobody = {"authorization": "Bearer state-2"}, {"authorization": "Bearer data-2"}
    for path in ("/adapters", "/model"):
        assert (await pool_engine.admin.get(path, headers=reader)).status_code == 200
        assert (await pool_engine.admin.get(path, headers=nobody)).status_code == 401
    response = await pool_engine.admin.put("/adapters/a/b/1", json=put_body("0" * 64), headers=reader)
    assert code(response) == (403, "forbidden")


@pytest.mark.parametrize("missing", ["x-loraplane-adapter", "x-loraplane-base-digest", "x-loraplane-digest"])
async def test_a_request_without_its_reference_is_refused_and_never_the_base(pool_engine: World, missing: str) -> None:
    headers = pool_engine.headers("acme/support@3", "0" * 64)
    del headers[missing]
    response = await pool_engine.data.post("/v1/completions", json={"model": BASE, "prompt": "x"}, headers=headers)
    assert code(response) == (400, "missing_reference")
    assert pool_engine.core.of(m.Generate) == []


async def test_a_request_for_the_base_takes_its_tenants_turn(pool_engine: World) -> None:
    for tenant in ({"x-loraplane-tenant": "acme"}, {}):
        headers = pool_engine.headers() | tenant
        response = await pool_engine.data.post("/v1/completions", json={"model": "x", "prompt": "x"}, headers=headers)
        assert response.status_code == 200
    assert [generate.tenant for generate in pool_engine.core.of(m.Generate)] == ["acme", ""]


async def test_another_base_is_refused(pool_engine: World) -> None:
    headers = pool_engine.headers() | {"x-loraplane-base-digest": "0" * 64}
    response = await pool_engine.data.post("/v1/completions", json={"model": BASE, "prompt": "x"}, headers=headers)
    assert code(response) == (400, "base_model_mismatch")


@pytest.mark.parametrize(
    "reference", ["support", "acme/support", "acme/../x@1", "Acme/support@1", "acme/support@0", ""]
)
async def test_a_malformed_reference_is_refused(pool_engine: World, reference: str) -> None:
    response = await ask(pool_engine, Known(reference, "0" * 64))
    assert response.status_code == 400
    assert pool_engine.core.of(m.Generate) == []


async def test_a_reference_given_twice_is_refused(pool_engine: World) -> None:
    headers = [*pool_engine.headers().items(), ("x-loraplane-adapter", "acme/other@1")]
    response = await pool_engine.data.post("/v1/completions", json={"model": "x", "prompt": "x"}, headers=headers)
    assert response.status_code == 400


# -- loading for a request


async def test_a_cold_adapter_is_fetched_converted_and_loaded(pool: World, source: Source, known: Known) -> None:
    response = await ask(pool, known)
    assert response.status_code == 200
    assert response.headers["x-loraplane-residency"] == "cold"
    assert response.headers["x-loraplane-adapter-id"] == f"{known.ref}#{known.digest[:12]}"
    assert response.headers["x-loraplane-replica"] == "default/pool/0"
    generate = pool.core.of(m.Generate)[0]
    assert (generate.adapter, generate.tenant, generate.cold) == (m.AdapterKey(known.ref, known.digest), "acme", True)
    sent = source.headers[0]
    assert sent["authorization"] == "Bearer fetch-2"
    assert (sent["x-loraplane-pool"], sent["x-loraplane-epoch"]) == ("default/pool", "2")
    again = await ask(pool, known)
    assert again.headers["x-loraplane-residency"] == "hit"
    assert source.served["adapter_model.safetensors"] == 1


async def test_many_requests_for_one_cold_adapter_fetch_it_once(pool: World, source: Source, known: Known) -> None:
    source.gate.clear()
    asking = [asyncio.create_task(ask(pool, known)) for _ in range(8)]
    asking += [asyncio.create_task(ask(pool, Known(f"globex/{known.digest[:8]}@1", known.digest))) for _ in range(2)]
    await being_fetched(source)
    source.gate.set()
    assert {response.status_code for response in await asyncio.gather(*asking)} == {200}
    assert set(source.served.values()) == {1}
    assert len(pool.core.of(m.LoadAdapter)) == 2  # two ids of the same bytes


async def test_a_waiter_that_leaves_does_not_end_the_load(pool: World, source: Source, known: Known) -> None:
    async def disconnected() -> float:
        line = re.search(r'requests_total\{outcome="disconnected"\} (\S+)', (await pool.metrics.get("/metrics")).text)
        return float(line[1]) if line else 0.0

    before = await disconnected()
    source.gate.clear()
    leaving = asyncio.create_task(ask(pool, known))
    await being_fetched(source)
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    async with asyncio.timeout(5):
        while await disconnected() == before:  # noqa: ASYNC110 - the other side is asked each time
            await asyncio.sleep(0.01)
    source.gate.set()
    assert (await ask(pool, known)).status_code == 200
    assert set(source.served.values()) == {1}


async def test_a_wrong_digest_is_never_used(pool: World, source: Source, known: Known) -> None:
    source.corrupt = True
    response = await ask(pool, known)
    assert code(response) == (503, "artifact_unavailable")
    assert pool.core.of(m.LoadAdapter) == []
    assert pool.core.of(m.Generate) == []


async def test_more_bytes_than_announced_end_the_fetch(pool: World, known: Known) -> None:
    headers = pool.headers(known.ref, known.digest, size=100)
    response = await pool.data.post("/v1/completions", json={"model": "x", "prompt": "x"}, headers=headers)
    assert code(response) == (503, "artifact_unavailable")
    assert "100 bytes" in response.json()["error"]["message"]


@pytest.mark.parametrize("refusal", [(404, "not_found"), (403, "forbidden"), (500, "internal_error")])
async def test_the_listener_s_reason_is_told(
    pool: World, source: Source, known: Known, refusal: tuple[int, str]
) -> None:
    source.refusal = refusal
    response = await ask(pool, known)
    assert code(response) == (503, "artifact_unavailable")
    assert refusal[1] in response.json()["error"]["message"]
    assert int(response.headers["retry-after"]) >= 1


async def test_a_source_that_is_away_is_503_with_retry_after_and_not_hammered(
    pool: World, source: Source, known: Known
) -> None:
    source.refusal = (503, "unavailable")
    first = await ask(pool, known)
    count = source.served.total()
    second = await ask(pool, known)
    assert code(first) == code(second) == (503, "artifact_unavailable")
    assert source.served.total() == count
    source.refusal = None
    assert (await put(pool, known)).status_code == 200  # the operator's word is not held back
    assert (await ask(pool, known)).status_code == 200


async def test_an_artifact_that_conversion_refuses_tells_the_rule(pool: World, source: Source, tmp_path: Path) -> None:
    folder = tmp_path / "bad"
    digest = make_artifact(folder, scale=float("nan"))
    source.folders[digest] = folder
    response = await ask(pool, Known("acme/nan@1", digest))
    assert code(response) == (422, "not_finite")
    assert pool.core.of(m.LoadAdapter) == []


async def test_an_adapter_evicted_a_moment_ago_is_loaded_again(pool: World, known: Known) -> None:
    await ask(pool, known)
    pool.core.received.clear()
    failures = iter([True])

    def script(generate: m.Generate) -> list[m.FromCore]:
        if next(failures, False):
            return [m.RequestFailed(request=generate.request, status=503, code="artifact_unavailable", message="gone")]
        return answer(generate)

    pool.core.script = script
    response = await ask(pool, known)
    assert (response.status_code, response.headers["x-loraplane-residency"]) == (200, "cold")
    assert len(pool.core.of(m.LoadAdapter)) == 1


async def test_the_same_ref_with_another_digest_is_a_conflict(
    pool: World, source: Source, known: Known, tmp_path: Path
) -> None:
    await ask(pool, known)
    other = Known(known.ref, offer(source, tmp_path).digest)
    for response in (await ask(pool, other), await put(pool, other), await delete(pool, other)):
        assert code(response) == (409, "digest_conflict")
