"""Events of the local cluster: JSON lines, the newest at the end, bounded."""

import json
from pathlib import Path

from loraplane_operator.actions import Note
from loraplane_operator.cluster.store import replace_file

KEPT = 1000
_SLACK = 200  # lines over KEPT before the file is rewritten


class EventLog:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._lines = path.read_text().splitlines() if path.exists() else []
        self._latest: dict[str, tuple[str, str]] = {}  # object uid -> (reason, message)

    def add(self, note: Note, time: str) -> None:
        """A repetition of an object's latest Event is not written again."""
        told = (str(note.reason), note.message)
        if self._latest.get(note.uid) == told:
            return
        self._latest[note.uid] = told
        while len(self._latest) > KEPT:
            del self._latest[next(iter(self._latest))]
        ref = note.ref
        line = {
            "time": time,
            "type": note.kind,
            "reason": told[0],
            "message": note.message,
            "object": {"kind": ref.kind, "namespace": ref.namespace, "name": ref.name, "uid": note.uid},
        }
        self._append(json.dumps(line))

    def _append(self, line: str) -> None:
        self._lines.append(line)
        if len(self._lines) > KEPT + _SLACK:
            self._lines = self._lines[-KEPT:]
            replace_file(self._path, "".join(f"{each}\n" for each in self._lines))
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a") as file:
            file.write(line + "\n")
