"""The artifact store: STORE/ab/<digest>/{two files}, each written once and never changed."""

import os
import shutil
import tempfile
from pathlib import Path

from loraplane_core.artifact.digest import ARTIFACT_FILES
from loraplane_core.identity import is_digest

STAGING = ".staging"


class ArtifactStore:
    """A directory store. Staging lies inside it, so that publishing is a rename on one file system."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def prepare(self) -> None:
        """Make the folders; drop what an earlier process left in staging."""
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        shutil.rmtree(self.root / STAGING, ignore_errors=True)
        (self.root / STAGING).mkdir(mode=0o700)

    def stage(self) -> Path:
        """A new private folder; the caller removes it."""
        return Path(tempfile.mkdtemp(dir=self.root / STAGING))

    def publish(self, staged: Path, digest: str) -> None:
        """Move the two files of a checked artifact to their digest; the same digest again changes nothing."""
        target = self._folder(digest)
        if target.is_dir():
            return
        target.parent.mkdir(mode=0o700, exist_ok=True)
        for name in ARTIFACT_FILES:
            (staged / name).chmod(0o400)
        _sync(staged)
        try:
            staged.rename(target)
        except OSError:
            if not target.is_dir():  # otherwise another worker was first, with the same bytes
                raise
        _sync(target.parent)
        _sync(self.root)

    def file(self, digest: str, name: str) -> Path | None:
        """The stored file, or None."""
        if name not in ARTIFACT_FILES or not is_digest(digest):
            return None
        found = self._folder(digest) / name
        return found if found.is_file() else None

    def _folder(self, digest: str) -> Path:
        return self.root / digest[:2] / digest


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
