"""What was last seen of each object, from three sides that overtake each other: lists, watch events and
the answers to own writes.

Order is told by resourceVersion, which the API server promises to be comparable within a kind: an older
report never replaces a newer one. A uid never comes back, so that what was reported as gone stays gone,
however late another report of it arrives.
"""

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from loraplane_operator.actions import ObjectRef
from loraplane_operator.cluster.kinds import ref_of

log = logging.getLogger(__name__)

#: Uids of deleted objects that are remembered; late reports are seconds late, not thousands of deletions.
_GONE_KEPT = 5000
#: From a manifest to what the planner needs; None when it cannot be read.
Parse = Callable[[dict[str, Any]], object | None]


@dataclass(frozen=True, slots=True)
class Entry:
    """The manifest itself is not kept: a thousand of them cost more memory than everything else here."""

    uid: str
    resource_version: str
    finalizers: tuple[str, ...]
    view: object | None

    @property
    def version(self) -> int:
        return version_of(self.resource_version)


class Cache:
    def __init__(self, parsers: Mapping[str, Parse]) -> None:
        self._parsers = parsers
        self._entries: dict[ObjectRef, Entry] = {}
        self._gone: dict[str, None] = {}

    def get(self, ref: ObjectRef) -> Entry | None:
        return self._entries.get(ref)

    def views(self, kind: str) -> list[Any]:
        """In the order of their names."""
        found = sorted((ref, entry.view) for ref, entry in self._entries.items() if ref.kind == kind)
        return [view for _, view in found if view is not None]

    def unreadable(self, *kinds: str) -> dict[ObjectRef, str]:
        """Objects without a view, with their uids."""
        return {ref: entry.uid for ref, entry in self._entries.items() if entry.view is None and ref.kind in kinds}

    def put(self, kind: str, raw: dict[str, Any]) -> bool:
        """Take over a report; returns whether the view changed."""
        ref, metadata = ref_of(kind, raw), raw["metadata"]
        uid, version = metadata.get("uid", ""), metadata.get("resourceVersion", "")
        known = self._entries.get(ref)
        if uid in self._gone or (known is not None and _not_newer(version_of(version), known.version)):
            return False
        entry = Entry(uid, version, tuple(metadata.get("finalizers") or ()), self._view(kind, ref, raw))
        self._entries[ref] = entry
        return known is None or known.view != entry.view

    def _view(self, kind: str, ref: ObjectRef, raw: dict[str, Any]) -> object | None:
        """Whatever somebody wrote into an object, it costs nobody else the view of theirs."""
        try:
            return self._parsers[kind](raw)
        except Exception:
            log.exception("reading an object broke", extra={"object": str(ref)})
            return None

    def drop(self, ref: ObjectRef, uid: str) -> bool:
        """The object of this uid is gone; one that took its name stays."""
        if uid:
            self._gone[uid] = None
            while len(self._gone) > _GONE_KEPT:
                del self._gone[next(iter(self._gone))]
        known = self._entries.get(ref)
        if known is None or known.uid != uid:
            return False
        del self._entries[ref]
        return True

    def replace(self, kind: str, namespace: str, items: Iterable[dict[str, Any]], version: str) -> bool:
        """Take over a complete list, which shows the state at `version`; what is newer than that stays."""
        listed: set[ObjectRef] = set()
        changed = False
        for raw in items:
            listed.add(ref_of(kind, raw))
            changed |= self.put(kind, raw)
        at = version_of(version)
        for ref, entry in list(self._entries.items()):
            if (ref.kind, ref.namespace) == (kind, namespace) and ref not in listed and entry.version <= at:
                changed |= self.drop(ref, entry.uid)
        return changed


def version_of(resource_version: str) -> int:
    """0 where it tells no order."""
    return int(resource_version) if resource_version.isdecimal() else 0


def _not_newer(version: int, known: int) -> bool:
    return bool(version) and bool(known) and version <= known
