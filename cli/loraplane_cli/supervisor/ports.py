"""TCP ports of 127.0.0.1: chosen once, kept over restarts as long as nobody else took them."""

import json
import socket
from pathlib import Path

import psutil

from loraplane_core.files import write_atomic

LOOPBACK = "127.0.0.1"


def is_free(port: int) -> bool:
    """Whether a server could bind now (SO_REUSEADDR: a port in TIME_WAIT counts as free, as it does for servers)."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError:
            return False
    return True


def listens(pid: int, port: int) -> bool:
    """Whether the process itself has a listener on `port`; True also where that cannot be known."""
    try:
        connections = psutil.Process(pid).net_connections("tcp")
    except psutil.NoSuchProcess:
        return False
    except psutil.AccessDenied:
        return True
    return any(each.status == psutil.CONN_LISTEN and each.laddr[1] == port for each in connections)


def free_port() -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])


class PortBook:
    """Port numbers by name, stored in one JSON file. One owner at a time (the supervisor's lock)."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            stored = json.loads(path.read_text())
            self._ports = {str(name): int(port) for name, port in stored.items()}
        except (FileNotFoundError, ValueError, AttributeError, TypeError):
            self._ports = {}  # nothing is lost with it but the stability of the URLs

    def assign(self, name: str, preferred: int | None = None, default: int | None = None) -> int:
        """A port for `name` that is free now: the preferred one, the stored one, the default one, any."""
        taken = {port for other, port in self._ports.items() if other != name}
        for port in (preferred, self._ports.get(name), default):
            if port and port not in taken and is_free(port):
                return self._store(name, port)
        port = free_port()
        while port in taken:
            port = free_port()
        return self._store(name, port)

    def stored(self, name: str) -> int | None:
        """The port of last time, free or not."""
        return self._ports.get(name)

    def _store(self, name: str, port: int) -> int:
        if self._ports.get(name) != port:
            self._ports[name] = port
            self._write()
        return port

    def _write(self) -> None:
        write_atomic(self._path, json.dumps(self._ports, indent=2, sort_keys=True) + "\n")
