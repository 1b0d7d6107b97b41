"""The folder of EndpointSlice-shaped files, watched by polling. A Kubernetes watcher takes its place in a cluster."""

import asyncio
import json
import logging
from collections.abc import Callable
from pathlib import Path

from loraplane_core.errors import InvalidName
from loraplane_core.identity import ReplicaId
from loraplane_core.wire.endpoints import Endpoint, from_slice

log = logging.getLogger(__name__)
POLL_SECONDS = 0.15
Endpoints = dict[ReplicaId, Endpoint]
_Stamp = tuple[int, int, int]


class EndpointFolder:
    """Calls `changed` with all endpoints whenever they differ from the last time.

    A file that cannot be read keeps its last good reading (a writer that is not atomic, a full disk):
    `/state` decides about life; a removed file removes its endpoints.
    """

    def __init__(self, folder: Path, changed: Callable[[Endpoints], None]) -> None:
        self._folder = folder
        self._changed = changed
        self._files: dict[Path, tuple[_Stamp, list[Endpoint]]] = {}
        self._last: Endpoints | None = None

    async def watch(self) -> None:
        """Runs until cancelled."""
        while True:
            self.poll()
            await asyncio.sleep(POLL_SECONDS)

    def poll(self) -> None:
        files: dict[Path, tuple[_Stamp, list[Endpoint]]] = {}
        for file in sorted(self._folder.glob("*.json")):
            known = self._files.get(file)
            read = self._read(file, known)
            if read is not None:
                files[file] = read
        self._files = files
        found = {endpoint.replica: endpoint for _, endpoints in files.values() for endpoint in endpoints}
        if found != self._last:
            self._last = found
            self._changed(found)

    def _read(self, file: Path, known: tuple[_Stamp, list[Endpoint]] | None) -> tuple[_Stamp, list[Endpoint]] | None:
        try:
            status = file.stat()
            stamp = (status.st_mtime_ns, status.st_size, status.st_ino)
            if known is not None and known[0] == stamp:
                return known
            manifest = json.loads(file.read_bytes())
            return stamp, from_slice(manifest)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, AttributeError, InvalidName) as error:
            if known is None or known[0] != (0, 0, 0):
                log.warning("%s is no readable EndpointSlice: %s", file.name, error)
            return ((0, 0, 0), known[1] if known is not None else [])
