"""Where an adapter's active version is, replica by replica, and whether that makes the object Ready."""

from typing import NamedTuple

from loraplane_core.resources.reasons import Reason
from loraplane_core.wire.engine import WARM, ResidencyClass
from loraplane_operator.actions import Action, Warm
from loraplane_operator.plan.conditions import Verdict, rfc3339
from loraplane_operator.plan.warmth import base_differs, residence_of
from loraplane_operator.plan.wishes import Wish
from loraplane_operator.words import Failure, World


class Row(NamedTuple):
    """One replica that should be warm. `reason` says why it is not; "" when it is."""

    report: dict[str, str]  # AdapterReplica
    reason: str

    @property
    def told(self) -> str:
        report = self.report
        return f"{report['name']} is {report['residency']}{': ' + report['message'] if report['message'] else ''}"


def replica_rows(world: World, wish: Wish, warm: tuple[Action, ...]) -> list[Row]:
    failures = {
        action.replica: world.failure(action) for action in warm if isinstance(action, Warm) and action.id == wish.id
    }
    return [_row(world, wish, index, failures.get(replica)) for index, replica in enumerate(wish.replicas)]


def _row(world: World, wish: Wish, index: int, failure: Failure | None) -> Row:
    name = str(wish.replicas[index])
    engine = world.engines.get(wish.replicas[index])
    if engine is None:
        return Row(_report(name, "absent", "the replica does not answer"), Reason.REPLICA_NOT_READY)
    if base_differs(engine, wish):
        return Row(_report(name, "absent", "the replica serves another base"), Reason.BASE_MODEL_MISMATCH)
    residence = residence_of(engine, wish.id)
    residency = residence.residency if residence else "absent"
    if residency in WARM:
        message, reason = "", ""
    elif failure is not None:
        message, reason = failure.message, failure.reason
    else:
        message = residence.message if residence else ""
        reason = Reason.LOADING if residency == "loading" else Reason.LOAD_FAILED if message else Reason.NOT_WARM
    since = rfc3339(residence.since) if residence and residence.since else ""
    return Row(_report(name, residency, message, since), reason)


def _report(name: str, residency: ResidencyClass, message: str, since: str = "") -> dict[str, str]:
    return {"name": name, "residency": residency, "since": since, "message": message}


def ready_verdict(blocked: Verdict | None, wish: Wish | None, rows: list[Row]) -> Verdict:
    """Ready means: the object's spec is what serves, warm on every replica it should be warm on."""
    ready = sum(not row.reason for row in rows)
    serving = f"version {wish.id.version} serves from {ready} of {len(rows)} replicas" if wish and ready else ""
    if blocked is not None:
        message = f"{blocked.message}; {serving}" if serving else blocked.message
        return Verdict("Ready", "False", blocked.reason, message)
    cold = [row for row in rows if row.reason]
    if not cold:
        return Verdict("Ready", "True", Reason.READY, serving or "loads on request")
    return Verdict("Ready", "False", _worst(cold), "; ".join(row.told for row in cold))


#: Waits and work under way, the least telling first.
_MILD = (Reason.NOT_WARM, Reason.LOADING, Reason.REPLICA_NOT_READY)


def _worst(cold: list[Row]) -> str:
    """A failure before work under way: it is what somebody has to look at."""
    reasons = [row.reason for row in cold]
    failed = [reason for reason in reasons if reason not in _MILD]
    return failed[0] if failed else next(mild for mild in reversed(_MILD) if mild in reasons)
