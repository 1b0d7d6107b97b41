"""A data gateway in the test's loop, on real sockets, over a real database with known contents."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psycopg

from loraplane_core.credentials import new_master, role_key
from loraplane_core.identity import ReplicaId
from loraplane_gateway import keys
from loraplane_gateway.data.app import App, running
from loraplane_gateway.data.main import Server, make_server
from loraplane_gateway.data.settings import DataSettings
from tests.fakes.engine import FakeEngine
from tests.fakes.serving import halt
from tests.gateway.postgres import Database

BASE, ALIAS, BASE_DIGEST = "base-one", "org/Base-One", "b1" * 32
OTHER_BASE, OTHER_DIGEST = "base-two", "b2" * 32
POOL, OTHER_POOL = ("models", "one"), ("models", "two")
PROMPT = {"prompt": "hello"}


def digest_of(adapter: str, version: int = 1) -> str:
    return (f"{len(adapter):x}{ord(adapter[0]):x}{version:x}" * 32)[:64]


@dataclass(frozen=True, slots=True)
class Seeded:
    """The keys by tenant, and by purpose."""

    acme: str
    globex: str
    admin_only: str
    expired: str
    revoked: str


@dataclass(frozen=True, slots=True)
class World:
    database: Database
    keys: Seeded

    @property
    def url(self) -> str:
        return self.database.data_url


def seed(database: Database, pepper: bytes) -> Seeded:
    """Two tenants, two pools (the second only for globex), and an adapter in every state."""
    with psycopg.connect(database.owner_url, autocommit=True) as connection:
        for tenant in ("acme", "globex"):
            connection.execute("INSERT INTO tenants (name) VALUES (%s)", (tenant,))
        add_pool(connection, POOL, BASE, [ALIAS], BASE_DIGEST, [])
        add_pool(connection, OTHER_POOL, OTHER_BASE, [], OTHER_DIGEST, ["globex"])
        one, two = "/".join(POOL), "/".join(OTHER_POOL)
        add_version(connection, "acme", "pirate", 1, pool=one)
        add_version(connection, "acme", "pirate", 2, pool=one, active=False)
        add_version(connection, "acme", "idle", 1, pool=one, active=False)
        add_version(connection, "acme", "raw", 1, pool=one, active=False, state="unverified")
        add_version(connection, "acme", "bad", 1, pool=one, active=False, state="rejected")
        add_version(connection, "acme", "stale", 1, pool=one, base_digest=OTHER_DIGEST)
        add_version(connection, "acme", "barred", 1, pool=two, base_digest=OTHER_DIGEST)
        add_version(connection, "acme", BASE, 1, pool=one)  # a base's name wins
        add_version(connection, "globex", "secret", 1, pool=two, base_digest=OTHER_DIGEST)
        return Seeded(
            acme=add_key(connection, "acme", pepper),
            globex=add_key(connection, "globex", pepper),
            admin_only=add_key(connection, "acme", pepper, scopes=["admin"]),
            expired=add_key(connection, "acme", pepper, expires="now() - interval '1 minute'"),
            revoked=add_key(connection, "acme", pepper, revoked="now()"),
        )


def add_pool(
    connection: psycopg.Connection[Any],
    ref: tuple[str, str],
    base: str,
    aliases: list[str],
    digest: str,
    tenants: list[str],
) -> None:
    connection.execute(
        "INSERT INTO pools (namespace, name, base_model, aliases, base_digest, max_rank, allowed_tenants)"
        " VALUES (%s, %s, %s, %s, %s, 64, %s)",
        (*ref, base, aliases, digest, tenants),
    )


def add_version(
    connection: psycopg.Connection[Any],
    tenant: str,
    adapter: str,
    version: int,
    *,
    pool: str,
    active: bool = True,
    state: str = "validated",
    base_digest: str = BASE_DIGEST,
) -> None:
    connection.execute(
        "INSERT INTO tenant_adapters (tenant_id, adapter, version, rank, base_model, is_active, digest, base_digest,"
        " bytes, state) VALUES (%s, %s, %s, 8, 'b', %s, %s, %s, 4096, %s)",
        (tenant, adapter, version, active, digest_of(adapter, version), base_digest, state),
    )
    connection.execute("UPDATE adapters SET pool = %s WHERE tenant_id = %s AND name = %s", (pool, tenant, adapter))


def activate(database: Database, tenant: str, adapter: str, version: int) -> None:
    with psycopg.connect(database.owner_url) as connection:
        for sign, weight in (("<>", 0), ("=", 100)):
            connection.execute(
                f"UPDATE tenant_adapters SET is_active = {weight > 0}, weight = {weight}"
                f" WHERE tenant_id = %s AND adapter = %s AND version {sign} %s",
                (tenant, adapter, version),
            )


def add_key(
    connection: psycopg.Connection[Any],
    tenant: str,
    pepper: bytes,
    *,
    scopes: list[str] | None = None,
    expires: str = "NULL",
    revoked: str = "NULL",
) -> str:
    key_id, key = keys.mint()
    connection.execute(
        "INSERT INTO api_keys (id, tenant_id, digest, scopes, expires_at, revoked_at)"
        f" VALUES (%s, %s, %s, %s, {expires}, {revoked})",
        (key_id, tenant, keys.digest(pepper, key), scopes or ["inference"]),
    )
    return key


@dataclass(frozen=True, slots=True)
class Place:
    """The folder with the process's files, made before the gateway."""

    folder: Path
    role_keys: dict[str, bytes]

    @property
    def endpoints(self) -> Path:
        return self.folder / "endpoints"

    def settings(self, database_url: str, **changes: Any) -> DataSettings:
        values: dict[str, Any] = {
            "database_url": database_url,
            "key_pepper_file": self.folder / "pepper",
            "data_key_file": self.folder / "data",
            "state_key_file": self.folder / "state",
            "endpoints_dir": self.endpoints,
            "port": 0,
            "route_timeout": 0.5,
            **changes,
        }
        return DataSettings(**values)

    def engine(self, pool: tuple[str, str] = POOL, ordinal: int = 0) -> FakeEngine:
        base, digest = (BASE, BASE_DIGEST) if pool == POOL else (OTHER_BASE, OTHER_DIGEST)
        return FakeEngine(ReplicaId(*pool, ordinal), base, digest, self.role_keys)


def prepare(folder: Path, pepper: bytes) -> Place:
    master = new_master()
    role_keys = {"data": role_key(master, "data"), "state": role_key(master, "state")}
    for name, value in {**role_keys, "pepper": pepper}.items():
        (folder / name).write_text(value.hex())
    (folder / "endpoints").mkdir()
    return Place(folder, role_keys)


class Gateway:
    """One running gateway and a client of it."""

    def __init__(self, app: App, server: Server, port: int, client: httpx.AsyncClient) -> None:
        self.app = app
        self.server = server
        self.port = port
        self.client = client

    async def ask(
        self,
        key: str | None,
        model: object,
        *,
        path: str = "/v1/completions",
        headers: Mapping[str, str] | None = None,
        **fields: Any,
    ) -> httpx.Response:
        given = {"authorization": f"Bearer {key}"} if key is not None else {}
        body = {"model": model, **PROMPT, **fields}
        return await self.client.post(path, json=body, headers={**given, **(headers or {})})

    def metric(self, name: str) -> float:
        return self.app.metrics.registry.get_sample_value(f"loraplane_gateway_{name}") or 0.0

    async def until(self, condition: Callable[[], bool], seconds: float = 5.0) -> None:
        await until(condition, seconds)

    async def until_refused(self, key: str, seconds: float) -> None:
        """Until the key is 401; the clock starts now."""
        async with asyncio.timeout(seconds):
            while (await self.ask(key, "nothing")).status_code != 401:  # noqa: ASYNC110 - the gateway tells nobody
                await asyncio.sleep(0.02)

    async def until_idle(self) -> None:
        """Everything dispatched is released, nothing is admitted any more."""
        await until(lambda: self.metric("in_flight") == 0 and self.metric("dispatched") == self.metric("released"))


async def until(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    """Wait on the condition itself, with a deadline."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - the condition may be anything
            await asyncio.sleep(0.005)


@asynccontextmanager
async def gateway(settings: DataSettings, *, replicas: int | None = None) -> AsyncIterator[Gateway]:
    """Ready when the snapshot is loaded and, if given, that many replicas are in step."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        async with running(settings) as app:
            server = make_server(app, settings)
            task = asyncio.create_task(server.serve(sockets=[listener]))
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=10, trust_env=False) as client:
                found = Gateway(app, server, port, client)
                try:
                    await until(lambda: app.is_ready)
                    if replicas is not None:
                        await until(lambda: found.metric("replicas_alive") == replicas)
                    yield found
                finally:
                    await halt(server, task)


def events(text: str) -> list[Any]:
    """The data of a stream's events, [DONE] as a string."""
    found: list[Any] = []
    for block in text.split("\n\n"):
        if block:
            data = block.removeprefix("data: ")
            found.append(data if data == "[DONE]" else json.loads(data))
    return found
