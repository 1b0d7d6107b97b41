"""An engine's admin port without an engine: residences in a dict, /state as the wire says."""

import asyncio
import secrets
import time

import msgspec
from aiohttp import web

from loraplane_core import headers
from loraplane_core.errors import DigestConflict, LoraplaneError, NotFound
from loraplane_core.identity import ReplicaId
from loraplane_core.wire import encode
from loraplane_core.wire.engine import (
    HEARTBEAT_SECONDS,
    Adapters,
    Capacity,
    Delta,
    Heartbeat,
    Hello,
    ModelInfo,
    Pin,
    PutAdapter,
    Residence,
    Snapshot,
)
from loraplane_core.wire.engine import Load as EngineLoad
from tests.operator.fakes.serving import Served, answer, read

CAPACITY = Capacity(
    slots=8, adapter_bytes=64 << 20, used_bytes=0, host_bytes=64 << 20, kv_tokens=4096, kv_tokens_displaced=0
)
BASE_DIGEST = "b" * 64


class FakeEngine(Served):
    """`hang` makes adapter calls never answer, `silent` makes /state stop, `refuse` fails every PUT with an error."""

    def __init__(self, replica: ReplicaId, token: str, base_digest: str = BASE_DIGEST) -> None:
        super().__init__(token)
        self.replica = replica
        self.base_digest = base_digest
        self.boot = secrets.token_hex(4)
        self.residences: dict[str, Residence] = {}
        self.calls: list[tuple[str, str]] = []
        self.hang = False
        self.silent = False
        self.lies = False  # answers that it is warm, and is not
        self.refuse: LoraplaneError | None = None
        self._queues: set[asyncio.Queue[list[Residence]]] = set()

    def routes(self) -> list[web.RouteDef]:
        path = "/adapters/{tenant}/{adapter}/{version}"
        return [
            web.put(path, self._put),
            web.delete(path, self._delete),
            web.post(path + "/pin", self._pin),
            web.get("/adapters", self._list),
            web.get("/state", self._state),
            web.get("/model", self._model),
        ]

    async def restart(self) -> None:
        """Same address, another boot, nothing resident."""
        await self.stop()
        self.boot, self.residences, self.hang, self.silent = secrets.token_hex(4), {}, False, False
        await self.start()

    def lose(self, ref: str) -> None:
        gone = self.residences.pop(ref)
        self._tell(msgspec.structs.replace(gone, residency="absent", warm_wanted=False))

    def hold(self, ref: str, digest: str, *, warm_wanted: bool = False) -> None:
        self._tell(Residence(ref=ref, digest=digest, residency="host", warm_wanted=warm_wanted, since=time.time()))

    def _tell(self, residence: Residence) -> None:
        if residence.residency != "absent":
            self.residences[residence.ref] = residence
        for queue in self._queues:
            queue.put_nowait([residence])

    async def _put(self, request: web.Request) -> web.Response:
        ref = await self._called("PUT", request)
        wanted: PutAdapter = await read(request, PutAdapter)
        if self.refuse is not None:
            raise self.refuse
        known = self.residences.get(ref)
        if known is not None and known.digest != wanted.digest:
            raise DigestConflict(f"{ref} is held with another digest")
        residence = Residence(
            ref=ref,
            digest=wanted.digest,
            residency="device",
            bytes=wanted.bytes,
            rank=wanted.rank,
            pinned=wanted.pinned,
            warm_wanted=True,
            since=time.time(),
        )
        if not self.lies:
            self._tell(residence)
        return answer(residence)

    async def _delete(self, request: web.Request) -> web.Response:
        ref = await self._called("DELETE", request)
        gone = Residence(ref=ref, digest=request.headers[headers.DIGEST], residency="absent")
        self.residences.pop(ref, None)
        self._tell(gone)
        return answer(gone)

    async def _pin(self, request: web.Request) -> web.Response:
        ref = await self._called("PIN", request)
        pin: Pin = await read(request, Pin)
        known = self.residences.get(ref)
        if known is None:
            raise NotFound(f"{ref} is not warm")
        warm = known.warm_wanted if pin.warm is None else pin.warm
        marked = msgspec.structs.replace(known, pinned=pin.pinned, warm_wanted=warm)
        self._tell(marked)
        return answer(marked)

    async def _called(self, verb: str, request: web.Request) -> str:
        info = request.match_info
        ref = f"{info['tenant']}/{info['adapter']}@{info['version']}"
        self.calls.append((verb, ref))
        if self.hang:
            await asyncio.Event().wait()
        return ref

    async def _list(self, _: web.Request) -> web.Response:
        return answer(Adapters(boot=self.boot, adapters=list(self.residences.values()), capacity=CAPACITY))

    async def _model(self, _: web.Request) -> web.Response:
        config = {"architectures": ["LlamaForCausalLM"], "hidden_size": 8}
        return answer(
            ModelInfo(
                base="base-a",
                base_digest=self.base_digest,
                config=config,
                dtype="float32",
                max_model_len=2048,
                max_rank=64,
            )
        )

    async def _state(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        queue: asyncio.Queue[list[Residence]] = asyncio.Queue()
        self._queues.add(queue)
        try:
            hello = Hello(
                replica=str(self.replica),
                boot=self.boot,
                base="base-a",
                base_digest=self.base_digest,
                capacity=CAPACITY,
            )
            held = list(self.residences.values())
            seq = 1
            await response.write(encode(hello) + b"\n")
            await response.write(encode(Snapshot(seq=seq, adapters=held, capacity=CAPACITY, load=EngineLoad())) + b"\n")
            while True:
                if self.silent:
                    await asyncio.Event().wait()
                seq += 1
                try:
                    async with asyncio.timeout(HEARTBEAT_SECONDS / 2):
                        changed = await queue.get()
                    await response.write(encode(Delta(seq=seq, adapters=changed)) + b"\n")
                except TimeoutError:
                    await response.write(encode(Heartbeat(seq=seq)) + b"\n")
        finally:
            self._queues.discard(queue)
