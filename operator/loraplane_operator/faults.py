"""Points at which a test can make the operator die, named by the environment: LORAPLANE_FAULT=<point>[:nth].

This is in production code because it tests what no test from outside can: that the process may be killed
exactly between an effect and its being known, at every such place, and that the next start mends it. A
signal from outside lands there by luck only. Unset, a point costs one call of an empty function.
"""

import os
import signal
from collections.abc import Callable, Mapping
from typing import get_args

from loraplane_operator.actions import Action

VARIABLE = "LORAPLANE_FAULT"
#: Called with a point's name when the process comes by.
Fault = Callable[[str], None]
_KINDS = tuple(kind.__name__ for kind in get_args(Action))
#: Inside actions of two steps: after the first.
_BETWEEN = ("between/SetStatus", "between/SetFinalizer", "between/RestartReplica")


def points() -> tuple[str, ...]:
    """All names, in the order of a pass."""
    around = [f"{side}/{kind}" for kind in _KINDS for side in ("before", "after")]
    return ("after/observe", "after/plan", "after/submit", *around, *_BETWEEN)


def none(point: str) -> None:
    """No fault anywhere."""


def from_environment(environment: Mapping[str, str]) -> Fault:
    """Raises ValueError for a point that does not exist."""
    asked = environment.get(VARIABLE, "")
    if not asked:
        return none
    point, _, nth = asked.partition(":")
    if point not in points() or (nth and not nth.isdecimal()):
        raise ValueError(f"{VARIABLE}: {asked!r} is no <point>[:nth]; points are {', '.join(points())}")
    left = int(nth or "1")

    def fault(here: str) -> None:
        nonlocal left
        if here == point:
            left -= 1
            if left <= 0:
                os.kill(os.getpid(), signal.SIGKILL)

    return fault
