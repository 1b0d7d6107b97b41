"""The disk tier: engine images by digest, bounded, least recently used first out.

A restart finds them again. A file is only trusted after its manifest was read and names the digest and
the layout it is filed under.
"""

import asyncio
import logging
import os
import shutil
import tempfile
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from loraplane_core.artifact.digest import ARTIFACT_FILES
from loraplane_core.errors import ArtifactUnavailable, LoraplaneError, Unavailable
from loraplane_core.identity import is_digest
from loraplane_engine.adapters.image import read_manifest
from loraplane_engine.server.convert import convert
from loraplane_engine.server.fetch import FETCH_SECONDS, ArtifactFetcher

log = logging.getLogger(__name__)

#: Conversions run one at a time: they take the core's CPUs.
CONVERSIONS = 1
FETCHES = 4


@dataclass
class Image:
    path: Path
    bytes: int  # in the device layout
    rank: int


Source = Callable[[Path], Awaitable[None]]


class ImageStore:
    """`in_use` says which digests must not be deleted: the core has them mapped or is about to."""

    def __init__(
        self,
        folder: Path,
        layout: str,
        *,
        limit: int,
        fetcher: ArtifactFetcher | None,
        in_use: Callable[[str], bool],
    ) -> None:
        self._folder = folder / "images" / layout.replace("/", "-")
        self._staging = folder / "staging"
        self._layout = layout
        self._limit = limit
        self._fetcher = fetcher
        self._in_use = in_use
        self._images: dict[str, Image] = {}  # least recently used first
        self._making: dict[str, asyncio.Task[Image]] = {}
        self._conversions = asyncio.Semaphore(CONVERSIONS)
        self._fetches = asyncio.Semaphore(FETCHES)

    def open(self) -> None:
        """Make the folders, drop what a crash left behind, find the images of earlier runs."""
        shutil.rmtree(self._staging, ignore_errors=True)
        for folder in (self._folder, self._staging):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        for path in sorted(self._folder.iterdir(), key=lambda file: file.stat().st_mtime):
            image = self._read(path, path.name.removesuffix(".image"))
            if image is None:
                path.unlink(missing_ok=True)
            else:
                self._images[path.name.removesuffix(".image")] = image
        self._trim()

    def has(self, digest: str) -> bool:
        return digest in self._images

    def find(self, digest: str) -> Image | None:
        """The image if it is here; marks it used."""
        image = self._images.pop(digest, None)
        if image is None:
            return None
        if self._read(image.path, digest) is None:  # deleted or damaged behind our back
            image.path.unlink(missing_ok=True)
            return None
        self._images[digest] = image
        os.utime(image.path)
        return image

    async def fetched(self, digest: str, size: int) -> Image:
        """The image of `digest`, from the artifact source if need be; single flight per digest."""
        fetcher = self._fetcher
        if fetcher is None:
            raise ArtifactUnavailable("this engine has no artifact source")

        async def source(into: Path) -> None:
            try:
                async with self._fetches, asyncio.timeout(FETCH_SECONDS):
                    await fetcher.fetch(digest, size, into)
            except TimeoutError as error:
                raise ArtifactUnavailable(f"fetching took longer than {FETCH_SECONDS:.0f} seconds") from error

        return await self._made(digest, source)

    async def local(self, digest: str, artifact: Path) -> Image:
        """The image of an artifact in a folder the operator named at start."""

        async def source(into: Path) -> None:
            for name in ARTIFACT_FILES:
                await asyncio.to_thread(shutil.copyfile, artifact / name, into / name)

        return await self._made(digest, source)

    def remove(self, digest: str) -> None:
        image = self._images.pop(digest, None)
        if image is not None:
            image.path.unlink(missing_ok=True)

    async def close(self) -> None:
        tasks = list(self._making.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        shutil.rmtree(self._staging, ignore_errors=True)

    async def _made(self, digest: str, source: Source) -> Image:
        found = self.find(digest)
        if found is not None:
            return found
        task = self._making.get(digest)
        if task is None:
            task = asyncio.create_task(self._make(digest, source))
            self._making[digest] = task
            task.add_done_callback(lambda done: self._forget(digest, done))
        # A waiter that goes away must not end the work for the others.
        return await asyncio.shield(task)

    def _forget(self, digest: str, task: "asyncio.Task[Image]") -> None:
        del self._making[digest]
        if not task.cancelled():
            task.exception()  # every waiter may have left; then nobody else looks at it

    async def _make(self, digest: str, source: Source) -> Image:
        staging = Path(tempfile.mkdtemp(prefix=digest[:12], dir=self._staging))
        path = self._folder / f"{digest}.image"
        try:
            await source(staging)
            async with self._conversions:
                await convert(staging, path, self._layout, digest)
        except OSError as error:
            raise Unavailable(f"the disk tier failed: {error.strerror}") from error
        finally:
            shutil.rmtree(staging, ignore_errors=True)
        image = self._read(path, digest)
        if image is None:
            raise Unavailable("the engine image just written cannot be read")
        self._images[digest] = image
        self._trim(keep=digest)
        return image

    def _read(self, path: Path, digest: str) -> Image | None:
        if not is_digest(digest):
            return None
        try:
            manifest, _ = read_manifest(path)
        except (LoraplaneError, OSError) as error:
            log.warning("image %s is not usable: %s", digest[:12], error)
            return None
        if manifest.digest != digest or manifest.layout != self._layout:
            return None
        return Image(path, manifest.data_bytes, manifest.rank)

    def _trim(self, keep: str = "") -> None:
        total = sum(image.path.stat().st_size for image in self._images.values())
        for digest, image in list(self._images.items()):
            if total <= self._limit:
                return
            if digest == keep or self._in_use(digest):
                continue
            total -= image.path.stat().st_size
            self.remove(digest)
