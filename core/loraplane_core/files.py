"""Files that other processes read while we write them: whole or not at all, private unless said otherwise."""

import contextlib
import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path


def write_atomic(path: Path, content: str | bytes, mode: int = 0o600) -> None:
    """Replace `path` by one rename; readers see the old or the new content, never a part. Its folder must exist."""
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


def write_ports(path: Path, ports: Mapping[str, int]) -> None:
    """How a process that bound free ports tells them, by listener name, to who started it."""
    write_atomic(path, json.dumps(dict(ports)), 0o644)
