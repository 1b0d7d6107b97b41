"""The flip: compare-and-set, rollback and back again, and what may never be served."""

import asyncio

import psycopg
import pytest

from loraplane_gateway.registry.state import RegistryState
from tests.gateway.artifacts import write_adapter
from tests.gateway.postgres import Database
from tests.gateway.registry.conftest import Api

URL = "/admin/tenants/acme/adapters/pirate"


@pytest.fixture
async def three(api: Api, ingesting: None, state: RegistryState) -> Api:
    """Versions 1 to 3, the third active."""
    await api.tenant("acme")
    await api.pool()
    for number in (1, 2, 3):
        write_adapter(state.settings.adapter_root / f"v{number}", seed=number)
        await api.register("acme", "pirate", f"v{number}")
    return api


async def _active(api: Api) -> tuple[int, int]:
    adapter = await api.adapter("acme", "pirate")
    assert [version.version for version in adapter.versions if version.weight] == (
        [adapter.active_version] if adapter.active_version else []
    )
    return adapter.active_version, adapter.previous_version


async def test_rollback_goes_back_and_forth(three: Api, database: Database) -> None:
    assert await _active(three) == (3, 2)
    await three.ok("POST", f"{URL}/rollback", {})
    assert await _active(three) == (2, 3)
    await three.ok("POST", f"{URL}/rollback", {})
    assert await _active(three) == (3, 2)
    await three.ok("POST", f"{URL}/rollback", {"version": 1})
    assert await _active(three) == (1, 3)
    with psycopg.connect(database.owner_url) as owner:
        rows = owner.execute(
            "SELECT actor, version, from_version FROM audit_log WHERE action = 'adapter.rollback' ORDER BY id"
        ).fetchall()
    assert rows == [("platform", 2, 3), ("platform", 3, 2), ("platform", 1, 3)]


async def test_activation_compares_before_it_sets(three: Api) -> None:
    await three.refused(409, "active_changed", "POST", f"{URL}/activate", {"version": 1, "expect_active": 2})
    assert await _active(three) == (3, 2)
    answers = await asyncio.gather(
        *(three.call("POST", f"{URL}/activate", {"version": n, "expect_active": 3}) for n in (1, 2, 1, 2))
    )
    assert sorted(answer.status_code for answer in answers) == [200, 409, 409, 409]
    winner = next(answer.json() for answer in answers if answer.status_code == 200)
    assert await _active(three) == (winner["active_version"], 3)


async def test_activating_what_is_active_changes_nothing(three: Api, database: Database) -> None:
    with psycopg.connect(database.owner_url) as owner:
        before = owner.execute("SELECT max(cursor) FROM changes").fetchone()
    await three.ok("POST", f"{URL}/activate", {"version": 3})
    with psycopg.connect(database.owner_url) as owner:
        assert owner.execute("SELECT max(cursor) FROM changes").fetchone() == before
    assert await _active(three) == (3, 2)


async def test_an_active_version_is_not_deleted_and_a_deleted_one_is_no_rollback_target(three: Api) -> None:
    await three.refused(409, "version_active", "DELETE", f"{URL}/versions/3")
    await three.ok("DELETE", f"{URL}/versions/2")
    assert await _active(three) == (3, 0)
    await three.refused(409, "not_activatable", "POST", f"{URL}/rollback", {})
    await three.refused(404, "not_found", "POST", f"{URL}/activate", {"version": 2})
    await three.refused(404, "not_found", "DELETE", f"{URL}/versions/2")


async def test_an_ingestion_that_ends_late_does_not_undo_a_newer_one(three: Api, state: RegistryState) -> None:
    from loraplane_gateway.db.sessions import Scope, transaction
    from loraplane_gateway.registry.activation.service import ActivationService
    from loraplane_gateway.registry.adapters.repository import AdapterRepository

    scope = Scope("acme")
    async with transaction(state.sessions, scope) as session:
        locked = await AdapterRepository(session, scope).lock("pirate")
        assert locked is not None
        await ActivationService(session, scope, "test").activate_ingested(locked, {3: 100}, 2, numbered=2)
    assert await _active(three) == (3, 2)
