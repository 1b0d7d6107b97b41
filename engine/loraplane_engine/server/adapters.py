"""Which adapters this engine holds, and the only way to bring one in or out.

The core owns host and device; this owns disk, loading and tombstones, and merges both into one
Residence per version. A version's digest never changes: another digest for a known ref is refused.
"""

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from loraplane_core.errors import (
    DeadlineExceeded,
    DigestConflict,
    LoraplaneError,
    NotFound,
    NotWarm,
    Unavailable,
    Withdrawn,
)
from loraplane_core.identity import AdapterId
from loraplane_core.wire.engine import Pin, PutAdapter, Residence, ResidencyClass
from loraplane_engine import messages as m
from loraplane_engine.adapters.image import IMAGE_BROKEN
from loraplane_engine.server.answers import Answers
from loraplane_engine.server.core_client import CoreClient
from loraplane_engine.server.failures import Failures
from loraplane_engine.server.images import Image, ImageStore

log = logging.getLogger(__name__)

#: How long the core may take to map an image, once it has room for it.
CORE_LOAD_SECONDS = 30.0
#: How long it may wait for that room while adapters in use hold it.
HOST_ROOM_SECONDS = 45.0
#: How long a request waits for a cold adapter.
REQUEST_LOAD_SECONDS = 60.0
#: Beyond an unload's drain time, for the core to abort and free.
UNLOAD_GRACE_SECONDS = 5.0
#: Refs without weights here that are remembered: tombstones, and digests seen.
MEMORY = 10_000
#: How long a withdrawn version is refused to requests: gateways that still route to it learn better meanwhile. After
#: that a request for it means that it is served again, by an object that came back, and this replica is not its home.
TOMBSTONE_SECONDS = 30.0

#: (tier the load came from, seconds)
LoadObserver = Callable[[str, float], None]


@dataclass
class _Entry:
    id: AdapterId
    core: m.AdapterState | None = None  # the core's last word; None = never given to it, or absent
    loading: bool = False
    wanted: bool = False  # while it loads: by the operator, not only by a request
    marking: asyncio.Lock = field(default_factory=asyncio.Lock)  # whose answer is whose
    since: float = field(default_factory=time.time)
    message: str = ""
    shown: ResidencyClass = "absent"
    folder: Path | None = None  # standalone: the artifact, from which its image is made again

    @property
    def key(self) -> m.AdapterKey:
        return m.AdapterKey(str(self.id.ref), self.id.digest)


class AdapterStore:
    """`on_change` is called with every Residence that changed; it must not block."""

    def __init__(
        self,
        core: CoreClient,
        *,
        on_change: Callable[[Residence], None],
        on_load: LoadObserver,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._core = core
        self._on_change = on_change
        self._on_load = on_load
        self._clock = clock
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._tombstones: OrderedDict[str, float] = OrderedDict()  # ref -> since when
        self._failures = Failures(clock)
        self._loads: dict[str, asyncio.Task[None]] = {}
        self._going: dict[str, asyncio.Event] = {}  # deletions under way; set when over
        self._answers = Answers()
        self._images: ImageStore | None = None

    async def attach(self, images: ImageStore) -> None:
        """The disk tier exists once the core has told its layout."""
        try:
            await images.open()
        except BaseException:
            await images.close()
            raise
        self._images = images

    def loading(self, digest: str) -> bool:
        return any(entry.loading and entry.id.digest == digest for entry in self._entries.values())

    def residences(self) -> list[Residence]:
        return [self._residence(entry) for entry in self._entries.values() if entry.shown != "absent" or entry.message]

    # -- for requests

    async def ensure(self, adapter: AdapterId, size: int) -> bool:
        """Make the adapter usable by the core; True when it had to be loaded. Raises why it cannot be."""
        entry = self._entry(adapter)
        if entry.core is not None:
            return False
        if str(adapter.ref) not in self._loads:
            self._failures.check(str(adapter.ref))
        try:
            async with asyncio.timeout(REQUEST_LOAD_SECONDS):
                await self._load(entry, size, warm_wanted=False)
        except TimeoutError as error:
            raise DeadlineExceeded(f"{adapter.ref} was not loaded within {REQUEST_LOAD_SECONDS:.0f} seconds") from error
        return True

    def lost(self, adapter: AdapterId) -> None:
        """The core evicted it just before a request came."""
        entry = self._entries.get(str(adapter.ref))
        if entry is not None:
            entry.core = None
            self._show(entry)

    # -- for the operator

    async def put(self, adapter: AdapterId, wanted: PutAdapter) -> Residence:
        """Idempotent; answers when warm. Raises NotWarm at the deadline, or why the load failed.

        A pin that does not fit is refused with InsufficientMemory; the adapter is warm all the same.
        """
        ref = str(adapter.ref)
        try:
            async with asyncio.timeout(wanted.deadline_s):
                while (going := self._going.get(ref)) is not None:
                    await going.wait()
                self._tombstones.pop(ref, None)
                entry = self._entry(adapter)
                self._failures.forget(ref)
                while entry.core is None or not await self._mark(entry, pinned=wanted.pinned, warm_wanted=True):
                    entry = self._entry(adapter)  # raises Withdrawn, where it was deleted meanwhile
                    await self._load(entry, wanted.bytes, warm_wanted=True)
        except TimeoutError as error:
            raise NotWarm(f"{adapter.ref} was not warm within {wanted.deadline_s:g} seconds") from error
        return self._well(entry)

    async def put_local(self, adapter: AdapterId, folder: Path) -> None:
        """Standalone: an adapter named on the command line."""
        entry = self._entry(adapter)
        entry.folder = folder
        await self._load(entry, 0, warm_wanted=True)

    async def pin(self, adapter: AdapterId, wanted: Pin) -> Residence:
        if str(adapter.ref) not in self._entries:
            raise NotFound(f"{adapter.ref} is not on this engine")
        entry = self._entry(adapter)
        try:
            async with asyncio.timeout(CORE_LOAD_SECONDS):
                if not await self._mark(entry, pinned=wanted.pinned, warm_wanted=wanted.warm):
                    raise NotFound(f"{adapter.ref} is not warm on this engine")
        except TimeoutError as error:
            raise DeadlineExceeded(f"{adapter.ref} was not marked in time") from error
        return self._well(entry)

    async def delete(self, adapter: AdapterId, drain_s: float) -> Residence:
        """Tombstone first, so that no new request gets in; then drain, free the memory and the disk."""
        ref = str(adapter.ref)
        entry = self._entries.get(ref)
        if entry is not None and entry.id.digest != adapter.digest:
            raise _conflict(adapter, entry)
        self._bury(ref)
        if entry is None:
            return Residence(ref=ref, digest=adapter.digest, residency="absent")
        gone = self._going[ref] = asyncio.Event()
        try:
            await self._leave(entry, drain_s)
        finally:
            gone.set()
            if self._going.get(ref) is gone:
                del self._going[ref]
        return self._residence(entry)

    async def _leave(self, entry: _Entry, drain_s: float) -> None:
        ref, digest = str(entry.id.ref), entry.id.digest
        load = self._loads.get(ref)
        if load is not None:
            load.cancel()
            await asyncio.wait([load])
        if load is not None and entry.core is None:
            self._core.send(m.UnloadAdapter(key=entry.key, drain_s=0))  # it may be about to map it
        if entry.core is not None:
            await self._unload(entry, drain_s)
        if not any(each.id.digest == digest for each in self._entries.values() if each is not entry):
            self._disk.remove(digest)
        entry.message = ""
        self._show(entry)
        if self._entries.get(ref) is entry:
            del self._entries[ref]

    # -- from the core

    def core_said(self, message: m.AdapterState | m.AdapterFailed) -> None:
        self._answers.said(message)
        entry = self._entries.get(message.key.ref)
        if entry is None or entry.id.digest != message.key.digest:
            if isinstance(message, m.AdapterState) and message.residency != "absent":
                # Withdrawn while the core was mapping it: nobody holds it, so it must not stay.
                self._core.send(m.UnloadAdapter(key=message.key, drain_s=0))
            return
        if isinstance(message, m.AdapterFailed):
            entry.message = message.message
        else:
            entry.core = message if message.residency != "absent" else None
        self._show(entry, force=True)

    async def close(self) -> None:
        tasks = list(self._loads.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._images is not None:
            await self._images.close()

    # -- inside

    @property
    def _disk(self) -> ImageStore:
        if self._images is None:
            raise Unavailable("the model is still loading")
        return self._images

    def _entry(self, adapter: AdapterId) -> _Entry:
        ref = str(adapter.ref)
        if ref in self._tombstones:
            if ref in self._going or self._clock() < self._tombstones[ref] + TOMBSTONE_SECONDS:
                raise Withdrawn(f"{ref} was withdrawn from this engine")
            del self._tombstones[ref]
        entry = self._entries.get(ref)
        if entry is None:
            entry = self._entries[ref] = _Entry(adapter)
            self._show(entry)
            self._forget_idle()
        elif entry.id.digest != adapter.digest:
            raise _conflict(adapter, entry)
        self._entries.move_to_end(ref)
        return entry

    async def _load(self, entry: _Entry, size: int, *, warm_wanted: bool) -> None:
        """Join the load under way or begin one; the load outlives a waiter that gives up."""
        ref = str(entry.id.ref)
        task = self._loads.get(ref)
        if warm_wanted and not entry.wanted:
            entry.wanted = True
            if task is not None:  # it may wait for room that only the operator's wish can claim
                self._core.send(m.MarkAdapter(key=entry.key, warm_wanted=True))
        if task is None:
            task = asyncio.create_task(self._run_load(entry, size))
            self._loads[ref] = task
            task.add_done_callback(lambda done: self._loaded(ref, entry, done))
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled() and ref in self._tombstones:
                raise Withdrawn(f"{ref} was withdrawn from this engine") from None
            raise

    async def _run_load(self, entry: _Entry, size: int) -> None:
        started = self._clock()
        entry.loading, entry.message = True, ""
        self._show(entry)
        tier, image = "disk", self._disk.find(entry.id.digest)
        if image is not None:
            try:
                await self._hand_over(entry, image)
            except LoraplaneError as error:
                if error.code != IMAGE_BROKEN:
                    raise
                log.warning("the image of %s is made again: %s", entry.id.ref, error.message)
                self._disk.discard(entry.id.digest, image)
                image = None
        if image is None:
            tier, image = "source", await self._image(entry, size)
            await self._hand_over(entry, image)
        self._on_load(tier, self._clock() - started)

    async def _hand_over(self, entry: _Entry, image: Image) -> None:
        path, room = str(image.path), HOST_ROOM_SECONDS
        with self._answers.about(entry.key) as words:
            self._core.send(m.LoadAdapter(key=entry.key, image=path, warm_wanted=entry.wanted, wait_s=room))
            try:
                async with asyncio.timeout(HOST_ROOM_SECONDS + CORE_LOAD_SECONDS):
                    while (await words.next()).residency == "absent":
                        pass  # of the time before
            except TimeoutError as error:
                raise DeadlineExceeded(f"{entry.id.ref} was not mapped in time") from error

    async def _image(self, entry: _Entry, size: int) -> Image:
        if entry.folder is not None:
            return await self._disk.local(entry.id.digest, entry.folder)
        return await self._disk.fetched(entry.id.digest, size)

    def _loaded(self, ref: str, entry: _Entry, task: "asyncio.Task[None]") -> None:
        self._loads.pop(ref, None)
        entry.loading = entry.wanted = False
        error = None if task.cancelled() else task.exception()
        if error is None:
            self._failures.forget(ref)
        else:
            known = error if isinstance(error, LoraplaneError) else Unavailable(f"loading {ref} failed")
            if known is not error:
                log.error("loading %s failed", ref, exc_info=error)
            entry.message = known.message
            self._failures.add(ref, known)
        self._show(entry, force=error is not None)

    async def _mark(self, entry: _Entry, *, pinned: bool, warm_wanted: bool | None) -> bool:
        """Tell the core the marks, unless it has them already; False when it has evicted the adapter meanwhile."""
        async with entry.marking:
            if entry.core is None or _has_marks(entry.core, pinned, warm_wanted):
                return entry.core is not None
            with self._answers.about(entry.key) as words:
                self._core.send(m.MarkAdapter(key=entry.key, pinned=pinned, warm_wanted=warm_wanted))
                while not _has_marks(state := await words.next(), pinned, warm_wanted):
                    if state.residency == "absent":
                        return False
        return True

    async def _unload(self, entry: _Entry, drain_s: float) -> None:
        with self._answers.about(entry.key) as words:
            self._core.send(m.UnloadAdapter(key=entry.key, drain_s=drain_s))
            try:
                async with asyncio.timeout(drain_s + UNLOAD_GRACE_SECONDS):
                    while (await words.next()).residency != "absent":
                        pass  # its requests end one by one
            except TimeoutError as error:
                raise DeadlineExceeded(f"{entry.id.ref} was not freed in time") from error

    def _bury(self, ref: str) -> None:
        self._tombstones[ref] = self._clock()
        self._tombstones.move_to_end(ref)
        while len(self._tombstones) > MEMORY:
            self._tombstones.popitem(last=False)

    def _forget_idle(self) -> None:
        """Entries of adapters that are nowhere cost memory only; keep the newest."""
        for ref in list(self._entries)[: max(0, len(self._entries) - MEMORY)]:
            if self._entries[ref].shown == "absent" and ref not in self._loads:
                del self._entries[ref]
                self._failures.forget(ref)

    def _class(self, entry: _Entry) -> ResidencyClass:
        if entry.core is not None and entry.core.residency != "absent":
            return entry.core.residency
        if entry.loading:
            return "loading"
        if str(entry.id.ref) in self._tombstones:  # the image may stay for another adapter of the same bytes
            return "absent"
        return "disk" if self._image_of(entry) is not None else "absent"

    def _show(self, entry: _Entry, *, force: bool = False) -> None:
        shown = self._class(entry)
        if shown != entry.shown:
            entry.shown, entry.since = shown, time.time()
        elif not force:
            return
        self._on_change(self._residence(entry))

    def _well(self, entry: _Entry) -> Residence:
        """What was refused before is no longer true."""
        if entry.message:
            entry.message = ""
            self._show(entry, force=True)
        return self._residence(entry)

    def _image_of(self, entry: _Entry) -> Image | None:
        return None if self._images is None else self._images.get(entry.id.digest)

    def _residence(self, entry: _Entry) -> Residence:
        """Its size is told from the disk on, so that whoever plans its place knows what it takes in memory."""
        core, image = entry.core, self._image_of(entry)
        return Residence(
            ref=str(entry.id.ref),
            digest=entry.id.digest,
            residency=entry.shown,
            bytes=core.bytes if core else image.bytes if image else 0,
            rank=core.rank if core else image.rank if image else 0,
            pinned=core.pinned if core else False,
            warm_wanted=core.warm_wanted if core else False,
            in_use=core.in_use if core else 0,
            since=entry.since,
            message=entry.message,
        )


def _has_marks(state: m.AdapterState, pinned: bool, warm_wanted: bool | None) -> bool:
    return state.residency != "absent" and state.pinned == pinned and warm_wanted in (None, state.warm_wanted)


def _conflict(adapter: AdapterId, entry: _Entry) -> DigestConflict:
    return DigestConflict(f"{adapter.ref} has digest {entry.id.digest[:12]} on this engine, not {adapter.digest[:12]}")
