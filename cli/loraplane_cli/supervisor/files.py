"""Small files of the state folder: written whole or not at all, private unless said otherwise."""

import contextlib
import os
import secrets
from collections.abc import Callable
from pathlib import Path

from loraplane_cli.errors import LocalError


def write_atomic(path: Path, content: str | bytes, mode: int = 0o600) -> None:
    """Replace `path` by one rename; readers see the old or the new content, never a part."""
    data = content.encode() if isinstance(content, str) else content
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        with os.fdopen(descriptor, "wb") as stream:
            os.fchmod(stream.fileno(), mode)  # whatever the umask
            stream.write(data)
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()
        raise


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
