"""Where the GGUF bytes come from: the file itself, or the only .gguf inside a wheel or zip."""

import hashlib
import shutil
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from loraplane_cli.model_import.errors import ModelImportError

Progress = Callable[[str, int, int], None]

GGUF_MAGIC = b"GGUF"
CHUNK_BYTES = 4 * 1024 * 1024


@dataclass(frozen=True)
class GgufSource:
    """`member` is the .gguf's name inside the archive at `path`, or None when `path` is the GGUF itself."""

    path: Path
    member: str | None
    size: int

    @contextmanager
    def open(self) -> Iterator[IO[bytes]]:
        if self.member is None:
            with self.path.open("rb") as stream:
                yield stream
        else:
            with zipfile.ZipFile(self.path) as archive, archive.open(self.member) as stream:
                yield stream

    def sha256(self, progress: Progress) -> str:
        """Digest of the GGUF bytes, so that a wheel and the file unpacked from it are the same source."""
        digest = hashlib.sha256()
        for chunk in self._chunks("hash", progress):
            digest.update(chunk)
        return digest.hexdigest()

    def materialise(self, folder: Path, progress: Progress) -> Path:
        """A path on disk to map into memory; an archive's member is unpacked into `folder`."""
        if self.member is None:
            return self.path
        free = shutil.disk_usage(folder).free
        if free < self.size:
            raise ModelImportError(
                "disk_full", f"unpacking {self.member} needs {self.size} bytes; {folder} has {free} free"
            )
        unpacked = folder / "source.gguf"
        with unpacked.open("wb") as out:
            for chunk in self._chunks("unpack", progress):
                out.write(chunk)
        return unpacked

    def _chunks(self, stage: str, progress: Progress) -> Iterator[bytes]:
        done = 0
        with self.open() as stream:
            try:
                while chunk := stream.read(CHUNK_BYTES):
                    done += len(chunk)
                    progress(stage, done, self.size)
                    yield chunk
            except (zipfile.BadZipFile, zlib.error, EOFError) as error:
                raise ModelImportError("truncated_file", f"{self.path}: the archive is damaged ({error})") from error


def find_gguf(path: Path) -> GgufSource:
    if not path.is_file():
        raise ModelImportError("source_not_found", f"{path} is not a file")
    with path.open("rb") as stream:
        magic = stream.read(len(GGUF_MAGIC))
    if magic == GGUF_MAGIC:
        return GgufSource(path, None, path.stat().st_size)
    if not zipfile.is_zipfile(path):
        raise ModelImportError("not_a_gguf", f"{path} is neither a GGUF file nor a wheel or zip holding one")
    with zipfile.ZipFile(path) as archive:
        members = [info for info in archive.infolist() if info.filename.lower().endswith(".gguf")]
    if len(members) != 1:
        names = ", ".join(info.filename for info in members) or "none"
        raise ModelImportError("not_a_gguf", f"{path} must hold exactly one .gguf file; found: {names}")
    source = GgufSource(path, members[0].filename, members[0].file_size)
    with source.open() as stream:
        if stream.read(len(GGUF_MAGIC)) != GGUF_MAGIC:
            raise ModelImportError("not_a_gguf", f"{source.member} in {path} is not a GGUF file")
    return source
