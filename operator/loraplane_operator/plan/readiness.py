"""Where the versions that get requests are, replica by replica, and whether that makes the object Ready."""

from collections.abc import Mapping
from typing import NamedTuple

from loraplane_core.identity import AdapterId, ReplicaId
from loraplane_core.resources.conditions import MESSAGE_MAX
from loraplane_core.resources.reasons import Reason
from loraplane_core.wire.engine import WARM, ResidencyClass
from loraplane_operator.actions import Mark, Warm
from loraplane_operator.plan.conditions import Verdict, rfc3339
from loraplane_operator.plan.warmth import base_differs, residence_of
from loraplane_operator.plan.wishes import Target, Wish
from loraplane_operator.words import Failure, World

Troubles = Mapping[tuple[ReplicaId, AdapterId], Failure]

UNANSWERED = "the replica does not answer"
RESTARTED = "the engine restarted and lost it; it is being loaded again"
DROPPED = "the engine dropped it; it is being loaded again"
#: Best first; a replica is shown with the worst of its versions.
_ORDER: tuple[ResidencyClass, ...] = ("device", "host", "disk", "loading", "absent")


class Row(NamedTuple):
    """One replica that should be warm. `reason` says why it is not; "" when it is."""

    report: dict[str, str]  # AdapterReplica
    reason: str

    @property
    def told(self) -> str:
        report = self.report
        return f"{report['name']} is {report['residency']}{': ' + report['message'] if report['message'] else ''}"


def load_failures(world: World) -> Troubles:
    """Why loads and pins failed, on the engines' present boots: one that restarted is judged anew."""
    boots = {replica: engine.boot for replica, engine in world.engines.items()}
    return {
        (action.replica, action.id): failure
        for action, failure in world.memory.failures.items()
        if isinstance(action, Warm | Mark) and boots.get(action.replica) == action.boot
    }


def replica_rows(world: World, wish: Wish, troubles: Troubles) -> list[Row]:
    return [_worst_of(world, wish, replica, troubles) for replica in wish.replicas]


def _worst_of(world: World, wish: Wish, replica: ReplicaId, troubles: Troubles) -> Row:
    if world.engines.get(replica) is None:
        return Row(_report(replica, "absent", UNANSWERED), Reason.REPLICA_NOT_READY)
    rows = [_row(world, replica, target, troubles.get((replica, target.id))) for target in wish.weighted]
    row = max(rows, key=lambda row: (bool(row.reason), _ORDER.index(row.report["residency"])))
    if len(rows) > 1 and row.report["message"]:
        version = wish.weighted[rows.index(row)].id.version
        return row._replace(report={**row.report, "message": f"version {version}: {row.report['message']}"})
    return row


def _row(world: World, replica: ReplicaId, target: Target, failure: Failure | None) -> Row:
    engine = world.engines[replica]
    if base_differs(engine, target):
        return Row(_report(replica, "absent", "the replica serves another base"), Reason.BASE_MODEL_MISMATCH)
    residence = residence_of(engine, target.id)
    residency = residence.residency if residence else "absent"
    since = rfc3339(residence.since) if residence and residence.since else ""
    if residency in WARM:
        unpinned = replica in target.pinned_on and residence is not None and not residence.pinned
        if unpinned and failure is not None:
            return Row(_report(replica, residency, f"is not pinned: {failure.message}", since), failure.reason)
        return Row(_report(replica, residency, "", since), "")
    if failure is not None:
        return Row(_report(replica, residency, failure.message, since), failure.reason)
    if residence is not None and residence.message:
        return Row(_report(replica, residency, residence.message, since), Reason.LOAD_FAILED)
    boot = world.memory.warmed.get((replica, target.id))
    if boot is not None:
        message = DROPPED if boot == engine.boot else RESTARTED
        return Row(_report(replica, residency, message, since), Reason.DRIFTED)
    return Row(_report(replica, residency, "", since), Reason.LOADING if residency == "loading" else Reason.NOT_WARM)


def _report(replica: ReplicaId, residency: ResidencyClass, message: str, since: str = "") -> dict[str, str]:
    return {"name": str(replica), "residency": residency, "since": since, "message": message[:MESSAGE_MAX]}


def ready_verdict(blocked: Verdict | None, wish: Wish | None, rows: list[Row]) -> Verdict:
    """Ready means: the object's spec is what serves, warm on every replica it should be warm on."""
    ready = sum(not row.reason for row in rows)
    versions = " and ".join(str(target.id.version) for target in wish.weighted) if wish else ""
    noun = "versions" if wish and len(wish.weighted) > 1 else "version"
    verb = "serve" if noun == "versions" else "serves"
    serving = f"{noun} {versions} {verb} from {ready} of {len(rows)} replicas" if ready else ""
    if blocked is not None:
        message = f"{blocked.message}; {serving}" if serving else blocked.message
        return Verdict("Ready", "False", blocked.reason, message)
    cold = [row for row in rows if row.reason]
    if not cold:
        return Verdict("Ready", "True", Reason.READY, serving or "loads on request")
    return Verdict("Ready", "False", _worst(cold), "; ".join(row.told for row in cold))


#: Waits and work under way, the least telling first.
_MILD = (Reason.NOT_WARM, Reason.LOADING, Reason.DRIFTED, Reason.REPLICA_NOT_READY)


def _worst(cold: list[Row]) -> str:
    """A failure before work under way: it is what somebody has to look at."""
    reasons = [row.reason for row in cold]
    failed = [reason for reason in reasons if reason not in _MILD]
    return failed[0] if failed else next(mild for mild in reversed(_MILD) if mild in reasons)
