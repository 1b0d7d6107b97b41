"""The operator's verbs on a managed engine: put, pin, delete, and what it tells about its model."""

import asyncio
from typing import Any

import pytest

from loraplane_engine import messages as m
from loraplane_engine.server import adapters
from tests.engine.server.artifacts import Source
from tests.engine.server.fake_core import replaced
from tests.engine.server.managed import Known, ask, being_fetched, code, delete, listed, put, put_body
from tests.engine.server.world import BASE, World

pytestmark = pytest.mark.asyncio(loop_scope="session")


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
    assert residence["bytes"] == 65536 and residence["rank"] == 4  # what it would take: the next plan can know
    pool.core.reset()
    assert (await put(pool, known)).json()["message"] == ""
    assert (await listed(pool))[known.ref]["message"] == ""


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


async def test_a_tombstone_ends_so_that_a_version_which_came_back_is_served_by_replicas_that_are_not_its_home(
    pool: World, known: Known, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapters, "TOMBSTONE_SECONDS", 1.0)
    await put(pool, known)
    await delete(pool, known, drain_s=1)
    assert code(await ask(pool, known)) == (410, "adapter_withdrawn")
    async with asyncio.timeout(10):
        while (answer := await ask(pool, known)).status_code == 410:
            continue
    assert answer.status_code == 200
    assert known.ref in await listed(pool)


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


async def test_a_deletion_while_a_put_waits_for_its_marks_ends_the_put(
    pool: World, source: Source, known: Known
) -> None:
    """It would fetch, load and lose it again and again until its deadline."""
    pool.core.mark_answer = lambda mark: []
    putting = asyncio.create_task(put(pool, known, pinned=True, deadline_s=3))
    await pool.core.wait_for(lambda: bool(pool.core.of(m.MarkAdapter)))
    assert (await delete(pool, known, drain_s=1)).status_code == 200
    assert code(await putting) == (410, "adapter_withdrawn")
    assert len(pool.core.of(m.LoadAdapter)) == 1
    assert set(source.served.values()) == {1}
    assert known.ref not in await listed(pool)


async def test_a_request_cut_off_by_an_unload_is_told_so(pool: World, known: Known) -> None:
    await put(pool, known)
    pool.core.script = lambda generate: [m.Output(request=generate.request, tokens=[], finish="abort")]
    assert code(await ask(pool, known)) == (410, "adapter_withdrawn")


async def test_a_pin_that_does_not_fit_is_refused_and_the_adapter_is_warm_all_the_same(
    pool: World, known: Known
) -> None:
    def refusing(mark: m.MarkAdapter) -> list[m.FromCore]:
        state = replaced(pool.core.adapters[mark.key], in_use=1)
        if not mark.pinned:
            return [state]
        words: list[m.FromCore] = [state]  # a request that came meanwhile; the answer to the mark is still to come
        return [*words, m.AdapterFailed(key=mark.key, code="insufficient_memory", message="needs 3; 2 are free"), state]

    pool.core.mark_answer = refusing
    response = await put(pool, known, pinned=True)
    assert code(response) == (503, "insufficient_memory")
    assert response.json()["error"]["message"] == "needs 3; 2 are free"
    residence = (await listed(pool))[known.ref]
    assert (residence["residency"], residence["warm_wanted"], residence["pinned"]) == ("host", True, False)
    assert residence["message"] == "needs 3; 2 are free"
    headers = {"x-loraplane-digest": known.digest}
    again = await pool.admin.post(f"{known.path}/pin", json={"pinned": True}, headers=headers)
    assert code(again) == (503, "insufficient_memory")
    assert (await ask(pool, known)).status_code == 200
    assert (await put(pool, known)).json()["message"] == ""


async def test_a_put_whose_adapter_is_evicted_before_it_is_marked_loads_it_again(pool: World, known: Known) -> None:
    await ask(pool, known)
    marks: list[m.MarkAdapter] = []

    def gone_at_first(mark: m.MarkAdapter) -> list[m.FromCore]:
        marks.append(mark)
        if len(marks) == 1:
            return [replaced(pool.core.adapters[mark.key], residency="absent", pinned=False, warm_wanted=False)]
        pool.core.adapters[mark.key] = replaced(pool.core.adapters[mark.key], pinned=True, warm_wanted=True)
        return [pool.core.adapters[mark.key]]

    pool.core.mark_answer = gone_at_first
    residence = (await put(pool, known, pinned=True)).json()
    assert (residence["residency"], residence["pinned"], residence["warm_wanted"]) == ("host", True, True)
    assert len(pool.core.of(m.LoadAdapter)) == 2


async def test_a_put_that_joins_a_requests_load_makes_it_a_wish(pool: World, known: Known) -> None:
    pool.core.load_answer = lambda load: None  # it waits for room
    asking = asyncio.create_task(ask(pool, known))
    await pool.core.wait_for(lambda: bool(pool.core.of(m.LoadAdapter)))
    load = pool.core.of(m.LoadAdapter)[0]
    assert not load.warm_wanted and load.wait_s > 0
    pool.core.mark_answer = lambda mark: []
    putting = asyncio.create_task(put(pool, known))
    await pool.core.wait_for(lambda: bool(pool.core.of(m.MarkAdapter)))
    assert pool.core.of(m.MarkAdapter) == [m.MarkAdapter(key=load.key, warm_wanted=True)]
    state = m.AdapterState(key=load.key, residency="host", bytes=1, rank=4, pinned=False, warm_wanted=True, in_use=0)
    pool.core.adapters[load.key] = state
    pool.core.say(state)
    assert (await putting).json()["warm_wanted"] is True
    assert (await asking).status_code == 200


async def test_deleting_what_waits_for_room_tells_the_core(pool: World, known: Known) -> None:
    pool.core.load_answer = lambda load: None
    pool.core.unload_at_once = False
    putting = asyncio.create_task(put(pool, known))
    await pool.core.wait_for(lambda: bool(pool.core.of(m.LoadAdapter)))
    assert (await delete(pool, known)).json()["residency"] == "absent"
    assert code(await putting) == (410, "adapter_withdrawn")
    await pool.core.wait_for(lambda: bool(pool.core.of(m.UnloadAdapter)))


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
