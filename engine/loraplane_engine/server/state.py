"""The /state streams: one view, many readers, changes coalesced, slow readers dropped."""

import asyncio
import contextlib
import logging
import statistics
import time
from collections.abc import Awaitable, Callable

from loraplane_core.wire import encode
from loraplane_core.wire.engine import (
    DELTA_SECONDS,
    HEARTBEAT_SECONDS,
    Capacity,
    Delta,
    Heartbeat,
    Hello,
    Load,
    Residence,
    Snapshot,
    StateMessage,
)
from loraplane_engine.messages import StepStats

log = logging.getLogger(__name__)

#: Messages a reader may be behind. At ten a second that is far more than the second after which a
#: reader gives the engine up anyway.
QUEUE = 64


class _Reader:
    def __init__(self, task: "asyncio.Task[object] | None") -> None:
        self.queue: asyncio.Queue[bytes | None] = asyncio.Queue(QUEUE)
        self.task = task


class StateHub:
    """`snapshot` gives all residences; `default_bytes` is the size assumed while no adapter is known."""

    def __init__(self, *, snapshot: Callable[[], list[Residence]], slots: int | None, max_rank: int) -> None:
        self._snapshot = snapshot
        self._slots = slots
        self._max_rank = max_rank
        self._max_model_len = 0
        self._default_bytes = 1
        self._stats: StepStats | None = None
        self._changed: dict[str, Residence] = {}
        self._told: tuple[Capacity, Load] | None = None
        self._readers: set[_Reader] = set()
        self._seq = 0
        self._sent_at = time.monotonic()
        self._dirty = asyncio.Event()

    @property
    def stats(self) -> StepStats | None:
        return self._stats

    def model(self, *, max_model_len: int, default_bytes: int) -> None:
        self._max_model_len = max_model_len
        self._default_bytes = max(1, default_bytes)

    def changed(self, residence: Residence) -> None:
        self._changed[residence.ref] = residence
        self._dirty.set()

    def stepped(self, stats: StepStats) -> None:
        self._stats = stats
        self._dirty.set()

    def capacity(self) -> Capacity:
        stats = self._stats
        if stats is None:
            return Capacity(slots=0, adapter_bytes=0, used_bytes=0, host_bytes=0, kv_tokens=0, kv_tokens_displaced=0)
        sizes = [each.bytes for each in self._snapshot() if each.bytes]
        fit = stats.adapter_budget_bytes // int(statistics.median(sizes) if sizes else self._default_bytes)
        return Capacity(
            slots=fit if self._slots is None else min(fit, self._slots),
            adapter_bytes=stats.adapter_budget_bytes,
            used_bytes=stats.adapter_used_bytes,
            reserved_bytes=stats.adapter_reserved_bytes,
            host_bytes=stats.host_budget_bytes,
            host_used_bytes=stats.host_used_bytes,
            host_reserved_bytes=stats.host_reserved_bytes,
            kv_tokens=stats.kv_tokens_total,
            kv_tokens_displaced=stats.kv_tokens_displaced,
            max_rank=self._max_rank,
            max_model_len=self._max_model_len,
        )

    def load(self) -> Load:
        stats = self._stats
        if stats is None:
            return Load()
        return Load(running=stats.running, waiting=stats.waiting, kv_tokens_free=stats.kv_tokens_free)

    async def run(self) -> None:
        """Send deltas and heartbeats until cancelled."""
        while True:
            quiet = HEARTBEAT_SECONDS - (time.monotonic() - self._sent_at)
            if quiet <= 0:  # also while something changes that readers are not told
                self._send(Heartbeat(seq=self._next_seq()))
                continue
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(quiet):
                    await self._dirty.wait()
                self._dirty.clear()
                self.flush()
                await asyncio.sleep(DELTA_SECONDS)

    async def serve(
        self, write: Callable[[bytes], Awaitable[None]], *, replica: str, boot: str, base: str, base_digest: str
    ) -> None:
        """Write one reader's lines until the engine stops. Cancels itself when the reader falls behind."""
        self.flush()  # so that nothing older than the snapshot comes after it
        reader = _Reader(asyncio.current_task())
        capacity, load = self.capacity(), self.load()
        hello = Hello(replica=replica, boot=boot, base=base, base_digest=base_digest, capacity=capacity)
        snapshot = Snapshot(seq=self._seq, adapters=self._snapshot(), capacity=capacity, load=load)
        self._readers.add(reader)
        try:
            await write(encode(hello) + b"\n" + encode(snapshot) + b"\n")
            while (line := await reader.queue.get()) is not None:
                await write(line)
        finally:
            self._readers.discard(reader)

    def close(self) -> None:
        """End all streams, properly where the reader keeps up."""
        readers, self._readers = self._readers, set()
        for reader in readers:
            self._put(reader, None)

    def _next_seq(self) -> int:
        self._seq += 1
        return self._seq

    def flush(self) -> None:
        """Tell all readers what has changed since the last delta."""
        changed, self._changed = self._changed, {}
        now = self.capacity(), self.load()
        before, self._told = self._told, now
        if not changed and now == before:
            return
        self._send(
            Delta(
                seq=self._next_seq(),
                adapters=list(changed.values()),
                capacity=now[0] if before is None or now[0] != before[0] else None,
                load=now[1] if before is None or now[1] != before[1] else None,
            )
        )

    def _send(self, message: StateMessage) -> None:
        self._sent_at = time.monotonic()
        line = encode(message) + b"\n"
        for reader in list(self._readers):
            self._put(reader, line)

    def _put(self, reader: _Reader, line: bytes | None) -> None:
        try:
            reader.queue.put_nowait(line)
        except asyncio.QueueFull:
            # It may be stuck in a write that never ends, so it is not asked but cancelled.
            log.warning("a reader of /state fell %d messages behind and is dropped", QUEUE)
            self._readers.discard(reader)
            if reader.task is not None:
                reader.task.cancel()
