"""A real registry over a real database: in this process for most tests, as a process of its own for some."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from loraplane_core.credentials import new_master, operator_credential
from loraplane_core.wire import decode, encode
from loraplane_core.wire.registry import Adapter, PoolReport, Version
from loraplane_gateway.registry.app import create_admin_app, create_artifact_app
from loraplane_gateway.registry.ingestion.dispatcher import Dispatcher
from loraplane_gateway.registry.ingestion.processes import Slot, Workers
from loraplane_gateway.registry.main import registry
from loraplane_gateway.registry.state import RegistryState
from loraplane_gateway.settings import RegistrySettings
from tests.gateway.artifacts import BASE_ALIAS, BASE_CONFIG, BASE_DIGEST, BASE_NAME
from tests.gateway.postgres import Database

ADMIN_KEY = "platform-admin-key-of-the-tests-0123456789"
POOL = "serving/tiny"
WAIT = 20


def settings_for(database: Database, folder: Path, **more: Any) -> RegistrySettings:
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("master", "pepper"):
        file = folder / f"{name}.key"
        if not file.exists():
            file.write_text(new_master().hex())
    (folder / "admin.key").write_text(ADMIN_KEY)
    (folder / "adapters").mkdir(exist_ok=True)
    values: dict[str, Any] = {
        "database_url": database.registry_url,
        "master_key_file": folder / "master.key",
        "key_pepper_file": folder / "pepper.key",
        "admin_key_file": folder / "admin.key",
        "adapter_root": folder / "adapters",
        "store_dir": folder / "store",
        "ingest_timeout": 20,
    }
    return RegistrySettings(**{**values, **more})


@dataclass
class Api:
    """The admin listener as its callers see it."""

    http: httpx.AsyncClient
    operator_token: str

    async def call(
        self, method: str, path: str, body: object = None, *, token: str = ADMIN_KEY, **more: Any
    ) -> httpx.Response:
        headers = {"authorization": f"Bearer {token}", **more.pop("headers", {})}
        content = more.pop("content", None if body is None else encode(body))
        return await self.http.request(method, path, content=content, headers=headers, **more)

    async def ok(self, method: str, path: str, body: object = None, **more: Any) -> Any:
        answer = await self.call(method, path, body, **more)
        assert answer.is_success, (answer.status_code, answer.text)
        return answer.json()

    async def refused(self, status: int, code: str, method: str, path: str, body: object = None, **more: Any) -> str:
        """The message of the refusal."""
        answer = await self.call(method, path, body, **more)
        assert (answer.status_code, answer.json()["error"]["code"]) == (status, code), answer.text
        return str(answer.json()["error"]["message"])

    async def as_operator(self, method: str, path: str, body: object = None) -> Any:
        return await self.ok(method, path, body, token=self.operator_token)

    async def tenant(self, name: str, *namespaces: str) -> None:
        await self.ok("POST", "/admin/tenants", {"name": name, "namespaces": list(namespaces)})

    async def pool(self, ref: str = POOL, **more: Any) -> None:
        report = {
            "base_model": BASE_NAME,
            "aliases": [BASE_ALIAS],
            "base_digest": BASE_DIGEST,
            "config": BASE_CONFIG,
        }
        await self.as_operator("PUT", f"/operator/pools/{ref}", PoolReport(**{**report, **more}))

    async def register(self, tenant: str, adapter: str, path: str, **more: Any) -> Version:
        """Registers `file:PATH` and waits for the end of its ingestion."""
        body = {"source": {"uri": f"file:{path}"}, **more}
        url = f"/admin/tenants/{tenant}/adapters/{adapter}/versions?wait={WAIT}"
        answer = await self.call("POST", url, body, timeout=WAIT + 5)
        assert answer.is_success, answer.text
        return decode(answer.content, Version)

    async def adapter(self, tenant: str, adapter: str) -> Adapter:
        answer = await self.call("GET", f"/admin/tenants/{tenant}/adapters/{adapter}")
        assert answer.is_success, answer.text
        return decode(answer.content, Adapter)

    async def until(self, tenant: str, adapter: str, holds: Callable[[Adapter], bool]) -> Adapter:
        async with asyncio.timeout(WAIT):
            while not holds(found := await self.adapter(tenant, adapter)):  # noqa: ASYNC110 - the database's state
                await asyncio.sleep(0.05)
        return found


@pytest.fixture
def settings(database: Database, tmp_path: Path) -> RegistrySettings:
    return settings_for(database, tmp_path / "registry")


@pytest.fixture
async def state(settings: RegistrySettings) -> AsyncIterator[RegistryState]:
    """The registry with its hub; no ingestion runs unless a test asks for `ingesting`."""
    async with registry(settings) as state:
        hub = asyncio.create_task(state.hub.run())
        yield state
        hub.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await hub


class InlineSlot(Slot):
    """Runs jobs in a thread: starting a process for every test would cost more than the tests."""

    async def run(self, function: Callable[[Any], Any], job: Any, seconds: float) -> Any:
        async with asyncio.timeout(seconds):
            return await asyncio.to_thread(function, job)


class InlineWorkers(Workers):
    @contextlib.asynccontextmanager
    async def slot(self) -> AsyncIterator[Slot]:
        async with super().slot() as slot:
            yield InlineSlot(self, slot.worker)


@pytest.fixture
async def processes() -> AsyncIterator[Workers]:
    """One real worker process, started by the first job."""
    workers = Workers(1)
    yield workers
    workers.close()


@contextlib.asynccontextmanager
async def dispatching(state: RegistryState, workers: Workers) -> AsyncIterator[None]:
    dispatcher = Dispatcher(
        settings=state.settings,
        sessions=state.sessions,
        queued=state.queued,
        workers=workers,
        uploads=state.uploads,
        metrics=state.metrics,
    )
    task = asyncio.create_task(dispatcher.run())
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


@pytest.fixture
async def ingesting(state: RegistryState) -> AsyncIterator[None]:
    async with dispatching(state, InlineWorkers(2)):
        yield


@pytest.fixture
async def api(state: RegistryState) -> AsyncIterator[Api]:
    transport = httpx.ASGITransport(create_admin_app(state), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://registry") as client:
        yield Api(client, operator_credential(state.secrets.master))


@pytest.fixture
async def artifact_http(state: RegistryState) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(create_artifact_app(state), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://artifacts") as client:
        yield client
