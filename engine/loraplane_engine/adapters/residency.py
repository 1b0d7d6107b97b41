"""Which adapters this engine holds, on which tier, and who may take their place.

Bytes are kept per digest (`Image`), marks and users per id (`Adapter`): two ids of equal bytes share one copy.
An image on the device keeps its host copy, which nobody changes. It leaves the device only while no request
runs on it, and the host only while no request of any of its ids is queued or running.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

from loraplane_core.errors import ArtifactRejected, InsufficientMemory, LoraplaneError, Unavailable
from loraplane_engine.adapters.host import HostImage, HostLoader
from loraplane_engine.adapters.image import IMAGE_BROKEN, Layout, Manifest, broken, read_manifest
from loraplane_engine.adapters.table import DeviceTable, TableEntry
from loraplane_engine.adapters.words import Adapter, Image, Limits
from loraplane_engine.kernels.contract import GroupedLora, SiteGroup
from loraplane_engine.memory.arena import Arena
from loraplane_engine.messages import AdapterFailed, AdapterKey, AdapterState, FromCore, LoadAdapter


class Residency:
    """`emit` hears every change. `row_of` an image is its only name in a batch."""

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
        self._arena, self._table, self._lora, self._layout = arena, table, lora, layout
        self._emit, self._clock = emit, clock
        self._widths = {
            site: (group.in_features, width)
            for group in groups
            for site, width in zip(group.sites, group.outputs, strict=True)
        }
        self._loader = HostLoader(pin=arena.bytes.is_cuda, wake=wake)
        self.adapters: dict[AdapterKey, Adapter] = {}
        self.images: dict[str, Image] = {}
        self.host_used = 0
        self.swaps_in = 0
        self.evictions = 0

    # --- ids: load, mark, use, unload

    def load(self, message: LoadAdapter) -> None:
        """Begin to hold an id. Answered by AdapterState, at once or when the image is read, or AdapterFailed."""
        known = self.adapters.get(message.key)
        try:
            if known is None:
                known = self._add(message)
            known.drain_until = None
            known.warm_wanted = known.warm_wanted or message.warm_wanted
            if message.pinned:
                self._pin(known)
        except (LoraplaneError, OSError) as error:
            if known is not None and message.key in self.adapters and not known.requests and known.image.host is None:
                self.drop(known)
            self._fail(message.key, error)
            return
        if known.image.host is not None:
            self.report(known)

    def mark(self, key: AdapterKey, pinned: bool | None, warm_wanted: bool | None) -> None:
        adapter = self.adapters.get(key)
        if adapter is None:
            return
        if warm_wanted is not None:
            adapter.warm_wanted = warm_wanted
        try:
            if pinned:
                self._pin(adapter)
            elif pinned is False:
                adapter.pinned = False
        except LoraplaneError as error:
            self._fail(key, error)
        self.report(adapter)

    def use(self, adapter: Adapter, request: str) -> None:
        adapter.requests.add(request)
        adapter.image.last_used = self._clock()
        self.report(adapter)

    def release(self, adapter: Adapter, request: str) -> None:
        """The request is over, however it ended. Idempotent; completes an unload that waited for it."""
        if request not in adapter.requests:
            return
        adapter.requests.discard(request)
        adapter.image.running.discard(request)
        if adapter.drain_until is not None and not adapter.requests:
            self.drop(adapter)
        else:
            self.report(adapter)

    def unload(self, key: AdapterKey, until: float) -> None:
        """Refuse new requests from now on; the id goes when its last request is released."""
        adapter = self.adapters.get(key)
        if adapter is None:
            self._emit(_absent(key, 0))
        elif adapter.requests:
            adapter.drain_until = until
        else:
            self.drop(adapter)

    def drop(self, adapter: Adapter) -> None:
        """Forget an id that no request uses; its image goes with the last of its ids."""
        if self.adapters.pop(adapter.key, None) is None:
            return
        image = adapter.image
        image.adapters.discard(adapter.key)
        if not image.adapters:
            self._leave_device(image)
            self.host_used -= image.bytes
            del self.images[image.digest]
        self._emit(_absent(adapter.key, image.manifest.rank))

    def draining(self) -> Iterator[Adapter]:
        return (adapter for adapter in self.adapters.values() if adapter.drain_until is not None)

    # --- host tier

    @property
    def loading(self) -> bool:
        return self._loader.pending > 0

    def collect(self) -> Iterator[Adapter]:
        """Take over images whose reading ended; yields adapters that failed, for their requests to be failed."""
        for digest, future in self._loader.finished():
            image = self.images.get(digest)
            if image is None or image.host is not None:
                continue  # unloaded meanwhile
            error = future.exception()
            if error is None:
                image.host = future.result()
                if not (self.is_pinned(image) and self.to_device(image)):
                    for adapter in self._ids(image):
                        self.report(adapter)
                continue
            for adapter in self._ids(image):
                self._fail(adapter.key, error)
                yield adapter

    def load_pinned(self) -> None:
        """Bring pinned images to the device that found no room when they were pinned."""
        for image in self.images.values():
            if image.row is None and image.host is not None and self.is_pinned(image):
                self.to_device(image)

    def close(self) -> None:
        self._loader.close()

    def _add(self, message: LoadAdapter) -> Adapter:
        image = self.images.get(message.key.digest)
        if image is None:
            path = Path(message.image)
            manifest, start = read_manifest(path)
            self._check(path, manifest, message.key)
            self._make_host_room(manifest.data_bytes)
            image = self.images[manifest.digest] = Image(manifest.digest, manifest, last_used=self._clock())
            self.host_used += image.bytes
            self._loader.start(manifest.digest, path, manifest, start)
        adapter = self.adapters[message.key] = Adapter(message.key, image)
        image.adapters.add(message.key)
        return adapter

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
        if manifest.pages > self.limits.budget_pages:
            raise InsufficientMemory(
                f"the adapter needs {manifest.pages} pages of {self._arena.page_bytes} bytes; "
                f"adapters may take {self.limits.budget_pages}"
            )

    def _make_host_room(self, need: int) -> None:
        limit = self.limits.host_bytes
        idle = [
            image
            for image in self.images.values()
            if image.host is not None
            and not any(a.requests or a.pinned or a.drain_until is not None for a in self._ids(image))
        ]
        idle.sort(
            key=lambda image: (any(a.warm_wanted for a in self._ids(image)), image.row is not None, image.last_used)
        )
        if self.host_used + need > limit:
            held = self.host_used - sum(image.bytes for image in idle)
            if held + need > limit:
                raise InsufficientMemory(
                    f"the adapter needs {need} bytes of host memory; adapters in use or pinned hold {held} of {limit}"
                )
        while self.host_used + need > limit:
            for adapter in self._ids(idle.pop(0)):
                self.drop(adapter)

    # --- device tier

    @property
    def used_pages(self) -> int:
        return self._arena.pages.used["adapter"]

    @property
    def on_device(self) -> int:
        return sum(image.row is not None for image in self.images.values())

    def can_ever_fit(self, image: Image) -> bool:
        """Whether the image fits the budget beside the pinned ones."""
        pinned = [other for other in self.images.values() if other is not image and self.is_pinned(other)]
        slots = self.limits.slots
        return sum(other.pages for other in pinned) + image.pages <= self.limits.budget_pages and (
            slots is None or len(pinned) < slots
        )

    def to_device(self, image: Image) -> bool:
        """Copy the image into the arena, evicting idle ones; False when it does not fit now."""
        if image.row is not None:
            return True
        if image.host is None:
            return False
        if not self._could_fit(image):
            return False
        slots = self.limits.slots
        while (
            slots is not None and self.on_device >= slots
        ) or self.used_pages + image.pages > self.limits.budget_pages:
            if not self.evict_one():
                return False
        runs = _runs(image.manifest)
        lengths = [length for _, length in runs]
        while (starts := self._arena.take_runs(lengths)) is None:
            if not self.evict_one():
                return False
        self._copy(image, image.host, runs, starts)
        for adapter in self._ids(image):
            self.report(adapter)
        return True

    def _could_fit(self, image: Image) -> bool:
        """Whether evicting every idle image would make room: else none is evicted for nothing."""
        return not self.over_budget(image) and self._arena.pages.free + self.evictable_pages >= image.pages

    def _evictable(self) -> list[Image]:
        return [i for i in self.images.values() if i.row is not None and not i.running and not self.is_pinned(i)]

    @property
    def evictable_pages(self) -> int:
        return sum(image.pages for image in self._evictable())

    def over_budget(self, image: Image) -> bool:
        """Whether it is the adapters' budget or the slots that keep `image` out, and not the free pages."""
        idle = self._evictable()
        pages, slots = sum(other.pages for other in idle), self.limits.slots
        return self.used_pages - pages + image.pages > self.limits.budget_pages or (
            slots is not None and self.on_device - len(idle) >= slots
        )

    def evict_one(self, keep: Image | None = None) -> bool:
        """Free the device copy of the idle image that costs least to lose. False when there is none.

        Reload cost per byte is the same for all images of the host tier, so recency decides after the marks.
        """
        idle = [image for image in self._evictable() if image is not keep]
        if not idle:
            return False
        victim = min(idle, key=lambda image: (any(a.warm_wanted for a in self._ids(image)), image.last_used))
        self._leave_device(victim)
        self.evictions += 1
        for adapter in self._ids(victim):
            self.report(adapter)
        return True

    def start(self, image: Image, request: str) -> None:
        """The request runs on the image, which may not leave the device until `stop`."""
        if not image.running:
            image.running_since = self._clock()
        image.running.add(request)
        image.last_used = self._clock()

    def stop(self, image: Image, request: str) -> None:
        image.running.discard(request)
        image.last_used = self._clock()

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

    def _copy(self, image: Image, host: HostImage, runs: list[tuple[int, int]], starts: list[int]) -> None:
        page_bytes = self._arena.page_bytes
        page_of: list[int] = [0] * image.pages
        for (first, length), start in zip(runs, starts, strict=True):
            page_of[first : first + length] = range(start, start + length)
        for first, count in _contiguous(page_of):
            self._arena.copy_in(page_of[first], host.data[first * page_bytes : (first + count) * page_bytes])
        item = self._layout.item_bytes

        def element(offset: int) -> int:
            page, inside = divmod(offset, page_bytes)
            return (page_of[page] * page_bytes + inside) // item

        image.device_pages = page_of
        image.row = self._table.add(
            (entry.site, TableEntry(element(entry.a), element(entry.b), entry.rank, entry.scale))
            for entry in image.manifest.sites
        )
        self.swaps_in += 1

    def _leave_device(self, image: Image) -> None:
        if image.row is None:
            return
        self._lora.forget(image.row)
        self._table.remove(image.row)
        self._arena.free_runs(image.device_pages)
        image.row, image.device_pages = None, []

    def _pin(self, adapter: Adapter) -> None:
        if not adapter.pinned and not self.can_ever_fit(adapter.image):
            raise InsufficientMemory(
                f"pinning needs {adapter.image.pages} pages; adapters may take {self.limits.budget_pages}, "
                "and pinned ones hold the rest"
            )
        adapter.pinned = True
        self.to_device(adapter.image)

    def is_pinned(self, image: Image) -> bool:
        return any(adapter.pinned for adapter in self._ids(image))

    def _ids(self, image: Image) -> list[Adapter]:
        return [self.adapters[key] for key in sorted(image.adapters, key=lambda key: key.ref)]

    def _fail(self, key: AdapterKey, error: BaseException) -> None:
        if not isinstance(error, LoraplaneError):
            error = Unavailable(f"the engine image cannot be read: {type(error).__name__}", code=IMAGE_BROKEN)
        self._emit(AdapterFailed(key=key, code=error.code, message=error.message))


def _absent(key: AdapterKey, rank: int) -> AdapterState:
    return AdapterState(key=key, residency="absent", bytes=0, rank=rank, pinned=False, warm_wanted=False, in_use=0)


def _runs(manifest: Manifest) -> list[tuple[int, int]]:
    """(first page, length) of everything that must stay contiguous, single pages included, in page order."""
    long = dict(manifest.runs)
    runs, page = [], 0
    while page < manifest.pages:
        length = long.get(page, 1)
        runs.append((page, length))
        page += length
    return runs


def _contiguous(pages: list[int]) -> Iterator[tuple[int, int]]:
    """(first index, count) of the maximal stretches of `pages` that rise by one: one copy each."""
    first = 0
    for index in range(1, len(pages) + 1):
        if index == len(pages) or pages[index] != pages[index - 1] + 1:
            yield first, index - first
            first = index
