"""The queue of ingestions, as the dispatcher takes from it."""

import psycopg
import pytest
from sqlalchemy import text

from loraplane_gateway.db.sessions import PLATFORM, Scope, transaction
from loraplane_gateway.registry.ingestion.repository import IngestionRepository, QueueRepository
from loraplane_gateway.registry.state import RegistryState
from tests.gateway.postgres import Database
from tests.gateway.registry.conftest import Api

_PLANS = ("enable_hashjoin", "enable_mergejoin", "enable_material", "enable_indexscan", "enable_bitmapscan")


@pytest.mark.parametrize("off", [(), _PLANS[:3], _PLANS[1:], _PLANS])
async def test_one_is_taken_at_a_time_however_postgres_joins(
    api: Api, state: RegistryState, database: Database, off: tuple[str, ...]
) -> None:
    with psycopg.connect(database.owner_url) as owner:
        owner.execute("ANALYZE ingestions")  # empty, as autovacuum often finds it
    await api.tenant("acme")
    await api.pool()
    names = ["first", "second", "third"]
    for name in names:
        (state.settings.adapter_root / name).mkdir(parents=True)
        await api.ok("POST", f"/admin/tenants/acme/adapters/{name}/versions", {"source": {"uri": f"file:{name}"}})
    taken = []
    for _ in names:
        async with transaction(state.sessions, PLATFORM) as session:
            for setting in off:
                await session.execute(text(f"SET LOCAL {setting} = off"))
            found = await QueueRepository(session, PLATFORM).take(60)
            taken.append(found.adapter if found else None)
    assert taken == names
    async with transaction(state.sessions, PLATFORM) as session:
        assert await QueueRepository(session, PLATFORM).take(60) is None


async def test_lost_leases_are_released_and_neither_what_is_worked_on_nor_what_waits_for_another_try(
    api: Api, state: RegistryState
) -> None:
    await api.tenant("acme")
    await api.pool()
    for name in ("held", "late", "lost"):
        (state.settings.adapter_root / name).mkdir(parents=True)
        await api.ok("POST", f"/admin/tenants/acme/adapters/{name}/versions", {"source": {"uri": f"file:{name}"}})
    async with transaction(state.sessions, PLATFORM) as session:
        queue = QueueRepository(session, PLATFORM)
        for _ in range(3):
            assert await queue.take(300)
        await IngestionRepository(session, Scope("acme")).delay("late", 1, 30)
    async with transaction(state.sessions, PLATFORM) as session:
        queue = QueueRepository(session, PLATFORM)
        await queue.release_lost(["acme/held@1"], 60)
        found = await queue.take(300)
        assert found is not None and found.adapter == "lost"
        assert await queue.take(300) is None
        await queue.release_lost([], 60)
        found = await queue.take(300)
        assert found is not None and found.adapter == "held"
