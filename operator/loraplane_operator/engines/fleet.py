"""One reader of /state per replica. What a reader knows is dropped the moment its stream ends: an engine
without a live stream is not in the World, so nothing is planned on old news.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable

import httpx
import msgspec

from loraplane_core.errors import LoraplaneError, Unavailable
from loraplane_core.identity import AdapterRef, ReplicaId, is_digest
from loraplane_core.wire import check_protocol
from loraplane_core.wire.engine import Capacity, Delta, Hello, ModelInfo, Residence, Snapshot, StateMessage
from loraplane_operator.backoff import Backoff
from loraplane_operator.engines.client import EngineClient
from loraplane_operator.words import Engine, Replica

log = logging.getLogger(__name__)
_RECONNECT = Backoff(first=0.1, cap=1.0)
#: A stream that is back within this, after a stall of either side, makes no status flap.
GRACE_SECONDS = 0.3
#: One that ended sooner than this began badly, whatever it said: the next try waits longer.
STEADY_SECONDS = 5.0
#: Of what an engine says, so much reaches statuses.
_WORDS_MAX = 500
_BYTES_MAX = 1 << 50
_SINCE_MAX = 1 << 36  # Unix seconds, in the year 4147


class Fleet:
    """Owns the readers; `wake` is called when a replica's view changed in a way that planning looks at."""

    def __init__(self, http: httpx.AsyncClient, token: Callable[[Replica], str], wake: Callable[[], None]) -> None:
        self._http = http
        self._token = token
        self._wake = wake
        self._readers: dict[ReplicaId, Reader] = {}

    def sync(self, replicas: Iterable[Replica]) -> None:
        """Read exactly these replicas; one whose address or credential changed is read anew."""
        wanted = {
            replica.id: (_admin_url(replica), self._token(replica)) for replica in replicas if _reachable(replica)
        }
        for id_, reader in list(self._readers.items()):
            if wanted.get(id_) != (reader.url, reader.token):
                reader.cancel()
                del self._readers[id_]
        for id_, (url, token) in wanted.items():
            if id_ not in self._readers:
                client = EngineClient(self._http, url, token)
                self._readers[id_] = Reader(id_, url, token, client, self._wake)

    def engines(self) -> dict[ReplicaId, Engine]:
        views = {id_: reader.view() for id_, reader in self._readers.items()}
        return {id_: view for id_, view in views.items() if view is not None}

    def client(self, replica: ReplicaId) -> EngineClient:
        reader = self._readers.get(replica)
        if reader is None:
            raise Unavailable(f"replica {replica} is not running", code="engine_unreachable")
        return reader.client

    async def close(self) -> None:
        tasks = [reader.cancel() for reader in self._readers.values()]
        self._readers.clear()
        await asyncio.gather(*tasks, return_exceptions=True)


class Reader:
    def __init__(
        self, replica: ReplicaId, url: str, token: str, client: EngineClient, wake: Callable[[], None]
    ) -> None:
        self.replica = replica
        self.url = url
        self.token = token
        self.client = client
        self._wake = wake
        self._hello: Hello | None = None
        self._seq: int | None = None  # of the last message; None until a snapshot came
        self._residences: dict[AdapterRef, Residence] = {}
        self._capacity: Capacity | None = None
        self._model: tuple[str, ModelInfo] | None = None  # with the boot that told it
        self._view: Engine | None = None  # of all above; None after a change
        self._task = asyncio.create_task(self._run(), name=f"state/{replica}")

    def cancel(self) -> asyncio.Task[None]:
        self._task.cancel()
        return self._task

    def view(self) -> Engine | None:
        """The same object until something changed."""
        if self._view is None:
            self._view = self._made()
        return self._view

    def _made(self) -> Engine | None:
        if self._hello is None or self._seq is None or self._capacity is None:
            return None
        hello = self._hello
        return Engine(
            replica=self.replica,
            boot=hello.boot,
            base=hello.base,
            base_digest=hello.base_digest,
            capacity=self._capacity,
            residences=dict(self._residences),
            model=self._model[1] if self._model and self._model[0] == hello.boot else None,
        )

    async def _run(self) -> None:
        failures, loop = 0, asyncio.get_running_loop()
        while True:
            begun = loop.time()
            try:
                await self._read()
                trouble = "the stream ended"
            except LoraplaneError as error:
                trouble = error.message
            except Exception:  # a reader that dies would hide its replica for good
                log.exception("reading the state stream broke", extra={"replica": str(self.replica)})
                trouble = "a defect"
            failures = 1 if loop.time() - begun >= STEADY_SECONDS else failures + 1
            self._drop(trouble)
            await asyncio.sleep(_RECONNECT.delay(failures))

    async def _read(self) -> None:
        learning: asyncio.Task[None] | None = None
        try:
            async with contextlib.aclosing(self.client.state()) as messages:
                async for message in messages:
                    if self._take(message):
                        self._wake()
                    if isinstance(message, Snapshot) and learning is None:
                        learning = asyncio.create_task(self._learn())
        finally:
            if learning is not None:
                learning.cancel()
                await asyncio.gather(learning, return_exceptions=True)

    def _drop(self, trouble: str) -> None:
        if self._seq is not None:
            log.warning("lost the state stream", extra={"replica": str(self.replica), "error": trouble})
        self._hello = self._seq = self._capacity = self._view = None
        self._residences = {}
        asyncio.get_running_loop().call_later(GRACE_SECONDS, self._wake)

    def _take(self, message: StateMessage) -> bool:
        """Fold one message in; True when planning would see a difference. Raises on a gap or a wrong engine."""
        if isinstance(message, Hello):
            check_protocol(message.protocol, f"engine {message.replica}")
            if message.replica != str(self.replica):
                raise Unavailable(f"{self.url} is engine {message.replica}, not {self.replica}")
            self._hello, self._seq, self._view = message, None, None
            return False
        if self._hello is None:
            raise Unavailable(f"{self.url}: no hello before the first message")
        if isinstance(message, Snapshot):
            self._seq, self._capacity, self._view = message.seq, _possible(message.capacity), None
            self._residences = {AdapterRef.parse(each.ref): _sane(each) for each in message.adapters}
            return True
        if self._seq is None or message.seq != self._seq + 1:
            raise Unavailable(f"{self.url}: gap in the state stream")
        self._seq = message.seq
        return isinstance(message, Delta) and self._apply(message)

    def _apply(self, delta: Delta) -> bool:
        self._capacity, self._view = (delta.capacity and _possible(delta.capacity)) or self._capacity, None
        changed = False
        for each in map(_sane, delta.adapters):
            ref = AdapterRef.parse(each.ref)
            changed |= _shown(self._residences.get(ref)) != _shown(each)
            if each.residency == "absent" and not each.message:
                self._residences.pop(ref, None)
            else:
                self._residences[ref] = each
        return changed

    async def _learn(self) -> None:
        """Ask once per boot what the engine serves."""
        failures = 0
        while self._hello is not None and (self._model is None or self._model[0] != self._hello.boot):
            boot = self._hello.boot
            try:
                self._model, self._view = (boot, await self.client.model()), None
                self._wake()
            except LoraplaneError as error:
                failures += 1
                log.warning("no model info yet", extra={"replica": str(self.replica), "error": error.message})
                await asyncio.sleep(_RECONNECT.delay(failures))


def _reachable(replica: Replica) -> bool:
    return replica.running and bool(replica.address) and replica.admin_port > 0


def _admin_url(replica: Replica) -> str:
    return f"http://{replica.address}:{replica.admin_port}"


def _sane(residence: Residence) -> Residence:
    """As it is, its words cut to what a status bears. Raises Unavailable for what no engine in its senses says: a
    plan that was made with it would be none.
    """
    sane = 0 <= residence.bytes <= _BYTES_MAX and 0 <= residence.since <= _SINCE_MAX and is_digest(residence.digest)
    if not sane:
        raise Unavailable(f"what is told of {residence.ref} cannot be")
    if len(residence.message) <= _WORDS_MAX:
        return residence
    return msgspec.structs.replace(residence, message=f"{residence.message[: _WORDS_MAX - 3]}...")


def _possible(capacity: Capacity) -> Capacity:
    """Raises Unavailable for numbers that are none of a machine's; a pool's status would not be taken with them."""
    if not all(0 <= number <= _BYTES_MAX for number in msgspec.structs.astuple(capacity)):
        raise Unavailable("the capacity that is told cannot be")
    return capacity


def _shown(residence: Residence | None) -> object:
    """What planning looks at; requests that come and go (`in_use`) are not news."""
    if residence is None or (residence.residency == "absent" and not residence.message):
        return None
    r = residence
    return (r.digest, r.residency, r.pinned, r.warm_wanted, r.message)
