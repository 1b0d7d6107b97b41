"""The network namespace of one cluster: made, entered, removed.

Links, routes and nftables rules live in it and go with it. A process that is started while its starter is
inside stays inside; `ip netns exec` is never used, since it hides the cgroup mounts from containerd.
"""

import ctypes
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

NODE_ADDRESS = "10.244.255.1"
NODE_LINK = "node0"
_NAMESPACES = Path("/run/netns")
_CLONE_NEWNET = 0x40000000
_COMMAND_SECONDS = 20.0


class Network:
    def __init__(self, name: str) -> None:
        self.name = f"lpc-{name}"
        self.path = _NAMESPACES / self.name

    def exists(self) -> bool:
        return self.path.exists()

    def create(self) -> None:
        """Loopback, one bridge that carries the node's address, and the default route.

        Without the route a call from the node to a Service's address fails before it is translated.
        """
        _ip("netns", "add", self.name)
        with self.entered():
            _ip("link", "set", "lo", "up")
            _ip("link", "add", NODE_LINK, "type", "bridge")
            _ip("address", "add", f"{NODE_ADDRESS}/32", "dev", NODE_LINK)
            _ip("link", "set", NODE_LINK, "up")
            _ip("route", "add", "default", "dev", NODE_LINK)

    def remove(self) -> None:
        """The kernel drops the namespace itself with its last process."""
        if self.exists():
            _ip("netns", "delete", self.name)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """This thread, and what it starts, is inside the namespace until the end."""
        before = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        try:
            _enter(self.path)
            try:
                yield
            finally:
                _setns(before)
        finally:
            os.close(before)

    def processes(self) -> set[int]:
        """Whoever is in the namespace."""
        if not self.exists():
            return set()
        inode = self.path.stat().st_ino
        return {pid for pid in _pids() if _namespace(pid) == inode}


def _enter(path: Path) -> None:
    target = os.open(path, os.O_RDONLY)
    try:
        _setns(target)
    finally:
        os.close(target)


def _setns(descriptor: int) -> None:
    # os.setns needs Python 3.12.
    if ctypes.CDLL(None, use_errno=True).setns(descriptor, _CLONE_NEWNET) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), "setns")


def _pids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _namespace(pid: int) -> int:
    """Inode of the process's network namespace; 0 when it has ended."""
    try:
        return Path(f"/proc/{pid}/ns/net").stat().st_ino
    except OSError:
        return 0


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=_COMMAND_SECONDS)
