"""The device tier: which images lie in the arena, and which make place.

An image on the device keeps its host copy, which nobody changes. It leaves only while no request runs on it
and it is not pinned.
"""

from collections.abc import Callable, Iterator

from loraplane_engine.adapters.host import HostImage
from loraplane_engine.adapters.image import Layout, Manifest
from loraplane_engine.adapters.table import DeviceTable, TableEntry
from loraplane_engine.adapters.words import Image, Limits
from loraplane_engine.kernels.contract import GroupedLora
from loraplane_engine.memory.arena import Arena


class DeviceTier:
    """`images` are residency's, by digest. `moved` hears of every image that came or went."""

    def __init__(
        self,
        *,
        arena: Arena,
        table: DeviceTable,
        lora: GroupedLora,
        layout: Layout,
        limits: Limits,
        images: dict[str, Image],
        moved: Callable[[Image], None],
        clock: Callable[[], float],
    ) -> None:
        self._arena, self._table, self._lora, self._layout = arena, table, lora, layout
        self._limits, self._images, self._moved, self._clock = limits, images, moved, clock
        self.blocked: dict[Image, float] = {}  # pinned ones that found no place, and when they last tried
        self.swaps_in = 0
        self.evictions = 0

    @property
    def used_pages(self) -> int:
        return self._arena.pages.used["adapter"]

    @property
    def count(self) -> int:
        return sum(image.row is not None for image in self._images.values())

    def pinned(self) -> list[Image]:
        return [image for image in self._images.values() if image.pinned]

    def can_ever_fit(self, image: Image) -> bool:
        """Whether the image fits the budget beside the pinned ones."""
        others, slots = [other for other in self.pinned() if other is not image], self._limits.slots
        return sum(other.pages for other in others) + image.pages <= self._limits.budget_pages and (
            slots is None or len(others) < slots
        )

    def bring(self, image: Image) -> bool:
        """Copy the image into the arena, evicting idle ones; False when it does not fit now."""
        if image.row is not None:
            return True
        if image.host is None or not self._could_fit(image):
            return False
        slots = self._limits.slots
        while (slots is not None and self.count >= slots) or self.used_pages + image.pages > self._limits.budget_pages:
            if not self.evict_one():
                return False
        runs = _runs(image.manifest)
        lengths = [length for _, length in runs]
        while (starts := self._arena.take_runs(lengths)) is None:
            if not self.evict_one():
                return False
        self._copy(image, image.host, runs, starts)
        self.blocked.pop(image, None)
        self._moved(image)
        return True

    def over_budget(self, image: Image) -> bool:
        """Whether it is the adapters' budget or the slots that keep `image` out, and not the free pages."""
        idle = self._evictable()
        pages, slots = sum(other.pages for other in idle), self._limits.slots
        return self.used_pages - pages + image.pages > self._limits.budget_pages or (
            slots is not None and self.count - len(idle) >= slots
        )

    def evict_one(self, keep: Image | None = None) -> bool:
        """Free the device copy of the idle image that costs least to lose. False when there is none.

        Reload cost per byte is the same for all images of the host tier, so recency decides after the marks.
        """
        idle = [image for image in self._evictable() if image is not keep]
        if not idle:
            return False
        victim = min(idle, key=lambda image: (image.warm_wanted, image.last_used))
        self.leave(victim)
        self.evictions += 1
        self._moved(victim)
        return True

    def bring_pinned(self, image: Image) -> None:
        """At once, or when the scheduler has made room."""
        if not self.bring(image):
            self.blocked[image] = self._clock()

    def leave(self, image: Image) -> None:
        self.blocked.pop(image, None)
        if image.row is None:
            return
        self._lora.forget(image.row)
        self._table.remove(image.row)
        self._arena.free_runs(image.device_pages)
        image.row, image.device_pages = None, []

    def start(self, image: Image, request: str) -> None:
        """The request runs on the image, which may not leave the device until `stop`."""
        if not image.running:
            image.running_since = self._clock()
        image.running.add(request)
        image.last_used = self._clock()

    def stop(self, image: Image, request: str) -> None:
        image.running.discard(request)
        image.last_used = self._clock()

    def _could_fit(self, image: Image) -> bool:
        """Whether evicting every idle image would make room: else none is evicted for nothing."""
        evictable = sum(other.pages for other in self._evictable())
        return not self.over_budget(image) and self._arena.pages.free + evictable >= image.pages

    def _evictable(self) -> list[Image]:
        return [i for i in self._images.values() if i.row is not None and not i.running and not i.pinned]

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
