"""A managed engine: credentials, trusted references, fetching by digest, the admin port."""

import asyncio
import itertools
import re
import shutil
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from loraplane_core.errors import Unavailable
from loraplane_engine import messages as m
from loraplane_engine.server import images
from loraplane_engine.server.images import ImageStore
from tests.engine.server.artifacts import Source, artifact_source, make_artifact
from tests.engine.server.fake_core import LAYOUT, answer
from tests.engine.server.world import BASE, World, managed, running, until

pytestmark = pytest.mark.asyncio(loop_scope="session")


@dataclass(frozen=True)
class Known:
    """An adapter the source has, different in every test, so that tests can share one engine."""

    ref: str
    digest: str

    @property
    def path(self) -> str:
        return "/adapters/" + self.ref.replace("@", "/")


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def _source() -> AsyncIterator[Source]:
    async with artifact_source() as found:
        yield found


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def _pool(model: Path, _source: Source, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    folder = tmp_path_factory.mktemp("fetching")
    async with running(managed(model, folder, _source.url), folder) as world:
        yield world


@pytest_asyncio.fixture(loop_scope="session")
async def source(_source: Source) -> Source:
    _source.reset()
    return _source


@pytest_asyncio.fixture(loop_scope="session")
async def pool(_pool: World, source: Source) -> World:
    _pool.core.reset()
    return _pool


_seeds = itertools.count()


@pytest.fixture
def known(tmp_path: Path, source: Source) -> Known:
    return offer(source, tmp_path)


def offer(source: Source, tmp_path: Path) -> Known:
    seed = next(_seeds)
    folder = tmp_path / f"artifact{seed}"
    digest = make_artifact(folder, seed)
    source.folders[digest] = folder
    return Known(f"acme/a{seed}@3", digest)


async def ask(world: World, known: Known, **body: Any) -> httpx.Response:
    request = {"model": "support", "prompt": "hi"} | body
    return await world.data.post("/v1/completions", json=request, headers=world.headers(known.ref, known.digest))


def put_body(digest: str, **changes: Any) -> dict[str, Any]:
    return {"digest": digest, "bytes": 1 << 20, "rank": 4, "deadline_s": 10} | changes


async def put(world: World, known: Known, **changes: Any) -> httpx.Response:
    return await world.admin.put(known.path, json=put_body(known.digest, **changes))


async def delete(world: World, known: Known, **query: Any) -> httpx.Response:
    return await world.admin.delete(known.path, params=query, headers={"x-loraplane-digest": known.digest})


async def listed(world: World) -> dict[str, dict[str, Any]]:
    return {each["ref"]: each for each in (await world.admin.get("/adapters")).json()["adapters"]}


async def being_fetched(source: Source) -> None:
    await until(lambda: bool(source.served))


def code(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["code"]


# -- who may ask, and for what


@pytest.mark.parametrize("token", [None, "data-3", "state-2", "admin-2", "data-2x"])
async def test_the_data_port_wants_its_own_credential(pool_engine: World, token: str | None) -> None:
    headers = pool_engine.headers() | {"authorization": f"Bearer {token}"}
    if token is None:
        del headers["authorization"]
    response = await pool_engine.data.post("/v1/completions", json={"model": "x", "prompt": "x"}, headers=headers)
    assert code(response) == (401, "invalid_api_key")
    assert (await pool_engine.data.get("/v1/models", headers=headers)).status_code == 401


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


# -- the operator's verbs


async def test_put_is_idempotent_and_answers_when_warm(pool: World, source: Source, known: Known) -> None:
    for _ in range(2):
        residence = (await put(pool, known, pinned=True)).json()
        assert (residence["residency"], residence["warm_wanted"], residence["pinned"]) == ("host", True, True)
        assert residence["rank"] == 4
    assert len(pool.core.of(m.LoadAdapter)) == 1
    assert set(source.served.values()) == {1}


async def test_put_marks_what_a_request_had_loaded(pool: World, known: Known) -> None:
    await ask(pool, known)
    assert (await listed(pool))[known.ref]["warm_wanted"] is False
    assert (await put(pool, known)).json()["warm_wanted"] is True


async def test_put_past_its_deadline_is_not_warm_and_the_load_goes_on(
    pool: World, source: Source, known: Known
) -> None:
    source.gate.clear()
    assert code(await put(pool, known, deadline_s=0.1)) == (504, "not_warm")
    assert (await listed(pool))[known.ref]["residency"] == "loading"
    source.gate.set()
    assert (await put(pool, known)).status_code == 200
    assert set(source.served.values()) == {1}


async def test_put_tells_why_the_core_refuses(pool: World, known: Known) -> None:
    pool.core.load_answer = lambda load: m.AdapterFailed(key=load.key, code="insufficient_memory", message="3 > 2")
    response = await put(pool, known)
    assert code(response) == (503, "insufficient_memory")
    residence = (await listed(pool))[known.ref]
    assert (residence["residency"], residence["message"]) == ("disk", "3 > 2")


@pytest.mark.parametrize(
    ("path", "changes"),
    [
        ("Acme/support/3", {}),
        ("acme/support/0", {}),
        ("acme/support/x", {}),
        ("acme/support/3", {"digest": "zz"}),
        ("acme/support/3", {"deadline_s": 0}),
        ("acme/support/3", {"bytes": -1}),
        ("acme/support/3", {"rank": "four"}),
        ("acme/..%2f..%2fetc/3", {}),
    ],
)
async def test_a_bad_put_is_400(pool_engine: World, path: str, changes: dict[str, Any]) -> None:
    response = await pool_engine.admin.put(f"/adapters/{path}", json=put_body("0" * 64) | changes)
    assert response.status_code in (400, 404)
    assert pool_engine.core.of(m.LoadAdapter) == []


async def test_deleting_one_of_two_adapters_with_the_same_bytes_leaves_the_other(pool: World, known: Known) -> None:
    twin = Known(known.ref.replace("acme/", "globex/"), known.digest)
    for each in (known, twin):
        assert (await put(pool, each)).status_code == 200
    assert (await delete(pool, twin, drain_s=1)).json()["residency"] == "absent"  # not `disk`, for the shared image
    assert twin.ref not in await listed(pool)
    assert (await listed(pool))[known.ref]["residency"] in ("host", "device")


async def test_a_deleted_adapter_leaves_a_tombstone_that_put_clears(pool: World, source: Source, known: Known) -> None:
    await put(pool, known)
    residence = (await delete(pool, known, drain_s=1)).json()
    assert residence["residency"] == "absent"
    assert len(pool.core.of(m.UnloadAdapter)) == 1
    assert code(await ask(pool, known)) == (410, "adapter_withdrawn")
    assert known.ref not in await listed(pool)
    assert (await delete(pool, known)).status_code == 200  # again: nothing to do
    assert (await put(pool, known)).status_code == 200
    assert (await ask(pool, known)).status_code == 200
    assert source.served["adapter_model.safetensors"] == 2  # its bytes had left the disk too


async def test_deleting_during_a_load_withdraws_it(pool: World, source: Source, known: Known) -> None:
    source.gate.clear()
    asking = asyncio.create_task(ask(pool, known))
    await being_fetched(source)
    assert (await delete(pool, known, drain_s=1)).status_code == 200
    assert code(await asking) == (410, "adapter_withdrawn")
    assert pool.core.of(m.LoadAdapter) == []


async def test_a_put_during_a_deletion_waits_for_it_and_loads_anew(pool: World, known: Known) -> None:
    await put(pool, known)
    pool.core.unload_at_once = False
    deleting = asyncio.create_task(delete(pool, known, drain_s=5))
    await pool.core.wait_for(lambda: bool(pool.core.of(m.UnloadAdapter)))
    putting = asyncio.create_task(put(pool, known))
    assert code(await ask(pool, known)) == (410, "adapter_withdrawn")
    assert code(await put(pool, known, deadline_s=0.05)) == (504, "not_warm")
    pool.core.unload(m.AdapterKey(known.ref, known.digest))
    assert (await deleting).json()["residency"] == "absent"
    assert (await putting).json()["residency"] == "host"
    assert len(pool.core.of(m.LoadAdapter)) == 2


async def test_a_request_cut_off_by_an_unload_is_told_so(pool: World, known: Known) -> None:
    await put(pool, known)
    pool.core.script = lambda generate: [m.Output(request=generate.request, tokens=[], finish="abort")]
    assert code(await ask(pool, known)) == (410, "adapter_withdrawn")


async def test_pin_changes_the_marks(pool: World, known: Known) -> None:
    headers = {"x-loraplane-digest": known.digest}
    missing = await pool.admin.post(f"{known.path}/pin", json={"pinned": True}, headers=headers)
    assert code(missing) == (404, "not_found")
    await put(pool, known)
    pinned = await pool.admin.post(f"{known.path}/pin", json={"pinned": True}, headers=headers)
    assert (pinned.json()["pinned"], pinned.json()["warm_wanted"]) == (True, True)
    cached = await pool.admin.post(f"{known.path}/pin", json={"pinned": False, "warm": False}, headers=headers)
    assert (cached.json()["pinned"], cached.json()["warm_wanted"]) == (False, False)


async def test_model_tells_the_registry_what_preflight_needs(pool_engine: World) -> None:
    info = (await pool_engine.admin.get("/model")).json()
    assert info["base"] == BASE
    assert info["base_digest"] == pool_engine.base_digest
    assert info["config"]["hidden_size"] == 64
    assert (info["dtype"], info["max_model_len"], info["max_rank"]) == ("float32", 512, 256)


# -- the disk tier


async def test_a_restart_finds_its_images_again(model: Path, tmp_path: Path, source: Source, known: Known) -> None:
    settings = managed(model, tmp_path, source.url)
    async with running(settings, tmp_path) as world:
        await put(world, known)
    image = next((tmp_path / "cache" / "images").rglob("*.image"))
    async with running(settings, tmp_path) as world:
        assert (await ask(world, known)).status_code == 200
        assert source.served["adapter_model.safetensors"] == 1
    image.write_bytes(image.read_bytes()[:-1])
    async with running(settings, tmp_path) as world:
        assert (await ask(world, known)).status_code == 200
        assert source.served["adapter_model.safetensors"] == 2


async def test_an_image_whose_data_are_damaged_is_made_again(
    model: Path, tmp_path: Path, source: Source, known: Known
) -> None:
    settings = managed(model, tmp_path, source.url)
    async with running(settings, tmp_path) as world:
        await put(world, known)
    image = next((tmp_path / "cache" / "images").rglob("*.image"))
    whole = image.read_bytes()
    image.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))  # only who reads the data can see it
    async with running(settings, tmp_path) as world:
        load = world.core.load_answer

        def reading(message: m.LoadAdapter) -> m.AdapterState | m.AdapterFailed | None:
            if Path(message.image).read_bytes() != whole:
                return m.AdapterFailed(key=message.key, code="image_broken", message="checksum")
            return load(message)

        world.core.load_answer = reading
        assert (await ask(world, known)).status_code == 200
    assert image.read_bytes() == whole
    assert source.served["adapter_model.safetensors"] == 2


async def test_a_cache_folder_emptied_or_littered_is_no_obstacle(
    model: Path, tmp_path: Path, source: Source, known: Known
) -> None:
    settings = managed(model, tmp_path, source.url)
    async with running(settings, tmp_path) as world:
        await put(world, known)
        folder = next((tmp_path / "cache" / "images").iterdir())
        shutil.rmtree(tmp_path / "cache")
        assert (await put(world, offer(source, tmp_path))).status_code == 200
    (folder / "odd").mkdir()
    (folder / "nowhere.image").symlink_to(tmp_path / "nothing")
    async with running(settings, tmp_path):
        assert [path.name for path in folder.iterdir() if path.suffix != ".image" or path.is_symlink()] == []


async def test_a_cache_folder_has_one_engine_and_the_next_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def store() -> ImageStore:
        return ImageStore(tmp_path, LAYOUT, limit=1 << 20, fetcher=None, in_use=lambda _: False)

    first, second, third = store(), store(), store()
    await first.open()
    waiting = asyncio.create_task(second.open())
    await asyncio.sleep(0)
    with monkeypatch.context() as patch:
        patch.setattr(images, "OWNER_SECONDS", 0.0)
        with pytest.raises(Unavailable, match="in use by another engine"):
            await third.open()
    await third.close()
    assert (tmp_path / "staging").is_dir()  # the owner's
    await first.close()
    async with asyncio.timeout(5):
        await waiting
    await second.close()


async def test_a_cache_folder_that_cannot_be_written_is_refused_with_its_reason(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    store = ImageStore(tmp_path / "file", LAYOUT, limit=1 << 20, fetcher=None, in_use=lambda _: False)
    with pytest.raises(Unavailable, match="cannot be used"):
        await store.open()


async def test_the_disk_tier_is_bounded_and_forgets_the_least_recently_used(
    model: Path, tmp_path: Path, source: Source
) -> None:
    first, second = offer(source, tmp_path), offer(source, tmp_path)
    settings = managed(model, tmp_path, source.url, "--disk-cache", "100Ki")  # one image has 64 KiB and a head
    async with running(settings, tmp_path) as world:
        await put(world, first)
        await put(world, second)
        kept = [file.name for file in (tmp_path / "cache" / "images").rglob("*.image")]
    assert kept == [f"{second.digest}.image"]


async def test_staging_is_empty_after_a_failure(pool: World, source: Source, known: Known) -> None:
    source.corrupt = True
    await ask(pool, known)
    assert pool.settings.cache_dir is not None
    assert list((pool.settings.cache_dir / "staging").iterdir()) == []
