"""Composition root of `loraplane-gateway registry`: builds everything once, runs it, takes it down in order."""

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import uvicorn
from fastapi import FastAPI
from redis.asyncio import Redis
from sqlalchemy import text

from loraplane_core.files import write_ports
from loraplane_core.listener import HeadDeadline
from loraplane_gateway.db.engine import AWAY, create_engine, named
from loraplane_gateway.db.sessions import PLATFORM, session_maker, transaction
from loraplane_gateway.registry.activation.repository import ActivationRepository
from loraplane_gateway.registry.app import create_admin_app, create_artifact_app
from loraplane_gateway.registry.artifacts.store import ArtifactStore
from loraplane_gateway.registry.auth import Authenticator
from loraplane_gateway.registry.feed.hub import Hub
from loraplane_gateway.registry.feed.repository import FeedRepository
from loraplane_gateway.registry.ingestion.dispatcher import Dispatcher
from loraplane_gateway.registry.ingestion.processes import Workers
from loraplane_gateway.registry.metrics import Metrics
from loraplane_gateway.registry.revocations import Revocations
from loraplane_gateway.registry.signals import Signal
from loraplane_gateway.registry.state import RegistryState
from loraplane_gateway.registry.uploads.files import UploadFiles
from loraplane_gateway.registry.uploads.repository import UploadRepository
from loraplane_gateway.settings import RegistrySettings, read_secrets

DATABASE_WAIT_SECONDS = 30.0
HOUSEKEEPING_SECONDS = 60.0
REDIS_SECONDS = 1.0
BACKLOG = 256
log = logging.getLogger("loraplane.registry")

# The service must not run as a role that row-level security does not bind, and not without its tables.
_CHECK = text("""
    SELECT to_regclass('public.tenant_adapters') IS NOT NULL AS migrated,
           (SELECT rolsuper OR rolbypassrls FROM pg_roles WHERE rolname = current_user)
           OR EXISTS (SELECT 1 FROM pg_tables WHERE tablename = 'tenant_adapters'
                      AND pg_has_role(current_user, tableowner, 'MEMBER')) AS unbound""")


class StartRefused(Exception):
    """The process must not start like this; the message says what to do."""


def run(settings: RegistrySettings) -> int:
    """Runs until SIGTERM or SIGINT. 0 after a clean end, 1 when it could not start or a part of it died."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    try:
        asyncio.run(_main(settings))
    except StartRefused as error:
        log.error("%s", error)
        return 1
    except ExceptionGroup as group:
        log.error("the registry ended on an error", exc_info=group)
        return 1
    return 0


async def _main(settings: RegistrySettings) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with registry(settings) as state:
        await _check_database(state, stop)
        if stop.is_set():
            return
        await _serve(state, stop)


@contextlib.asynccontextmanager
async def registry(settings: RegistrySettings) -> AsyncIterator[RegistryState]:
    """All that the applications need, without listeners; what it opens it closes."""
    secrets = read_secrets(settings)
    url = settings.database_url.get_secret_value()
    engine = create_engine(url, application="loraplane-registry", pool_size=16)
    redis = None
    if settings.redis_url is not None:
        redis = Redis.from_url(
            settings.redis_url.get_secret_value(), socket_timeout=REDIS_SECONDS, socket_connect_timeout=REDIS_SECONDS
        )
    sessions = session_maker(engine)
    store = ArtifactStore(settings.store_dir)
    await asyncio.to_thread(store.prepare)
    state = RegistryState(
        settings=settings,
        secrets=secrets,
        engine=engine,
        sessions=sessions,
        authenticator=Authenticator(sessions, secrets),
        hub=Hub(url),
        store=store,
        uploads=UploadFiles(settings.store_dir, settings.max_artifact),
        revocations=Revocations(redis),
        metrics=Metrics(),
        queued=Signal(),
    )
    try:
        yield state
    finally:
        await state.revocations.close()
        await engine.dispose()


async def _check_database(state: RegistryState, stop: asyncio.Event) -> None:
    """Waits for Postgres; raises StartRefused when it stays away or is not fit to be used."""
    deadline = asyncio.get_running_loop().time() + DATABASE_WAIT_SECONDS
    while not stop.is_set():
        try:
            async with transaction(state.sessions, PLATFORM) as session:
                row = (await session.execute(_CHECK)).one()
            break
        except AWAY as error:
            if asyncio.get_running_loop().time() > deadline:
                raise StartRefused(f"Postgres did not answer for {DATABASE_WAIT_SECONDS:.0f} s") from error
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.5):
                    await stop.wait()
    else:
        return
    if not row.migrated:
        raise StartRefused("the database has no tables yet: run `loraplane-gateway migrate` first")
    if row.unbound:
        raise StartRefused("the database role owns the tables or bypasses row-level security: use loraplane_registry")


async def _serve(state: RegistryState, stop: asyncio.Event) -> None:
    workers = Workers(state.settings.workers)
    dispatcher = Dispatcher(
        settings=state.settings,
        sessions=state.sessions,
        queued=state.queued,
        workers=workers,
        uploads=state.uploads,
        metrics=state.metrics,
    )
    admin, artifact = _listeners(state)
    servers = [_server(state, create_admin_app(state), admin), _server(state, create_artifact_app(state), artifact)]
    try:
        async with asyncio.TaskGroup() as group:
            serving = [group.create_task(server.serve(sockets=[sock])) for server, sock in servers]
            background = [group.create_task(work) for work in (state.hub.run(), dispatcher.run(), _housekeeping(state))]
            await _wait_started([server for server, _ in servers], stop)
            _write_ports(state.settings.ports_file, admin, artifact)
            log.info("admin listener on %s, artifact listener on %s", admin.getsockname(), artifact.getsockname())
            await stop.wait()
            state.hub.close()  # feeds end by themselves, so that draining does not wait for them
            for server, _ in servers:
                server.should_exit = True
            await asyncio.wait(serving, timeout=state.settings.drain_timeout + 5)
            for task in background:
                task.cancel()
    finally:
        workers.close()
        admin.close()
        artifact.close()


class _Server(uvicorn.Server):
    """Leaves signals to this process's own handlers; two servers cannot both have them."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _server(state: RegistryState, app: FastAPI, sock: socket.socket) -> tuple[_Server, socket.socket]:
    config = uvicorn.Config(
        app,
        http=HeadDeadline,
        log_config=None,
        access_log=False,
        lifespan="off",
        timeout_graceful_shutdown=int(state.settings.drain_timeout),
        timeout_keep_alive=30,
        h11_max_incomplete_event_size=64 << 10,
        server_header=False,
    )
    return _Server(config), sock


def _listeners(state: RegistryState) -> tuple[socket.socket, socket.socket]:
    settings = state.settings
    admin = _listen(settings.admin_host, settings.admin_port)
    try:
        return admin, _listen(settings.artifact_host, settings.artifact_port)
    except StartRefused:
        admin.close()
        raise


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise StartRefused(f"cannot listen on {host}:{port}: {error.strerror}") from error


async def _wait_started(servers: list[_Server], stop: asyncio.Event) -> None:
    while not stop.is_set() and not all(server.started for server in servers):  # noqa: ASYNC110
        await asyncio.sleep(0.01)  # uvicorn offers a flag, no event


def _write_ports(file: Path | None, admin: socket.socket, artifact: socket.socket) -> None:
    if file is None:
        return
    ports = {"admin": admin.getsockname()[1], "artifact": artifact.getsockname()[1]}
    write_ports(file, ports)


async def _housekeeping(state: RegistryState) -> None:
    while True:
        try:
            await tidy(state)
        except AWAY as error:
            log.warning("housekeeping is put off: %s", named(error))
        except Exception:
            log.exception("housekeeping failed")
        await asyncio.sleep(HOUSEKEEPING_SECONDS)


async def tidy(state: RegistryState) -> None:
    """Uploads past their time, changes that nobody will ask for and activations that nobody waits for go."""
    async with transaction(state.sessions, PLATFORM) as session:
        expired = await UploadRepository(session, PLATFORM).expire()
        await FeedRepository(session, PLATFORM).trim(state.settings.feed_keep)
        await ActivationRepository(session, PLATFORM).sweep()
    for tenant, upload_id in expired:
        await asyncio.to_thread(state.uploads.remove, tenant, upload_id)
