"""Which adapters this engine holds in memory, by whose wish, and who may take their place in the host tier.

Bytes are kept per digest (`Image`), marks and users per id (`Adapter`): two ids of equal bytes share one copy.
An image leaves the host only while no request of any of its ids is queued or running, and while none of them
is warm or pinned by the operator's wish: what a request brings in never displaces those. Only the operator's
own wish for another version of the same adapter does.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import msgspec

from loraplane_core.errors import ArtifactRejected, InsufficientMemory, LoraplaneError, Unavailable
from loraplane_engine.adapters.device import DeviceTier
from loraplane_engine.adapters.host import HostLoader
from loraplane_engine.adapters.image import IMAGE_BROKEN, Layout, Manifest, broken, read_manifest
from loraplane_engine.adapters.room import Held, HostRoom, check_pin, keeps_place
from loraplane_engine.adapters.table import DeviceTable
from loraplane_engine.adapters.words import Adapter, Image, Limits
from loraplane_engine.kernels.contract import GroupedLora, SiteGroup
from loraplane_engine.memory.arena import Arena
from loraplane_engine.messages import AdapterFailed, AdapterKey, AdapterState, FromCore, LoadAdapter

#: A load that has waited this long for room is overtaken by none that came later.
PASS_SECONDS = 1.0
#: An image that was just read stays this long for the request that it was read for.
KEEP_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A load that found no room in the host tier yet."""

    message: LoadAdapter
    path: Path
    manifest: Manifest
    data_start: int
    since: float

    @property
    def until(self) -> float:
        return self.since + self.message.wait_s


class Residency:
    """`emit` hears every change. `row` of an image is its only name in a batch."""

    def __init__(
        self,
        *,
        arena: Arena,
        table: DeviceTable,
        lora: GroupedLora,
        layout: Layout,
        groups: list[SiteGroup],
        limits: Limits,
        wake: Callable[[], None],
        emit: Callable[[FromCore], None],
        clock: Callable[[], float],
    ) -> None:
        self.limits = limits
        self.adapters: dict[AdapterKey, Adapter] = {}
        self.images: dict[str, Image] = {}
        self.device = DeviceTier(
            arena=arena,
            table=table,
            lora=lora,
            layout=layout,
            limits=limits,
            images=self.images,
            moved=self._report_all,
            clock=clock,
        )
        self.host_used = 0
        self._layout, self._emit, self._clock = layout, emit, clock
        self._widths = {
            site: (group.in_features, width)
            for group in groups
            for site, width in zip(group.sites, group.outputs, strict=True)
        }
        self._loader = HostLoader(pin=arena.bytes.is_cuda, wake=wake)
        self._waiting: dict[AdapterKey, _Waiting] = {}
        self._freed = False  # something may have become free for them
        self._keeps_end = math.inf  # when the next image that is kept for a moment may go

    # --- ids: load, mark, use, unload

    def load(self, message: LoadAdapter) -> None:
        """Begin to hold an id. Answered by AdapterState, at once or when the image is read, or AdapterFailed."""
        known = self.adapters.get(message.key)
        if known is not None:
            known.drain_until = None
            known.warm_wanted = known.warm_wanted or message.warm_wanted
            self.report(known)
            return
        path = Path(message.image)
        try:
            manifest, start = read_manifest(path)
            self._check(path, manifest, message.key)
        except (LoraplaneError, OSError) as error:
            self._fail(message.key, error)
            return
        self._waiting[message.key] = _Waiting(message, path, manifest, start, self._clock())
        self._freed = True
        self.place_waiting()

    def mark(self, key: AdapterKey, pinned: bool | None, warm_wanted: bool | None) -> None:
        """Answered by AdapterState; a pin that does not fit by AdapterFailed before it, and the other mark stands.

        A load that waits for room becomes the operator's wish, and is answered as a load.
        """
        adapter, waiting = self.adapters.get(key), self._waiting.get(key)
        if waiting is not None and warm_wanted:
            message = msgspec.structs.replace(waiting.message, warm_wanted=True)
            self._waiting[key] = replace(waiting, message=message)
            self._freed = True
            self.place_waiting()
            return
        if adapter is None:
            self._emit(_absent(key, 0))
            return
        self._freed, adapter.image.kept_until = True, 0.0
        if warm_wanted is not None:
            adapter.warm_wanted = warm_wanted
        if pinned is not None:
            try:
                self._pin(adapter, pinned)
            except InsufficientMemory as error:
                self._fail(key, error)
        self.report(adapter)

    def use(self, adapter: Adapter, request: str) -> None:
        adapter.requests.add(request)
        adapter.image.last_used, adapter.image.kept_until = self._clock(), 0.0
        self.report(adapter)

    def release(self, adapter: Adapter, request: str) -> None:
        """The request is over, however it ended. Idempotent; completes an unload that waited for it."""
        if request not in adapter.requests:
            return
        adapter.requests.discard(request)
        adapter.image.running.discard(request)
        self._freed = self._freed or not adapter.requests
        if adapter.drain_until is not None and not adapter.requests:
            self.drop(adapter)
        else:
            self.report(adapter)

    def unload(self, key: AdapterKey, until: float) -> None:
        """Refuse new requests from now on; the id goes when its last request is released.

        Its reservations end now: who comes in its place need not wait to be promised the room.
        """
        self._waiting.pop(key, None)
        adapter = self.adapters.get(key)
        if adapter is None:
            self._emit(_absent(key, 0))
            return
        self._freed, adapter.warm_wanted = True, False
        self._pin(adapter, False)
        if adapter.requests:
            adapter.drain_until = until
            self.report(adapter)
        else:
            self.drop(adapter)

    def drop(self, adapter: Adapter) -> None:
        """Forget an id that no request uses; its image goes with the last of its ids."""
        if self.adapters.pop(adapter.key, None) is None:
            return
        image, self._freed = adapter.image, True
        del image.adapters[adapter.key]
        if not image.adapters:
            self.device.leave(image)
            self.host_used -= image.bytes
            del self.images[image.digest]
        self._emit(_absent(adapter.key, image.manifest.rank))

    def draining(self) -> Iterator[Adapter]:
        return (adapter for adapter in self.adapters.values() if adapter.drain_until is not None)

    # --- host tier

    @property
    def loading(self) -> bool:
        return self._loader.pending > 0

    @property
    def waiting(self) -> int:
        """Loads that wait for room in the host tier."""
        return len(self._waiting)

    @property
    def host_reserved(self) -> int:
        return sum(image.bytes for image in self.images.values() if image.warm_wanted or image.pinned)

    def collect(self) -> Iterator[Adapter]:
        """Take over images whose reading ended; yields adapters that failed, for their requests to be failed."""
        for digest, future in self._loader.finished():
            image = self.images.get(digest)
            if image is None or image.host is not None:
                continue  # unloaded meanwhile
            error, self._freed = future.exception(), True
            if error is None:
                image.host = future.result()
                image.kept_until = 0.0 if image.warm_wanted else self._clock() + KEEP_SECONDS
                self._report_all(image)
                continue
            for adapter in image.ids():
                self._fail(adapter.key, error)
                yield adapter

    def place_waiting(self) -> None:
        """Give waiting loads the room there is now: the operator's first, else who came first; refuse the late."""
        now, blocked = self._clock(), False
        due = [waiting.until for waiting in self._waiting.values()]
        if not self._waiting or not (self._freed or now >= min(*due, self._keeps_end)):
            return
        self._freed = False
        self._keeps_end = min((i.kept_until for i in self.images.values() if i.kept_until > now), default=math.inf)
        cold: HostRoom | None = None  # the same for all that requests bring in, until one is placed
        for waiting in sorted(self._waiting.values(), key=lambda each: not each.message.warm_wanted):
            key = waiting.message.key
            try:
                if waiting.message.warm_wanted:
                    room = self._room(key.ref)
                else:
                    room = cold = cold or self._room(None)
                if not blocked and self._place(waiting, room):
                    del self._waiting[key]
                    cold = None
                    continue
                if now >= waiting.until:
                    raise self._too_late(waiting)
            except InsufficientMemory as error:
                del self._waiting[key]
                self._fail(key, error)
                continue
            blocked = blocked or now - waiting.since >= PASS_SECONDS

    def close(self) -> None:
        self._loader.close()

    def _place(self, waiting: _Waiting, room: HostRoom) -> bool:
        message, manifest = waiting.message, waiting.manifest
        image = self.images.get(manifest.digest)
        if image is None:
            victims = room.victims(manifest.data_bytes)
            if victims is None:
                return False
            for digest in victims:
                for adapter in self.images[digest].ids():
                    self.drop(adapter)
            image = self.images[manifest.digest] = Image(manifest.digest, manifest, last_used=self._clock())
            self.host_used += image.bytes
            self._loader.start(manifest.digest, waiting.path, manifest, waiting.data_start)
        adapter = Adapter(message.key, image, warm_wanted=message.warm_wanted)
        self.adapters[message.key] = image.adapters[message.key] = adapter
        self.report(adapter)
        return True

    def _too_late(self, waiting: _Waiting) -> InsufficientMemory:
        return InsufficientMemory(
            f"the adapter needs {waiting.manifest.data_bytes} bytes of host memory; for {waiting.message.wait_s:g} "
            f"seconds adapters that are warm or in use have held {self.host_used} of {self.limits.host_bytes}"
        )

    def _room(self, newcomer: str | None) -> HostRoom:
        """As a ref that shall be warm sees it, or (None) what a request brings in."""
        return HostRoom(self._held(newcomer), self.limits.host_bytes)

    def _held(self, newcomer: str | None) -> Iterator[Held]:
        now = self._clock()
        for image in self.images.values():
            marked = [each for each in image.adapters.values() if each.warm_wanted or each.pinned]
            yield Held(
                digest=image.digest,
                bytes=image.bytes,
                reserved=keeps_place([(each.key.ref, each.pinned) for each in marked], newcomer),
                busy=image.busy or image.kept_until > now,
                order=(bool(marked), image.row is not None, image.last_used),
            )

    def _check(self, path: Path, manifest: Manifest, key: AdapterKey) -> None:
        if manifest.layout != str(self._layout):
            raise broken(path, f"its layout is {manifest.layout}, this core reads {self._layout}")
        if manifest.digest != key.digest:
            raise broken(path, f"it holds {manifest.digest}, not {key.digest}")
        for entry in manifest.sites:
            widths = self._widths.get(entry.site)
            if widths != (entry.in_features, entry.out_features):
                raise ArtifactRejected(
                    f"the adapter's site {entry.site} is {entry.in_features} -> {entry.out_features}, the base's "
                    f"{'does not exist' if widths is None else f'{widths[0]} -> {widths[1]}'}",
                    code="shape_mismatch",
                )
        if manifest.rank > self.limits.max_rank:
            raise ArtifactRejected(
                f"the adapter has rank {manifest.rank}; this engine takes {self.limits.max_rank}", code="rank_too_high"
            )
        budget = self.limits.budget_pages * self._layout.page_bytes
        if manifest.data_bytes > budget:
            raise InsufficientMemory(
                f"the adapter needs {manifest.data_bytes} bytes of device memory; adapters may take {budget}"
            )

    # --- device tier

    @property
    def device_reserved(self) -> int:
        return sum(image.bytes for image in self.device.pinned())

    def report(self, adapter: Adapter) -> None:
        image = adapter.image
        residency: Literal["device", "host"] = "device" if image.row is not None else "host"
        if image.host is None:
            return  # still loading: the first report is the answer to the load
        self._emit(
            AdapterState(
                key=adapter.key,
                residency=residency,
                bytes=image.bytes,
                rank=image.manifest.rank,
                pinned=adapter.pinned,
                warm_wanted=adapter.warm_wanted,
                in_use=len(adapter.requests),
            )
        )

    def _report_all(self, image: Image) -> None:
        for adapter in image.ids():
            self.report(adapter)

    def _pin(self, adapter: Adapter, pinned: bool) -> None:
        image = adapter.image
        if pinned and not image.pinned:
            budget = self.limits.budget_pages * self._layout.page_bytes
            check_pin(image.bytes, [other.bytes for other in self.device.pinned()], budget, self.limits.slots)
        adapter.pinned = pinned
        if pinned:
            self.device.bring_pinned(image)
        elif not image.pinned:
            self.device.blocked.pop(image, None)

    def _fail(self, key: AdapterKey, error: BaseException) -> None:
        if not isinstance(error, LoraplaneError):
            error = Unavailable(f"the engine image cannot be read: {type(error).__name__}", code=IMAGE_BROKEN)
        self._emit(AdapterFailed(key=key, code=error.code, message=error.message))


def _absent(key: AdapterKey, rank: int) -> AdapterState:
    return AdapterState(key=key, residency="absent", bytes=0, rank=rank, pinned=False, warm_wanted=False, in_use=0)
