"""Where the bytes of an artifact may be read from, and the one copy that is made of them.

A path that a request names is resolved, links included, and must lie below its root. The copy then walks
the resolved path by file descriptors without following a link, so that a folder swapped for a link in
between is refused, and everything after it works on the private copy.
"""

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from loraplane_core.artifact.digest import ARTIFACT_FILES, CONFIG_FILE
from loraplane_core.artifact.preflight import Limits
from loraplane_core.errors import ArtifactRejected
from loraplane_core.resources.uris import source_path

_CHUNK = 1 << 20
_MAX_NAMES = 64
UPLOAD_SCHEME = "upload:"


def file_source(uri: str) -> Path:
    """The relative path of a `file:` source. Raises ArtifactRejected (source_not_allowed)."""
    try:
        return Path(source_path(uri))
    except ValueError as error:
        raise ArtifactRejected(f"the source {error!s}", param="source", code="source_not_allowed") from error


def written_path(path: str) -> Path:
    """The path that somebody wrote into a row: `file:PATH`, or as psql users write it, absolute or relative."""
    if path.startswith("file:"):
        return file_source(path)
    if not path or "\0" in path:
        raise ArtifactRejected("the row names no path", param="path", code="source_not_found")
    return Path(path)


def resolve(root: Path, path: Path) -> Path:
    """The folder behind `path`, below `root` after every link is followed. Raises ArtifactRejected."""
    real_root = root.resolve(strict=True)
    try:
        real = (real_root / path).resolve()
    except (OSError, RuntimeError) as error:
        raise _not_allowed() from error
    if real == real_root or real_root not in real.parents:
        raise _not_allowed()
    try:
        found = real.is_dir()
    except OSError as error:  # a name longer than the file system takes, a folder that may not be searched
        told = f"the source cannot be read: {os.strerror(error.errno or 0)}"
        code = "source_not_found" if error.errno == errno.ENAMETOOLONG else "source_unavailable"
        raise ArtifactRejected(told, param="source", code=code) from error
    if not found:
        raise ArtifactRejected(f"there is no folder {path.name!r} below the adapter root", code="source_not_found")
    return real


def copy_artifact(root: Path, path: Path, staging: Path, limits: Limits) -> None:
    """Copy the two files of the artifact into the empty folder `staging`. Raises ArtifactRejected, OSError."""
    real = resolve(root, path)
    with _opened_below(root.resolve(strict=True), real) as folder:
        names = os.listdir(folder)  # noqa: PTH208 - by descriptor, which pathlib cannot
        for name in ARTIFACT_FILES:
            if name in names:
                limit = limits.max_config_bytes if name == CONFIG_FILE else limits.max_bytes
                _copy(folder, name, staging / name, limit)
        if not set(ARTIFACT_FILES) <= set(names):
            # Preflight will refuse and should be able to say that the weights are there in a format that is not read.
            for name in sorted(set(names) - set(ARTIFACT_FILES))[:_MAX_NAMES]:
                (staging / name).touch()


@contextlib.contextmanager
def _opened_below(root: Path, folder: Path) -> Iterator[int]:
    """A descriptor of `folder`, reached from `root` without following a link."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(root, flags)
    try:
        for part in folder.relative_to(root).parts:
            try:
                inner = os.open(part, flags, dir_fd=descriptor)
            except OSError as error:
                if error.errno in (errno.ELOOP, errno.ENOTDIR):
                    raise _not_allowed() from error
                raise
            os.close(descriptor)
            descriptor = inner
        yield descriptor
    finally:
        os.close(descriptor)


def _copy(folder: int, name: str, target: Path, limit: int) -> None:
    # O_NONBLOCK: opening a FIFO must not wait for a writer.
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        descriptor = os.open(name, flags, dir_fd=folder)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise ArtifactRejected(f"{name} is a link or not a plain file", code="unsafe_path") from error
        raise
    with _closing(descriptor), target.open("xb") as copy:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ArtifactRejected(f"{name} is a link or not a plain file", code="unsafe_path")
        too_large = ArtifactRejected(f"{name} has more than {limit} bytes, which is the limit", code="too_large")
        if status.st_size > limit:  # before gigabytes are copied; counted below, too, because it may grow
            raise too_large
        left = limit
        while chunk := os.read(descriptor, _CHUNK):
            left -= len(chunk)
            if left < 0:
                raise too_large
            copy.write(chunk)
        copy.flush()
        os.fsync(copy.fileno())


@contextlib.contextmanager
def _closing(descriptor: int) -> Iterator[None]:
    """Not a file object, because open() refuses a folder with an error of its own and leaves it open."""
    try:
        yield
    finally:
        os.close(descriptor)


def _not_allowed() -> ArtifactRejected:
    return ArtifactRejected("the source lies outside the roots that may be read", code="source_not_allowed")
