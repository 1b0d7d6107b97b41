"""Shares of several versions: all in one transaction, who may set them, and what a rollback then means."""

import asyncio
from typing import Any

import psycopg
import pytest

from loraplane_core.wire.registry import Adapter
from loraplane_gateway.registry.state import RegistryState
from tests.gateway.artifacts import write_adapter
from tests.gateway.postgres import Database
from tests.gateway.registry.conftest import Api
from tests.gateway.registry.test_claims import claim

URL = "/admin/tenants/acme/adapters/pirate"
CLAIM = "/operator/claims/u"


@pytest.fixture
async def four(api: Api, ingesting: None, state: RegistryState) -> Api:
    """Versions 1 to 4; the third is active, the fourth was never."""
    await api.tenant("acme", "team")
    await api.pool()
    for number in (1, 2, 3, 4):
        write_adapter(state.settings.adapter_root / f"v{number}", seed=number)
        await api.register("acme", "pirate", f"v{number}", activate=number < 4)
    return api


def shares(weights: dict[int, int], **more: Any) -> dict[str, Any]:
    return {"shares": [{"version": version, "weight": weight} for version, weight in weights.items()], **more}


def weights(adapter: Adapter) -> dict[int, int]:
    return {version.version: version.weight for version in adapter.versions if version.weight}


async def _set(api: Api, wanted: dict[int, int], **more: Any) -> Adapter:
    await api.ok("POST", f"{URL}/traffic", shares(wanted, **more))
    return await api.adapter("acme", "pirate")


def _rows(database: Database, statement: str) -> list[Any]:
    with psycopg.connect(database.owner_url) as owner:
        return owner.execute(statement).fetchall()


async def test_all_shares_are_set_at_once_with_one_change_and_an_audit_row(four: Api, database: Database) -> None:
    before = _rows(database, "SELECT count(*) FROM changes")[0][0]
    found = await _set(four, {4: 10, 3: 90})
    assert (weights(found), found.active_version) == ({3: 90, 4: 10}, 3)
    assert _rows(database, "SELECT count(*) FROM changes")[0][0] == before + 1
    found = await _set(four, {4: 50, 1: 50})  # the third is not named and gets none
    assert (weights(found), found.active_version) == ({1: 50, 4: 50}, 1)  # of equals the oldest
    audit = "SELECT actor, version, from_version, detail FROM audit_log WHERE action = 'adapter.traffic' ORDER BY id"
    assert _rows(database, audit) == [("platform", 3, 3, "3=90,4=10"), ("platform", 1, 3, "1=50,4=50")]
    await _set(four, {1: 50, 4: 50})
    assert _rows(database, "SELECT count(*) FROM changes")[0][0] == before + 2


@pytest.mark.parametrize(
    ("wanted", "status", "code"),
    [
        ({}, 400, "invalid_weights"),
        ({3: 99}, 400, "invalid_weights"),
        ({3: 60, 4: 60}, 400, "invalid_weights"),
        ({3: 100, 4: 0}, 400, "invalid_weights"),
        ({3: -10, 4: 110}, 400, "invalid_weights"),
        ({3: 50, 9: 50}, 404, "not_found"),
    ],
)
async def test_shares_that_cannot_be_are_refused(four: Api, wanted: dict[int, int], status: int, code: str) -> None:
    await four.refused(status, code, "POST", f"{URL}/traffic", shares(wanted))
    assert weights(await four.adapter("acme", "pirate")) == {3: 100}


async def test_a_version_that_is_not_validated_or_named_twice_gets_no_share(four: Api, database: Database) -> None:
    with psycopg.connect(database.owner_url) as owner:
        owner.execute("UPDATE tenant_adapters SET state = 'rejected' WHERE version = 4")
    await four.refused(409, "not_activatable", "POST", f"{URL}/traffic", shares({3: 50, 4: 50}))
    twice = {"shares": [{"version": 3, "weight": 50}, {"version": 3, "weight": 50}]}
    await four.refused(400, "invalid_parameter", "POST", f"{URL}/traffic", twice)


async def test_shares_are_compared_before_they_are_set(four: Api) -> None:
    expect = shares({3: 100})["shares"]
    answers = await asyncio.gather(
        *(four.call("POST", f"{URL}/traffic", shares({3: 100 - n, 4: n}, expect=expect)) for n in (10, 20, 30))
    )
    assert sorted(answer.status_code for answer in answers) == [200, 409, 409]
    assert {a.json()["error"]["code"] for a in answers if a.status_code == 409} == {"traffic_changed"}
    await four.refused(409, "traffic_changed", "POST", f"{URL}/traffic", shares({3: 100}, expect=[]))


async def test_who_owns_activation_alone_sets_shares(four: Api) -> None:
    await four.as_operator("PUT", CLAIM, claim())
    operator = {"token": four.operator_token}
    await four.refused(409, "activation_not_owned", "POST", f"{CLAIM}/traffic", shares({4: 100}), **operator)
    await four.refused(409, "activation_not_owned", "POST", f"{CLAIM}/activate", {"version": 4}, **operator)
    await four.as_operator("PUT", CLAIM, claim(owns_activation=True))
    await four.refused(409, "activation_owned", "POST", f"{URL}/traffic", shares({4: 100}))
    await four.as_operator("POST", f"{CLAIM}/traffic", shares({3: 75, 4: 25}))
    assert weights(await four.adapter("acme", "pirate")) == {3: 75, 4: 25}
    await four.as_operator("PUT", CLAIM, claim())
    await four.as_operator("POST", f"{CLAIM}/activate", {"version": 0})  # any object may stop what it claims
    assert weights(await four.adapter("acme", "pirate")) == {}


async def _rolled_back(api: Api) -> tuple[dict[int, int], int]:
    await api.ok("POST", f"{URL}/rollback", {})
    found = await api.adapter("acme", "pirate")
    return weights(found), found.previous_version


async def test_a_rollback_ends_a_split_where_it_began(four: Api) -> None:
    assert (await _set(four, {3: 90, 4: 10})).previous_version == 3
    assert (await _set(four, {3: 10, 4: 90})).previous_version == 3
    assert await _rolled_back(four) == ({3: 100}, 2)
    assert await _rolled_back(four) == ({2: 100}, 3)


async def test_a_rollback_after_a_split_was_decided_goes_to_what_served_alone_before(four: Api) -> None:
    await _set(four, {3: 50, 4: 50})
    assert (await _set(four, {4: 100})).previous_version == 3
    assert await _rolled_back(four) == ({3: 100}, 4)
    await _set(four, {3: 50, 4: 50})
    assert (await _set(four, {3: 100})).previous_version == 4  # aborted: as if nothing had been


async def test_a_rollback_serves_again_what_was_stopped(four: Api) -> None:
    await four.ok("POST", f"{URL}/activate", {"version": 0})
    assert (await four.adapter("acme", "pirate")).previous_version == 3
    assert await _rolled_back(four) == ({3: 100}, 2)


async def test_a_late_ingestion_does_not_end_a_split_with_a_newer_version(four: Api, state: RegistryState) -> None:
    from loraplane_gateway.db.sessions import Scope, transaction
    from loraplane_gateway.registry.activation.service import ActivationService
    from loraplane_gateway.registry.adapters.repository import AdapterRepository

    await _set(four, {1: 90, 4: 10})
    scope = Scope("acme")
    async with transaction(state.sessions, scope) as session:
        locked = await AdapterRepository(session, scope).lock("pirate")
        assert locked is not None
        await ActivationService(session, scope, "test").activate_ingested(locked, {1: 90, 4: 10}, 3, numbered=3)
    assert weights(await four.adapter("acme", "pirate")) == {1: 90, 4: 10}


async def test_a_version_tells_how_many_parameters_it_has(four: Api) -> None:
    found = await four.adapter("acme", "pirate")
    # q_proj of both layers: A of 4 x 16 and B of 16 x 4
    assert {version.parameters for version in found.versions} == {2 * (4 * 16 + 16 * 4)}
