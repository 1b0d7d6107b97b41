"""`python -m tests.cluster.fake_engine`: an engine process without a model, for the scale tests.

Its command line, credentials, admin port, `/state`, adapter bookkeeping and artifact fetch are the real
engine's own code. What is missing is what costs memory and time: the core process, the conversion and the
weights. A loaded adapter is a number of bytes here.

POST /control on the metrics port makes it misbehave (Misdeeds).
"""

import asyncio
import logging
import secrets
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
from starlette.routing import Route, Router
from starlette.types import Receive, Scope, Send

from loraplane_core import headers as names
from loraplane_core.artifact.digest import WEIGHTS_FILE, base_digest
from loraplane_core.errors import LoraplaneError
from loraplane_core.identity import AdapterId
from loraplane_core.wire import encode
from loraplane_core.wire.engine import ModelInfo, Pin, PutAdapter, Residence
from loraplane_engine import messages as m
from loraplane_engine.adapters.room import Held, HostRoom, check_pin, keeps_place
from loraplane_engine.server import access
from loraplane_engine.server.adapters import AdapterStore
from loraplane_engine.server.admin_app import AdminRoutes
from loraplane_engine.server.asgi import Endpoint, Guard, not_found, read_body, send_json
from loraplane_engine.server.core_client import CoreClient
from loraplane_engine.server.fetch import ArtifactFetcher
from loraplane_engine.server.health_app import Health
from loraplane_engine.server.images import Image, ImageStore
from loraplane_engine.server.listeners import Listener
from loraplane_engine.server.reference import ManagedReferences
from loraplane_engine.server.state import StateHub
from loraplane_engine.server.text import read_json
from loraplane_engine.settings import Managed, Settings, parse

MAX_MODEL_LEN = 2048
_ADAPTER_MEMORY = 64 << 20


class Misdeeds(msgspec.Struct, kw_only=True):
    """`hang`: adapter calls are accepted and never answered. `lie`: a PUT answers that the adapter is warm, and
    the engine does not hold it. `lose`: this ref (or "*") leaves memory by itself. `unready`: health says no.
    """

    hang: bool = False
    lie: bool = False
    lose: str = ""
    unready: bool = False


@dataclass(frozen=True)
class Budgets:
    host: int
    device: int
    slots: int | None


class NoCore(CoreClient):
    """Says what a core would say about adapters, at once, and keeps the same reservations."""

    def __init__(
        self, said: Callable[[m.AdapterState | m.AdapterFailed], None], size: Callable[[str], int], budgets: Budgets
    ) -> None:
        self._said = said
        self._size = size
        self._budgets = budgets
        self.held: dict[m.AdapterKey, m.AdapterState] = {}  # what came first is the first to leave

    def send(self, *batch: m.ToCore) -> None:
        for message in batch:
            asyncio.get_running_loop().call_soon(self._do, message)

    def _do(self, message: m.ToCore) -> None:
        try:
            match message:
                case m.LoadAdapter():
                    self._load(message)
                case m.MarkAdapter():
                    self._mark(message)
                case m.UnloadAdapter(key=key):
                    self.lose(key)
        except LoraplaneError as error:
            assert isinstance(message, m.LoadAdapter | m.MarkAdapter)
            self._said(m.AdapterFailed(key=message.key, code=error.code, message=error.message))
            if message.key in self.held:
                self._said(self.held[message.key])

    def _load(self, message: m.LoadAdapter) -> None:
        key = message.key
        known = self.held.get(key)
        if known is None and key.digest not in self._images():
            newcomer = key.ref if message.warm_wanted else None
            victims = HostRoom(self._seen_by(newcomer), self._budgets.host).victims(self._size(key.digest))
            assert victims is not None, "nothing here is ever in use"
            for other in [other for other in self.held if other.digest in victims]:
                self.lose(other)
        pinned = known is not None and known.pinned
        self._hold(key, pinned=pinned, warm=message.warm_wanted or (known is not None and known.warm_wanted))

    def _mark(self, message: m.MarkAdapter) -> None:
        known = self.held.get(message.key)
        if known is None:
            self.lose(message.key)
            return
        warm = known.warm_wanted if message.warm_wanted is None else message.warm_wanted
        pinned = known.pinned if message.pinned is None else message.pinned
        others = {key.digest for key, each in self.held.items() if each.pinned}
        if pinned and message.key.digest not in others:
            self._hold(message.key, pinned=False, warm=warm)  # stands, whatever becomes of the pin
            budgets = self._budgets
            check_pin(known.bytes, [self._size(digest) for digest in others], budgets.device, budgets.slots)
        self._hold(message.key, pinned=pinned, warm=warm)

    def _images(self) -> dict[str, list[m.AdapterState]]:
        images: dict[str, list[m.AdapterState]] = {}
        for key, each in self.held.items():
            images.setdefault(key.digest, []).append(each)
        return images

    def _seen_by(self, newcomer: str | None) -> Iterator[Held]:
        for age, (digest, states) in enumerate(self._images().items()):
            holders = [(each.key.ref, each.pinned) for each in states if each.warm_wanted or each.pinned]
            reserved = keeps_place(holders, newcomer)
            yield Held(digest, self._size(digest), reserved, busy=False, order=(bool(holders), False, age))

    def reserved(self, mark: Callable[[m.AdapterState], bool]) -> int:
        return sum(self._size(digest) for digest, states in self._images().items() if any(map(mark, states)))

    def _hold(self, key: m.AdapterKey, *, pinned: bool, warm: bool) -> None:
        state = m.AdapterState(
            key=key,
            residency="device" if pinned else "host",
            bytes=self._size(key.digest),
            rank=1,
            pinned=pinned,
            warm_wanted=warm,
            in_use=0,
        )
        self.held[key] = state
        self._said(state)

    def lose(self, key: m.AdapterKey) -> None:
        """As after an eviction, or once an unload has drained."""
        self.held.pop(key, None)
        absent = m.AdapterState(key=key, residency="absent", bytes=0, rank=0, pinned=False, warm_wanted=False, in_use=0)
        self._said(absent)


class NoImages(ImageStore):
    """Fetches and checks artifacts as the real store does, and keeps only their sizes."""

    def __init__(self, folder: Path, fetcher: ArtifactFetcher) -> None:
        self._where = folder
        self._source = fetcher
        self._gate = asyncio.Semaphore(4)
        self.sizes: dict[str, int] = {}

    async def open(self) -> None:
        self._where.mkdir(parents=True, exist_ok=True)

    def get(self, digest: str) -> Image | None:
        size = self.sizes.get(digest)
        return None if size is None else Image(self._where, size, 1, size)

    def find(self, digest: str) -> Image | None:
        return self.get(digest)

    async def fetched(self, digest: str, size: int) -> Image:
        with tempfile.TemporaryDirectory(dir=self._where) as folder:
            async with self._gate:
                await self._source.fetch(digest, size, Path(folder))
            held = (Path(folder) / WEIGHTS_FILE).stat().st_size
        self.sizes[digest] = held
        return Image(self._where, held, 1, held)

    def remove(self, digest: str) -> None:
        self.sizes.pop(digest, None)

    async def close(self) -> None:
        """Nothing is open."""


class FakeStore(AdapterStore):
    """The real one, with misdeeds in front."""

    misdeeds = Misdeeds()

    async def put(self, adapter: AdapterId, wanted: PutAdapter) -> Residence:
        await self._hung()
        if self.misdeeds.lie:
            return Residence(ref=str(adapter.ref), digest=adapter.digest, residency="host", warm_wanted=True)
        return await super().put(adapter, wanted)

    async def delete(self, adapter: AdapterId, drain_s: float) -> Residence:
        await self._hung()
        return await super().delete(adapter, drain_s)

    async def pin(self, adapter: AdapterId, wanted: Pin) -> Residence:
        await self._hung()
        return await super().pin(adapter, wanted)

    async def _hung(self) -> None:
        if self.misdeeds.hang:
            await asyncio.Event().wait()


class FakeEngine:
    def __init__(self, settings: Settings, managed: Managed) -> None:
        self._settings = settings
        self._boot = secrets.token_hex(8)
        self._replica = str(managed.replica)
        config = read_json(settings.model / "config.json")
        self._info = ModelInfo(
            base=settings.served_name,
            base_digest=base_digest(settings.model),
            config=config,
            dtype="float32",
            max_model_len=settings.core.max_model_len or MAX_MODEL_LEN,
            max_rank=settings.core.max_rank,
        )
        self._hub = StateHub(snapshot=self._residences, slots=settings.core.slots, max_rank=settings.core.max_rank)
        self._hub.model(max_model_len=self._info.max_model_len, default_bytes=1 << 10)
        self._fetcher = ArtifactFetcher(managed)
        assert settings.cache_dir is not None
        self._images = NoImages(settings.cache_dir / "fake", self._fetcher)
        core = settings.core
        self._budgets = Budgets(core.host_cache, core.adapter_memory or _ADAPTER_MEMORY, core.slots)
        self._core = NoCore(self._core_said, lambda digest: self._images.sizes.get(digest, 0), self._budgets)
        self._store = FakeStore(self._core, on_change=self._hub.changed, on_load=lambda tier, seconds: None)
        self._references = ManagedReferences(self._info.base_digest)
        self._credentials = managed.credentials
        self._misdeeds = Misdeeds()

    async def run(self, stop: asyncio.Event) -> None:
        await self._store.attach(self._images)
        self._tell_memory()
        listeners = self._listen()
        beating = asyncio.create_task(self._hub.run())
        try:
            await stop.wait()
        finally:
            self._hub.close()
            beating.cancel()
            await asyncio.gather(beating, *(each.stop(1) for each in listeners), return_exceptions=True)
            await self._store.close()
            await self._fetcher.close()

    def _listen(self) -> list[Listener]:
        settings, info = self._settings, self._info
        admin = AdminRoutes(
            adapters=self._store, hub=self._hub, replica=self._replica, boot=self._boot, info=lambda: info
        )
        health = Health(lambda: "told so" if self._misdeeds.unready else "").routes()
        control = Route("/control", Endpoint("POST", self._control))
        metrics = Router([*health, control], default=not_found, redirect_slashes=False)
        data = [Route(path, Endpoint("POST", self._answer)) for path in ("/v1/completions", "/v1/chat/completions")]
        apps = {
            "data": (settings.port, Guard(Router([*health, *data]), access.data(self._credentials))),
            "admin": (settings.admin_port or 0, Guard(admin.router(), access.admin(self._credentials))),
            "metrics": (settings.metrics_port or 0, Guard(metrics, access.everyone)),
        }
        found = {name: Listener(settings.host, port, app) for name, (port, app) in apps.items()}
        for listener in found.values():
            listener.start()
        return list(found.values())

    async def _control(self, scope: Scope, receive: Receive, send: Send) -> None:
        wanted = msgspec.json.decode(await read_body(scope, receive, 4096), type=Misdeeds)
        self._misdeeds = self._store.misdeeds = wanted
        for key in [key for key in self._core.held if wanted.lose in (key.ref, "*")]:
            self._core.lose(key)
        await send_json(send, 200, encode(wanted), {})

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One word, and whose weights would have said it."""
        body = msgspec.json.decode(await read_body(scope, receive, 4 << 20))
        target = self._references.resolve(scope, body["model"])
        cold = target.adapter is not None and await self._store.ensure(target.adapter, target.bytes)
        found = {
            names.ADAPTER_ID: target.id_header(self._info.base_digest),
            names.REPLICA: self._replica,
            names.BOOT: self._boot,
            names.RESIDENCY: "cold" if cold else "hit",
        }
        message = {"role": "assistant", "content": "fake"}
        choice = {"index": 0, "text": "fake", "message": message, "finish_reason": "stop"}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        answer = {"id": "fake-1", "object": "chat.completion", "created": 1, "model": body["model"]}
        await send_json(send, 200, msgspec.json.encode({**answer, "choices": [choice], "usage": usage}), found)

    def _residences(self) -> list[Residence]:
        return self._store.residences()

    def _core_said(self, message: m.AdapterState | m.AdapterFailed) -> None:
        self._store.core_said(message)
        self._tell_memory()

    def _tell_memory(self) -> None:
        values: dict[str, object] = dict.fromkeys(m.StepStats.__struct_fields__, 0)
        values |= {
            "adapters_in_step_histogram": [],
            "tokens_by_adapter": {},
            "adapter_budget_bytes": self._budgets.device,
            "adapter_reserved_bytes": self._core.reserved(lambda each: each.pinned),
            "host_budget_bytes": self._budgets.host,
            "host_used_bytes": self._core.reserved(lambda each: True),
            "host_reserved_bytes": self._core.reserved(lambda each: each.pinned or each.warm_wanted),
            "kv_tokens_total": 4096,
            "kv_tokens_free": 4096,
        }
        self._hub.stepped(m.StepStats(**values))  # type: ignore[arg-type]  # all numbers but the two named


async def _run(settings: Settings, managed: Managed) -> None:
    stop = asyncio.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signum, stop.set)
    await FakeEngine(settings, managed).run(stop)


def main() -> None:
    settings = parse(sys.argv[1:])
    if settings.managed is None:
        sys.exit("the fake engine is a managed one: it needs --credentials")
    logging.basicConfig(level="WARNING", stream=sys.stderr)
    asyncio.run(_run(settings, settings.managed))


if __name__ == "__main__":
    main()
