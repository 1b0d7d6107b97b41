"""Activation that waits for warmth: who ends it, and what is left when nobody does."""

import asyncio
from typing import Any

import httpx
import psycopg
import pytest

from loraplane_core.wire.registry import Adapter
from loraplane_gateway.registry.main import tidy
from loraplane_gateway.registry.state import RegistryState
from tests.gateway.artifacts import write_adapter
from tests.gateway.postgres import Database
from tests.gateway.registry.conftest import Api
from tests.gateway.registry.test_claims import claim

URL = "/admin/tenants/acme/adapters/pirate"
WARM = "/operator/warm/acme/pirate"
SECONDS = 10


@pytest.fixture
async def two(api: Api, ingesting: None, state: RegistryState) -> Api:
    """Versions 1 and 2, the second active."""
    await api.tenant("acme", "team")
    await api.pool()
    for number in (1, 2):
        write_adapter(state.settings.adapter_root / f"v{number}", seed=number)
        await api.register("acme", "pirate", f"v{number}")
    return api


def _order(api: Api, what: str = "activate", *, deadline: float = SECONDS, **body: Any) -> asyncio.Task[httpx.Response]:
    order = {"wait": "warm", "deadline_s": deadline, **body}
    return asyncio.create_task(api.call("POST", f"{URL}/{what}", order, timeout=SECONDS + 5))


async def _intended(api: Api, version: int) -> Adapter:
    return await api.until("acme", "pirate", lambda found: found.intent_version == version)


async def _warm(api: Api, version: int, digest: str | None = None) -> dict[str, Any]:
    known = {each.version: each.digest for each in (await api.adapter("acme", "pirate")).versions}
    word = {"version": version, "digest": digest or known[version]}
    found: dict[str, Any] = await api.as_operator("POST", WARM, word)
    return found


def _code(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


async def test_the_flip_comes_with_the_operators_word_and_for_exactly_that_version(
    two: Api, database: Database
) -> None:
    waiting = _order(two, version=1)
    assert (await _intended(two, 1)).active_version == 2
    assert (await _warm(two, 2))["active_version"] == 2
    assert (await _warm(two, 1, digest="f" * 64))["active_version"] == 2
    assert not waiting.done()
    flipped = await _warm(two, 1)
    assert (flipped["active_version"], flipped.get("intent_version", 0)) == (1, 0)
    answer = await waiting
    assert (answer.status_code, answer.json()["active_version"]) == (200, 1)
    assert (await _warm(two, 2))["active_version"] == 1  # a late word about nothing
    with psycopg.connect(database.owner_url) as owner:
        rows = owner.execute("SELECT actor, action, version, from_version FROM audit_log WHERE version = 1").fetchall()
    assert rows[-2:] == [("platform", "adapter.intend", 1, 2), ("platform", "adapter.activate", 1, 2)]


async def test_a_rollback_waits_too(two: Api) -> None:
    waiting = _order(two, "rollback")
    await _intended(two, 1)
    await _warm(two, 1)
    found = (await waiting).json()
    assert (found["active_version"], found["previous_version"]) == (1, 2)


async def test_at_the_deadline_the_old_version_keeps_serving_and_nothing_is_left(two: Api) -> None:
    answer = await _order(two, version=1, deadline=0.3)
    assert _code(answer) == (504, "not_warm")
    assert "version 2 keeps serving" in answer.json()["error"]["message"]
    found = await two.adapter("acme", "pirate")
    assert (found.active_version, found.intent_version) == (2, 0)
    assert (await _warm(two, 1))["active_version"] == 2


@pytest.mark.parametrize(
    ("path", "body", "active"),
    [
        ("activate", {"version": 1}, 1),
        ("activate", {"version": 2}, 2),  # changes nothing, and yet is the later word
        ("traffic", {"shares": [{"version": 1, "weight": 30}, {"version": 2, "weight": 70}]}, 2),
    ],
)
async def test_a_later_order_replaces_the_one_that_waits(
    two: Api, path: str, body: dict[str, Any], active: int
) -> None:
    waiting = _order(two, version=1)
    await _intended(two, 1)
    await two.ok("POST", f"{URL}/{path}", body)
    assert _code(await waiting) == (409, "superseded")
    found = await two.adapter("acme", "pirate")
    assert (found.active_version, found.intent_version) == (active, 0)


async def test_of_two_that_wait_the_second_stands(two: Api, state: RegistryState) -> None:
    write_adapter(state.settings.adapter_root / "v3", seed=3)
    await two.register("acme", "pirate", "v3", activate=False)
    first = _order(two, version=1)
    await _intended(two, 1)
    second = _order(two, version=3)
    await _intended(two, 3)
    assert _code(await first) == (409, "superseded")
    await _warm(two, 1)
    await _warm(two, 3)
    assert (await second).json()["active_version"] == 3


async def test_a_deleted_version_or_another_owner_ends_the_wait(two: Api) -> None:
    waiting = _order(two, version=1)
    await _intended(two, 1)
    await two.ok("DELETE", f"{URL}/versions/1")
    assert _code(await waiting) == (409, "superseded")
    await two.ok("POST", f"{URL}/activate", {"version": 0})
    await two.as_operator("PUT", "/operator/claims/u", claim())
    waiting = _order(two, version=2)
    await _intended(two, 2)
    await two.as_operator("PUT", "/operator/claims/u", claim(owns_activation=True))
    assert _code(await waiting) == (409, "superseded")


@pytest.mark.parametrize("first", [True, False], ids=["its first claim", "a later one"])
async def test_an_object_that_takes_activation_ends_what_waited_and_a_late_word_flips_nothing(
    two: Api, first: bool
) -> None:
    if not first:
        await two.as_operator("PUT", "/operator/claims/u", claim())
    waiting = _order(two, version=1)
    await _intended(two, 1)
    await two.as_operator("PUT", "/operator/claims/u", claim(owns_activation=True))
    assert _code(await waiting) == (409, "superseded")
    flipped = await _warm(two, 1)
    assert (flipped["active_version"], flipped.get("intent_version", 0)) == (2, 0)


async def test_the_order_of_an_object_ends_when_it_lets_go_of_activation(two: Api) -> None:
    await two.as_operator("PUT", "/operator/claims/u", claim(owns_activation=True))
    order = {"wait": "warm", "deadline_s": SECONDS, "version": 1}
    waiting = asyncio.create_task(
        two.call("POST", "/operator/claims/u/activate", order, token=two.operator_token, timeout=SECONDS + 5)
    )
    await _intended(two, 1)
    await two.as_operator("PUT", "/operator/claims/u", claim())
    assert _code(await waiting) == (409, "superseded")
    assert (await _warm(two, 1))["active_version"] == 2


async def test_where_nothing_is_to_be_warm_nobody_waits(two: Api) -> None:
    assert (await _order(two, version=2)).status_code == 200  # is active already
    await two.as_operator("PUT", "/operator/claims/u", claim(warm_replicas=0))
    assert (await _order(two, version=1)).json()["active_version"] == 1
    assert (await _order(two, version=0)).json().get("active_version", 0) == 0


async def test_orders_that_cannot_wait_are_refused(two: Api) -> None:
    for deadline in (0, -1, 301, 1e9):
        assert _code(await _order(two, version=1, deadline=deadline)) == (400, "invalid_parameter")
    assert _code(await _order(two, version=1, expect_active=1)) == (409, "active_changed")
    assert _code(await _order(two, version=9)) == (404, "not_found")
    assert (await two.adapter("acme", "pirate")).intent_version == 0
    await two.refused(404, "not_found", "POST", "/operator/warm/acme/none", {"version": 1, "digest": ""},
                      token=two.operator_token)  # fmt: skip
    await two.refused(403, "forbidden", "POST", WARM, {"version": 1, "digest": ""})


async def test_an_intent_whose_registry_died_ends_by_its_own_deadline(
    two: Api, state: RegistryState, database: Database
) -> None:
    waiting = _order(two, version=1)
    await _intended(two, 1)
    waiting.cancel()  # the process that waited is gone
    await asyncio.gather(waiting, return_exceptions=True)
    assert (await two.adapter("acme", "pirate")).intent_version == 1  # its order stands
    with psycopg.connect(database.owner_url) as owner:
        owner.execute("UPDATE adapters SET intent_deadline = now() - interval '1 second'")
    assert (await two.adapter("acme", "pirate")).intent_version == 0
    assert (await _warm(two, 1))["active_version"] == 2
    with psycopg.connect(database.owner_url) as owner:
        owner.execute("UPDATE adapters SET intent_deadline = now() - interval '1 minute'")
    await tidy(state)
    with psycopg.connect(database.owner_url) as owner:
        assert owner.execute("SELECT intent_id, intent_deadline FROM adapters").fetchall() == [(None, None)]


async def test_a_registry_that_stops_lets_its_waiters_go_and_the_order_stands(two: Api, state: RegistryState) -> None:
    waiting = _order(two, version=1)
    await _intended(two, 1)
    state.hub.close()
    assert _code(await waiting) == (503, "unavailable")
    assert (await _warm(two, 1))["active_version"] == 1


async def test_what_the_operator_has_no_place_for_is_refused_at_once_with_its_arithmetic(two: Api) -> None:
    words = "needs 34 MiB on each of 2 replicas; pool has 12 MiB free"
    waiting = _order(two, version=1)
    await _intended(two, 1)
    await two.as_operator("POST", WARM, {"version": 2, "digest": "", "refusal": words})  # about another version
    assert (await two.adapter("acme", "pirate")).intent_version == 1
    told = await two.as_operator("POST", WARM, {"version": 1, "digest": "", "refusal": words})
    assert (told["active_version"], told.get("intent_version", 0)) == (2, 0)
    answer = await waiting
    assert _code(answer) == (409, "not_activatable")
    assert words in answer.json()["error"]["message"]
    assert "version 2 keeps serving" in answer.json()["error"]["message"]
    again = _order(two, version=1)  # a later order is not refused by what was said about an earlier one
    await _intended(two, 1)
    await _warm(two, 1)
    assert (await again).status_code == 200
