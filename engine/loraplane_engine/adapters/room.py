"""The arithmetic of both tiers, without the memory itself: who may take whose place, and who is refused.

Warm images hold a reservation in the host tier, pinned ones in the device tier, too. The operator admits both
against the budgets that `/state` tells, in the same bytes; here its word is kept against the traffic. A
reservation is never taken for a request; it waits for what is merely in use, and is refused at once when
reservations alone leave too little.
"""

from collections.abc import Iterable
from typing import NamedTuple

from loraplane_core.errors import InsufficientMemory


class Held(NamedTuple):
    """One image of the host tier, as the newcomer sees it."""

    digest: str
    bytes: int
    reserved: bool  # stays whatever happens: warm or pinned
    busy: bool  # leaves later: in use, draining, or still being read
    order: tuple[bool, bool, float] = (False, False, 0.0)  # the least leaves first


def keeps_place(holders: Iterable[tuple[str, bool]], newcomer: str | None) -> bool:
    """Whether marks of `holders` (ref, whether pinned) reserve their image's place against a newcomer.

    Against what requests bring in (None) always; against a ref that shall be warm, unless all of them are for
    other versions of the same adapter, which it replaces.
    """
    marked = list(holders)
    if newcomer is None:
        return bool(marked)
    return any(pinned or _name(ref) != _name(newcomer) for ref, pinned in marked)


class HostRoom:
    """The host tier as a newcomer sees it; made once for all that see the same."""

    def __init__(self, held: Iterable[Held], limit: int) -> None:
        images = list(held)
        self._limit = limit
        self._leaving = [image for image in images if not (image.reserved or image.busy)]
        self._reserved = sum(image.bytes for image in images if image.reserved)
        self._free = limit - sum(image.bytes for image in images)
        self._idle = sum(image.bytes for image in self._leaving)

    def victims(self, need: int) -> list[str] | None:
        """Digests that leave so that `need` bytes fit; None = not now, but when what is busy becomes idle.

        Raises InsufficientMemory with the arithmetic when no waiting helps.
        """
        if self._reserved + need > self._limit:
            raise InsufficientMemory(
                f"the adapter needs {need} bytes of host memory; warm and pinned adapters have reserved "
                f"{self._reserved} of {self._limit}, so {max(0, self._limit - self._reserved)} are free"
            )
        if self._free + self._idle < need:
            return None
        found, free = [], self._free
        for image in sorted(self._leaving, key=lambda image: image.order):
            if free >= need:
                break
            found.append(image.digest)
            free += image.bytes
        return found


def check_pin(need: int, pinned: list[int], budget: int, slots: int | None) -> None:
    """Whether an image of `need` bytes may be pinned beside those that are. Raises InsufficientMemory."""
    held = sum(pinned)
    if held + need > budget:
        raise InsufficientMemory(
            f"pinning needs {need} bytes of device memory; {len(pinned)} pinned adapters hold {held} of {budget}, "
            f"so {max(0, budget - held)} are free"
        )
    if slots is not None and len(pinned) >= slots:
        raise InsufficientMemory(f"pinning needs a slot; pinned adapters hold {len(pinned)} of {slots}")


def _name(ref: str) -> str:
    """tenant/adapter, without the version."""
    return ref.rpartition("@")[0]
