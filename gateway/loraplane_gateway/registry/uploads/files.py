"""The bytes of uploads, below STORE/.uploads/<tenant>/<id>/. A file's size is how much was received."""

import asyncio
import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

from loraplane_core.artifact.digest import ARTIFACT_FILES, CONFIG_FILE
from loraplane_core.errors import BodyTooLarge, Conflict, DeadlineExceeded
from loraplane_core.wire.registry import UploadFile

FOLDER = ".uploads"
MAX_CONFIG = 1 << 20
SILENCE_SECONDS = 30.0


class UploadFiles:
    """One process writes uploads, so a lock per file here is enough."""

    def __init__(self, store: Path, max_artifact: int) -> None:
        self._root = store / FOLDER
        self._limits = {name: MAX_CONFIG if name == CONFIG_FILE else max_artifact for name in ARTIFACT_FILES}
        self._busy: set[Path] = set()

    def source(self, tenant: str, upload_id: str) -> tuple[Path, Path]:
        """(root, path below it) of the upload, as an ingestion reads it."""
        return self._root / tenant, Path(upload_id)

    def create(self, tenant: str, upload_id: str) -> None:
        (self._root / tenant / upload_id).mkdir(mode=0o700, parents=True)

    def remove(self, tenant: str, upload_id: str) -> None:
        shutil.rmtree(self._root / tenant / upload_id, ignore_errors=True)

    def remove_all(self, tenant: str) -> None:
        shutil.rmtree(self._root / tenant, ignore_errors=True)

    def received(self, tenant: str, upload_id: str) -> list[UploadFile]:
        folder = self._root / tenant / upload_id
        found = [(name, folder / name) for name in ARTIFACT_FILES]
        return [UploadFile(name=name, received=path.stat().st_size) for name, path in found if path.is_file()]

    async def append(self, tenant: str, upload_id: str, name: str, offset: int, chunks: AsyncIterator[bytes]) -> None:
        """Write from `offset`, which must be what was received so far. What arrived before a failure stays.

        Raises Conflict (offset_mismatch, upload_busy), BodyTooLarge, DeadlineExceeded.
        """
        path = self._root / tenant / upload_id / name
        if path in self._busy:
            raise Conflict(f"{name} is being uploaded by another request", code="upload_busy")
        self._busy.add(path)
        try:
            size = path.stat().st_size if path.exists() else 0
            if size != offset:
                raise Conflict(
                    f"{size} bytes of {name} were received, so the next byte is {size}, not {offset}",
                    param="Upload-Offset",
                    code="offset_mismatch",
                )
            await self._write(path, self._limits[name] - size, chunks)
        finally:
            self._busy.discard(path)

    async def _write(self, path: Path, left: int, chunks: AsyncIterator[bytes]) -> None:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            while True:
                try:
                    async with asyncio.timeout(SILENCE_SECONDS):
                        chunk = await anext(chunks, None)
                except TimeoutError as error:
                    raise DeadlineExceeded(f"nothing arrived for {SILENCE_SECONDS:.0f} s") from error
                if chunk is None:
                    break
                left -= len(chunk)
                if left < 0:
                    raise BodyTooLarge(f"{path.name} would be larger than the limit of {self._limits[path.name]} bytes")
                await asyncio.to_thread(_write_all, descriptor, chunk)
            await asyncio.to_thread(os.fsync, descriptor)
        finally:
            os.close(descriptor)


def _write_all(descriptor: int, chunk: bytes) -> None:
    view = memoryview(chunk)
    while view:
        view = view[os.write(descriptor, view) :]
