"""What an object's status says once the release that served it is uninstalled: nobody writes another after it."""

from collections.abc import Mapping
from typing import Any

from loraplane_core.labels import ADAPTER_KIND
from loraplane_core.resources.pool import PoolCapacity
from loraplane_core.resources.reasons import Reason
from loraplane_operator.plan.conditions import Verdict, raw_conditions, render

_TOLD = "the release was uninstalled and its engines have ended; install it again, or delete this object"
#: What holds only while engines run; the rest (claims, versions, digests) the registry's database keeps.
_ADAPTER = ("Placed", "Ready")
_POOL = ("Available", "Progressing", "Degraded")


def last_words(kind: str, status: Mapping[str, Any], generation: int, now: float) -> dict[str, Any]:
    """`status` is the one that the operator wrote last, on an object of `kind`; it may be empty."""
    over = _ADAPTER if kind == ADAPTER_KIND else _POOL
    verdicts = [
        Verdict(type_, known["status"], known["reason"], known["message"])
        for type_, known in raw_conditions(status).items()
        if type_ not in over
    ]
    verdicts += [Verdict(type_, "False", Reason.UNINSTALLED, _TOLD) for type_ in over]
    rendered = render(verdicts, status, generation, now)
    return {**status, **_nothing_runs(kind, status), "observedGeneration": generation, "conditions": rendered}


def _nothing_runs(kind: str, status: Mapping[str, Any]) -> dict[str, Any]:
    if kind == ADAPTER_KIND:
        return {"replicas": [], "readyReplicas": 0, "resident": f"0/{status.get('warmReplicas', 0)}"}
    adapters = {**(status.get("adapters") or {}), "ready": 0, "resident": 0}
    return {"replicas": 0, "readyReplicas": 0, "capacity": PoolCapacity().to_wire(), "adapters": adapters}
