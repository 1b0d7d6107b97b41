"""Events on Kubernetes, such that `kubectl describe` shows each saying once, with its count and last time."""

import hashlib
import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from loraplane_core.errors import Conflict, LoraplaneError, NotFound
from loraplane_core.labels import API_VERSION, MANAGED_BY
from loraplane_operator.actions import Note
from loraplane_operator.cluster.kube_api import KubeApi
from loraplane_operator.plan.conditions import rfc3339

log = logging.getLogger(__name__)

#: Sayings whose count is remembered. A forgotten one begins to count anew; nothing else depends on it.
KEPT = 4096
#: A saying repeated faster than this is counted and written with the next one.
WRITE_SECONDS = 5.0
_MESSAGE_MAX = 1024


@dataclass
class _Said:
    count: int
    written_at: float


class Recorder:
    """The Event's name is a hash of what it says, so that a restart, or a second operator, finds it again.

    Core v1 Events on purpose: `kubectl describe` shows their count and last time, not those of a series.
    """

    def __init__(self, api: KubeApi, clock: Callable[[], float] = time.time) -> None:
        self._api = api
        self._clock = clock
        self._said: OrderedDict[str, _Said] = OrderedDict()

    async def add(self, note: Note) -> None:
        """Never raises."""
        name, now = event_name(note), self._clock()
        said = self._said.get(name)
        if said is not None:
            said.count += 1
            self._said.move_to_end(name)
            if now - said.written_at < WRITE_SECONDS:
                return
        try:
            await self._write(name, note, said.count if said else 1, now)
        except LoraplaneError as error:
            log.warning("an Event was not written", extra={"object": str(note.ref), "error": error.message})

    async def _write(self, name: str, note: Note, count: int, now: float) -> None:
        """Two tries: the API server forgets Events by age, and another process may know one that we do not."""
        path = f"/api/v1/namespaces/{note.ref.namespace}/events"
        for known in (count > 1, count == 1):
            try:
                if known:
                    count = max(count, 2)
                    await self._api.merge(f"{path}/{name}", {"count": count, "lastTimestamp": rfc3339(now)})
                else:
                    await self._api.create(path, _event(name, note, count, rfc3339(now)))
            except (NotFound, Conflict):
                continue
            self._remember(name, _Said(count, now))
            return

    def _remember(self, name: str, said: _Said) -> None:
        self._said[name] = said
        self._said.move_to_end(name)
        while len(self._said) > KEPT:
            self._said.popitem(last=False)


def event_name(note: Note) -> str:
    said = "\0".join((note.uid, note.kind, str(note.reason), note.message))
    return f"{note.ref.name}.{hashlib.sha256(said.encode()).hexdigest()[:16]}"


def _event(name: str, note: Note, count: int, moment: str) -> dict[str, Any]:
    ref = note.ref
    about = {"apiVersion": API_VERSION, "kind": ref.kind, "namespace": ref.namespace, "name": ref.name, "uid": note.uid}
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": name, "namespace": ref.namespace},
        "involvedObject": about,
        "type": note.kind,
        "reason": str(note.reason),
        "message": note.message[:_MESSAGE_MAX],
        "firstTimestamp": moment,
        "lastTimestamp": moment,
        "count": count,
        "source": {"component": MANAGED_BY},
        "reportingComponent": MANAGED_BY,
    }
