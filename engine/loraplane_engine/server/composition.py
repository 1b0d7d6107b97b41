"""Puts one engine together, runs it, takes it apart. The only place that knows all parts."""

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

from starlette.routing import Router
from starlette.types import Receive, Scope, Send

from loraplane_core import headers as names
from loraplane_core.artifact.digest import base_digest
from loraplane_core.artifact.preflight import Limits, preflight
from loraplane_core.errors import LoraplaneError, Unavailable
from loraplane_core.files import write_ports
from loraplane_core.identity import AdapterId, ReplicaId
from loraplane_core.wire.engine import ModelInfo, Residence
from loraplane_engine import messages as m
from loraplane_engine.adapters.image import Layout
from loraplane_engine.options import CoreOptions
from loraplane_engine.server import access
from loraplane_engine.server.adapters import AdapterStore
from loraplane_engine.server.admin_app import AdminRoutes
from loraplane_engine.server.asgi import Guard
from loraplane_engine.server.chat import ChatTemplate
from loraplane_engine.server.core_client import CoreClient
from loraplane_engine.server.core_process import STOP_SECONDS, CoreProcess, core_command
from loraplane_engine.server.data_app import ModelCard, OpenAIRoutes
from loraplane_engine.server.fetch import ArtifactFetcher
from loraplane_engine.server.health_app import HEALTH_PREFIX, Health, metrics_router
from loraplane_engine.server.images import ImageStore
from loraplane_engine.server.listeners import Listener
from loraplane_engine.server.metrics import Metrics
from loraplane_engine.server.protocol import RequestReader
from loraplane_engine.server.reference import ManagedReferences, References, StandaloneReferences
from loraplane_engine.server.state import StateHub
from loraplane_engine.server.text import Tokenizer, read_json
from loraplane_engine.settings import Settings

log = logging.getLogger(__name__)

LOCAL_REPLICA = ReplicaId("local", "engine", 0)
LOCAL_TENANT = "local"
#: Rank assumed for `slots` while no adapter is known.
TYPICAL_RANK = 16
#: For answers on their way out after the core has died, and for ports other than `data`.
FLUSH_SECONDS = 1.0


class Engine:
    """One server process and its core. `command` starts the core; tests give another."""

    def __init__(self, settings: Settings, command: Callable[[CoreOptions, str], list[str]] = core_command) -> None:
        self._settings = settings
        self._command = command
        self._managed = settings.managed
        self._replica = str(settings.managed.replica if settings.managed else LOCAL_REPLICA)
        self._boot = secrets.token_hex(8)
        self._process = CoreProcess()
        self._core = CoreClient(self._process.endpoint, on_adapter=self._adapter_said, on_stats=self._stepped)
        self.hub = StateHub(snapshot=self._residences, slots=settings.core.slots, max_rank=settings.core.max_rank)
        self._core_ready: m.CoreReady | None = None
        self._metrics = Metrics(lambda: self.hub.stats, lambda: self._core_ready)
        self._adapters = AdapterStore(
            self._core,
            on_change=self.hub.changed,
            on_load=lambda tier, seconds: self._metrics.loads.labels(tier).observe(seconds),
        )
        self._info: ModelInfo | None = None
        self._why_not = "the model is still loading"
        self._openai: Router | None = None
        self._health = Router(Health(lambda: self._why_not).routes(), redirect_slashes=False)
        self._fetcher = ArtifactFetcher(settings.managed) if settings.managed else None
        self._cache = settings.cache_dir or self._process.folder / "cache"

    async def run(self, stop: asyncio.Event) -> int:
        """Serve until `stop` is set (0) or the core is gone (1)."""
        async with contextlib.AsyncExitStack() as owned:
            owned.push_async_callback(self._release)
            try:
                listeners = self._listen()
            except OSError as error:
                log.error("cannot bind: %s", error)
                return 1
            owned.push_async_callback(self._stop_listeners, listeners, FLUSH_SECONDS)
            await self._process.start(self._command(self._settings.core, self._process.endpoint))
            async with _background(self._core.run(), self.hub.run(), self._watch_core()) as background:
                status = await self._serve(stop, background)
                self._why_not = "the engine is stopping"
                self.hub.close()
                await listeners["data"].stop(FLUSH_SECONDS if status else self._settings.drain_seconds)
                self._core.send(m.Shutdown())
                # A core that is still loading does not listen yet.
                await self._process.stop(STOP_SECONDS if self._core_ready else 0)
        return status

    async def _serve(self, stop: asyncio.Event, background: list["asyncio.Task[None]"]) -> int:
        """Returns when something ends it."""
        starting = asyncio.create_task(self._bring_up())
        stopping = asyncio.create_task(stop.wait())
        try:
            waiting: set[asyncio.Task[object]] = {*background, starting, stopping}
            while True:
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                if stopping in done:
                    return 0
                for task in done:
                    error = task.exception()
                    if error is not None or task is not starting:
                        self._failed(error)
                        return 1
        finally:
            for task in (starting, stopping):
                task.cancel()
            await asyncio.gather(starting, stopping, return_exceptions=True)

    def _failed(self, error: BaseException | None) -> None:
        self._why_not = "the engine's core process is gone"
        self._core.fail(Unavailable(self._why_not, code="engine_failed"))
        reason = error.message if isinstance(error, LoraplaneError) else error
        log.error("the engine ends: %s", reason or self._why_not, exc_info=None if reason else error)

    async def _watch_core(self) -> None:
        status = await self._process.wait()
        log.info("the core process ended with status %d", status)
        self._core.fail(Unavailable("the engine's core process is gone", code="engine_failed"))

    # -- starting

    def _listen(self) -> dict[str, Listener]:
        settings, managed = self._settings, self._managed
        data = access.data(managed.credentials) if managed else access.everyone
        listeners = {"data": Listener(settings.host, settings.port, Guard(self._data, data))}
        if managed and settings.admin_port is not None:
            routes = AdminRoutes(
                adapters=self._adapters,
                hub=self.hub,
                replica=self._replica,
                boot=self._boot,
                info=lambda: self._info,
            )
            app = Guard(routes.router(), access.admin(managed.credentials))
            listeners["admin"] = Listener(settings.host, settings.admin_port, app)
        if settings.metrics_port is not None:
            health = Health(lambda: self._why_not)
            app = Guard(metrics_router(self._metrics, health), access.everyone)
            listeners["metrics"] = Listener(settings.host, settings.metrics_port, app)
        ports = {name: listener.port for name, listener in listeners.items()}
        log.info("listening on %s: %s", settings.host, ports)
        for listener in listeners.values():
            listener.start()
        if settings.ports_file is not None:
            write_ports(settings.ports_file, ports)
        return listeners

    async def _data(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The OpenAI routes exist once the model does; health always."""
        if scope["path"].startswith(HEALTH_PREFIX):
            await self._health(scope, receive, send)
        elif self._openai is None:
            raise Unavailable(self._why_not or "the model is still loading", retry_after=2)
        else:
            await self._openai(scope, receive, send)

    async def _bring_up(self) -> None:
        settings = self._settings
        digest, tokenizer, template = await asyncio.to_thread(_read_model, settings.model)
        config = read_json(settings.model / "config.json")
        local = await self._check_local(config)
        try:
            async with asyncio.timeout(settings.start_seconds):
                ready = await asyncio.shield(self._core.ready)
        except TimeoutError as error:
            raise Unavailable(f"the base was not loaded within {settings.start_seconds:g} seconds") from error
        layout = Layout.parse(ready.layout)
        self._core_ready = ready
        self.hub.model(max_model_len=ready.max_model_len, default_bytes=_typical_bytes(config, layout))
        await self._adapters.attach(
            ImageStore(
                self._cache,
                ready.layout,
                limit=settings.disk_cache,
                fetcher=self._fetcher,
                in_use=self._adapters.loading,
            )
        )
        for adapter, folder in local.items():
            await self._load_local(adapter, folder)
        info = ModelInfo(
            base=settings.served_name,
            base_digest=digest,
            config=config,
            dtype=layout.dtype,
            max_model_len=ready.max_model_len,
            max_rank=settings.core.max_rank,
        )
        reader = RequestReader(tokenizer, template, max_model_len=ready.max_model_len, vocab_size=ready.vocab_size)
        self._open(info, tokenizer, reader, {adapter.adapter: adapter for adapter in local})

    def _open(self, info: ModelInfo, tokenizer: Tokenizer, reader: RequestReader, local: dict[str, AdapterId]) -> None:
        references: References = (
            ManagedReferences(info.base_digest) if self._managed else StandaloneReferences(info.base, local)
        )
        created = int(time.time())
        base = ModelCard(id=info.base, root=info.base, created=created, max_model_len=info.max_model_len)
        cards = [
            ModelCard(id=name, root=name, parent=info.base, created=created, max_model_len=info.max_model_len)
            for name in local
        ]
        self._openai = OpenAIRoutes(
            core=self._core,
            adapters=self._adapters,
            reader=reader,
            tokenizer=tokenizer,
            references=references,
            metrics=self._metrics,
            models=[base, *cards],
            identity={names.REPLICA: self._replica, names.BOOT: self._boot},
            base_digest=info.base_digest,
            max_body=self._settings.max_body,
        ).router()
        self._info = info
        self._why_not = ""
        log.info("ready: %s (%s), %d adapters", info.base, info.base_digest[:12], len(local))

    async def _check_local(self, config: dict[str, Any]) -> dict[AdapterId, Path]:
        """Preflight of the standalone form's adapters: version 1 of tenant `local`."""
        found: dict[AdapterId, Path] = {}
        limits = Limits(max_rank=self._settings.core.max_rank)
        for each in self._settings.adapters:
            try:
                report = await asyncio.to_thread(preflight, each.folder, base_config=config, limits=limits)
            except LoraplaneError as error:
                raise _rejected(each.name, error) from error
            found[AdapterId(LOCAL_TENANT, each.name, 1, report.digest)] = each.folder
        return found

    async def _load_local(self, adapter: AdapterId, folder: Path) -> None:
        try:
            await self._adapters.put_local(adapter, folder)
        except LoraplaneError as error:
            raise _rejected(adapter.adapter, error) from error

    # -- from the core

    def _adapter_said(self, message: m.AdapterState | m.AdapterFailed) -> None:
        self._adapters.core_said(message)

    def _residences(self) -> list[Residence]:
        return self._adapters.residences()

    def _stepped(self, stats: m.StepStats) -> None:
        self.hub.stepped(stats)
        self._metrics.stepped(stats)

    # -- ending

    async def _stop_listeners(self, listeners: dict[str, Listener], seconds: float) -> None:
        await asyncio.gather(*(listener.stop(seconds) for listener in listeners.values()))

    async def _release(self) -> None:
        await self._adapters.close()
        if self._fetcher is not None:
            await self._fetcher.close()
        await self._process.stop()
        self._core.close()


@contextlib.asynccontextmanager
async def _background(*work: Coroutine[Any, Any, None]) -> AsyncIterator[list["asyncio.Task[None]"]]:
    tasks = [asyncio.create_task(each) for each in work]
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _rejected(name: str, error: LoraplaneError) -> Unavailable:
    return Unavailable(f"--adapter {name}: {error.code}: {error.message}")


def _read_model(folder: Path) -> tuple[str, Tokenizer, ChatTemplate]:
    return base_digest(folder), Tokenizer(folder), ChatTemplate(folder)


def _typical_bytes(config: dict[str, object], layout: Layout) -> int:
    """Device bytes of an adapter of TYPICAL_RANK on all seven linears of a Llama-shaped base."""

    def number(name: str, default: int) -> int:
        value = config.get(name)
        return value if isinstance(value, int) else default

    hidden, heads = number("hidden_size", 0), number("num_attention_heads", 1)
    head = number("head_dim", hidden // max(1, heads))
    query, key = heads * head, number("num_key_value_heads", heads) * head
    middle = number("intermediate_size", 0)
    widths = 2 * (hidden + query) + 2 * (hidden + key) + 3 * (hidden + middle)
    return TYPICAL_RANK * widths * number("num_hidden_layers", 1) * layout.item_bytes
