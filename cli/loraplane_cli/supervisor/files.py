"""The state folder's private folders and secrets."""

import os
from collections.abc import Callable
from pathlib import Path

from loraplane_cli.errors import LocalError
from loraplane_core.files import write_atomic


def private_folder(path: Path) -> Path:
    """A folder that only we can enter, created with its parents. Raises LocalError on somebody else's."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = path.lstat()
    if path.is_symlink() or status.st_uid != os.geteuid():
        raise LocalError(f"{path} is not a folder of this user; remove it or choose another --state-dir")
    if status.st_mode & 0o077:
        path.chmod(0o700)
    return path


def secret_file(path: Path, make: Callable[[], str]) -> str:
    """The secret in `path` (0600), made on first use and never again."""
    if not path.exists():
        write_atomic(path, make() + "\n")
    return path.read_text().strip()
