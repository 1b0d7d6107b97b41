"""The disk tier: engine images by digest, bounded, least recently used first out.

A restart finds them again. A file is only trusted after its manifest was read and names the digest and
the layout it is filed under.
"""

import asyncio
import contextlib
import fcntl
import logging
import os
import shutil
import tempfile
import time
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
#: An engine that takes another's place waits this long for it to let go of the folder.
OWNER_SECONDS = 10.0


@dataclass
class Image:
    path: Path
    bytes: int  # in the device layout
    rank: int
    stored: int  # bytes of the file


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
        self._root = folder
        self._lock: int | None = None
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

    async def open(self) -> None:
        """Make the folders, drop what a crash left behind, find the images of earlier runs.

        Raises Unavailable when the folder cannot be written or is another engine's.
        """
        try:
            await self._own()
            shutil.rmtree(self._staging, ignore_errors=True)
            self._make_folders()
            found = sorted(self._folder.iterdir(), key=lambda file: file.lstat().st_mtime)
        except OSError as error:
            raise Unavailable(f"the cache folder {self._root} cannot be used: {error.strerror}") from error
        for path in found:
            image = self._read(path, path.name.removesuffix(".image"))
            if image is None:
                _delete(path)
            else:
                self._images[path.name.removesuffix(".image")] = image
        self._trim()

    def get(self, digest: str) -> Image | None:
        """What is known of the image, without looking at the disk or counting as a use."""
        return self._images.get(digest)

    def find(self, digest: str) -> Image | None:
        """The image if it is here; marks it used."""
        image = self._images.pop(digest, None)
        if image is None:
            return None
        if self._read(image.path, digest) is None:  # deleted or damaged behind our back
            _delete(image.path)
            return None
        self._images[digest] = image
        with contextlib.suppress(OSError):  # the order of use after a restart is not worth a load
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
            _delete(image.path)

    def discard(self, digest: str, image: Image) -> None:
        """`image` proved unusable; one made since is left alone."""
        if self._images.get(digest) is image:
            self.remove(digest)

    async def close(self) -> None:
        tasks = list(self._making.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._lock is not None:
            shutil.rmtree(self._staging, ignore_errors=True)
            os.close(self._lock)
            self._lock = None

    async def _own(self) -> None:
        """One engine per folder: two would delete each other's work. The kernel lets go when the process dies."""
        self._root.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = os.open(self._root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        deadline = time.monotonic() + OWNER_SECONDS
        try:
            while not _locked(lock):  # another process's lock, which no event tells of
                if time.monotonic() > deadline:
                    raise Unavailable(f"the cache folder {self._root} is in use by another engine")
                await asyncio.sleep(0.1)
        except BaseException:
            os.close(lock)
            raise
        self._lock = lock

    def _make_folders(self) -> None:
        for folder in (self._folder, self._staging):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)

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
        path = self._folder / f"{digest}.image"
        try:
            self._make_folders()  # whoever empties a cache takes them along
            with tempfile.TemporaryDirectory(
                prefix=digest[:12], dir=self._staging, ignore_cleanup_errors=True
            ) as staging:
                await source(Path(staging))
                async with self._conversions:
                    await convert(Path(staging), path, self._layout, digest)
        except OSError as error:
            raise Unavailable(f"the disk tier failed: {error.strerror}") from error
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
            manifest, start = read_manifest(path)
        except (LoraplaneError, OSError) as error:
            log.warning("image %s is not usable: %s", digest[:12], error)
            return None
        if manifest.digest != digest or manifest.layout != self._layout:
            return None
        return Image(path, manifest.data_bytes, manifest.rank, start + manifest.data_bytes)

    def _trim(self, keep: str = "") -> None:
        total = sum(image.stored for image in self._images.values())
        for digest, image in list(self._images.items()):
            if total <= self._limit:
                return
            if digest == keep or self._in_use(digest):
                continue
            total -= image.stored
            self.remove(digest)


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _delete(path: Path) -> None:
    """Whatever is there, if it can be deleted: what stays is overwritten or refused when it is read again."""
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    except OSError as error:
        log.warning("%s cannot be deleted: %s", path.name, error.strerror)
