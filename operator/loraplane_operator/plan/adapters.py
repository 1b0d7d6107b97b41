"""A LoRAAdapter's way: Claimed -> Ingested -> Validated -> Placed -> Ready, one function per phase.

Each phase looks at the world, says what it finds and asks for at most one action. The first phase that
does not hold gives Ready its reason, so `kubectl get` tells what an object waits for. Serving goes on
meanwhile: warmth follows the registry's active version, whatever a new source does.
"""

from dataclasses import dataclass, field
from typing import Any

from loraplane_core.identity import AdapterRef
from loraplane_core.resources.reasons import Reason, reason_for
from loraplane_core.wire.registry import (
    PASSING_REJECTIONS,
    Activate,
    Adapter,
    ClaimRequest,
    RegisterSource,
    SetTraffic,
    Share,
    Source,
    Version,
)
from loraplane_operator.actions import (
    Action,
    ActivateVersion,
    ClaimAdapter,
    Register,
    SetFinalizer,
    SplitTraffic,
)
from loraplane_operator.plan.conditions import Verdict, render
from loraplane_operator.plan.deletion import plan_deletion
from loraplane_operator.plan.notes import notes
from loraplane_operator.plan.readiness import Row, Troubles, ready_verdict, replica_rows
from loraplane_operator.plan.status import ObjectPlan, status_action
from loraplane_operator.plan.warmth import Warmth
from loraplane_operator.plan.wishes import (
    Wish,
    admits,
    holds_claim,
    refuse_placement,
    roomier_pool,
    shares_of,
    version_of,
)
from loraplane_operator.words import AdapterObject, World

#: A registered version that the feed does not show after this long is gone, not late.
FEED_LAG_SECONDS = 5.0
#: Between two tries of a source that the registry has given up on.
AGAIN_SECONDS = 60.0
#: What messages say of it.
AGAIN = "; tried again every minute"


@dataclass
class Findings:
    """What the phases found so far; each phase appends its verdict and, perhaps, an action."""

    verdicts: list[Verdict] = field(default_factory=list)
    actions: list[Action] = field(default_factory=list)
    version: Version | None = None  # the one the source was registered as
    due_at: float | None = None  # when time alone makes the next look necessary

    @property
    def blocked(self) -> Verdict | None:
        return next((verdict for verdict in self.verdicts if not verdict.holds), None)


def plan_adapter(world: World, obj: AdapterObject, wish: Wish | None, warmth: Warmth, troubles: Troubles) -> ObjectPlan:
    """Looks at the object, its own registry entry, its pool, its wish, and what engines hold of that; `wish` and
    the shared parts are made once per pass. `wish` is None also where the adapter is another object's."""
    if obj.meta.deleting_since is not None:
        return plan_deletion(world, obj, warmth)
    if not obj.meta.finalized:
        return ObjectPlan([SetFinalizer(obj.meta.ref, obj.meta.uid, present=True, why="new adapter")])
    if wish is not None and (wish.holder is None or wish.holder.meta.uid != obj.meta.uid):
        wish = None
    findings = Findings()
    for phase in (_claim, _ingest, _validate):
        phase(world, obj, findings)
    _activate(world, obj, findings)
    _place(world, obj, findings, wish)
    rows = replica_rows(world, wish, troubles) if wish and wish.weighted else []
    findings.verdicts.append(ready_verdict(findings.blocked, wish, rows))
    status = _status(world, obj, findings, wish, rows)
    write, due = status_action(world, obj.meta, obj.status, status, notes(world, obj, wish, status))
    return ObjectPlan(
        findings.actions + write, min((at for at in (due, findings.due_at) if at is not None), default=None)
    )


def _pending(kind: str, message: str) -> Verdict:
    return Verdict(kind, "Unknown", Reason.PENDING, message)


def _claim(world: World, obj: AdapterObject, findings: Findings) -> None:
    findings.verdicts.append(_claim_verdict(world, obj, findings))


def _claim_verdict(world: World, obj: AdapterObject, findings: Findings) -> Verdict:
    if world.registry is None:
        return Verdict("Claimed", "Unknown", Reason.REGISTRY_UNAVAILABLE, "the registry has not answered yet")
    entry = world.registry.adapters.get(obj.key)
    refusal = _refuse_claim(world, obj, entry)
    if refusal is not None:
        return Verdict("Claimed", "False", *refusal)
    request = claim_request(obj)
    held = holds_claim(world, obj)
    if held and (entry is None or _claim_of(entry) == request):
        return Verdict("Claimed", "True", Reason.CLAIMED, f"speaks for {obj.tenant}/{obj.adapter}")
    if not held and world.memory.reports.get(obj.pool) is None:
        return _pending("Claimed", f"pool {obj.pool} is not reported to the registry yet")
    claim = ClaimAdapter(obj.meta.uid, request, why="edited" if held else "unclaimed")
    findings.actions.append(claim)
    failure = world.failure(claim)
    if failure is not None:
        return Verdict("Claimed", "False", failure.reason, failure.message)
    if held:
        return Verdict("Claimed", "True", Reason.CLAIMED, "the edit is on its way to the registry")
    return _pending("Claimed", "asking the registry")


def _refuse_claim(world: World, obj: AdapterObject, entry: Adapter | None) -> tuple[str, str] | None:
    registry = world.registry
    if registry is None or obj.tenant not in registry.tenants:
        command = f"`loraplane tenant create {obj.tenant} --namespace {obj.meta.ref.namespace}`"
        return Reason.TENANT_UNKNOWN, f"tenant {obj.tenant} does not exist; create it with {command}"
    other = entry is not None and entry.claim_uid not in ("", obj.meta.uid, *world.memory.released)
    if entry is not None and other and not holds_claim(world, obj):
        return Reason.CLAIMED_BY_OTHER, f"{obj.tenant}/{obj.adapter} is claimed by {entry.claim_ref}"
    pool = world.pools.get(obj.pool)
    if pool is None:
        told = f"there is no BaseModelPool {obj.pool}; create it, or make this object anew with another poolRef"
        missing = Reason.POOL_NOT_FOUND, told
        return None if holds_claim(world, obj) else missing  # a claim held outlives its pool
    if not world.honours(obj.pool):
        told = f"pool {obj.pool} has no engines: the release does not honour pools in its namespace (pools.namespaces)"
        return Reason.POOL_NAMESPACE_NOT_HONOURED, told
    refusal = admits(pool, obj.tenant, obj.meta.ref.namespace)
    if refusal is None:
        return None
    gone = pool.meta.deleting_since is not None
    return Reason.POOL_NOT_FOUND if gone else Reason.POOL_NOT_ALLOWED, refusal


def claim_request(obj: AdapterObject) -> ClaimRequest:
    return ClaimRequest(
        ref=f"{obj.meta.ref.namespace}/{obj.meta.ref.name}",
        tenant=obj.tenant,
        adapter=obj.adapter,
        pool=str(obj.pool),
        warm_replicas=obj.warm_replicas,
        pinned=obj.pinned,
        owns_activation=obj.owns_activation,
    )


def _claim_of(entry: Adapter) -> ClaimRequest:
    return ClaimRequest(
        ref=entry.claim_ref,
        tenant=entry.tenant,
        adapter=entry.adapter,
        pool=entry.pool,
        warm_replicas=entry.warm_replicas,
        pinned=entry.pinned,
        owns_activation=entry.activation_owner == "object",
    )


def _ingest(world: World, obj: AdapterObject, findings: Findings) -> None:
    if findings.blocked:
        findings.verdicts.append(_pending("Ingested", "waits for the claim"))
        return
    known = world.memory.registered.get((obj.meta.uid, obj.source_hash))
    if known is not None:
        findings.version = _current(world, obj, known, findings)
    elif _told_source(world, obj) == obj.source_hash:
        findings.version = _told_version(world, obj)
    else:
        findings.verdicts.append(_register(world, obj, findings, known_only=False, why="source not registered"))
        return
    if findings.version is None:
        # Removed by somebody, or its bytes were a version already and it became that one: the registry knows.
        why = "its version is not in the feed any more"
        findings.verdicts.append(_register(world, obj, findings, known_only=True, why=why))
    else:
        if _may_come_right(world, obj, findings.version, findings):
            _register(world, obj, findings, known_only=True, why="its source could not be read")
        findings.verdicts.append(_ingested(world, obj, findings.version))


def _may_come_right(world: World, obj: AdapterObject, version: Version, findings: Findings) -> bool:
    """A source that could not be read is asked for again now and then: nothing tells when it is back."""
    if version.state != "rejected" or version.reason not in PASSING_REJECTIONS:
        return False
    again_at = world.memory.registered_at.get((obj.meta.uid, obj.source_hash), 0.0) + AGAIN_SECONDS
    if world.now >= again_at:
        return True
    findings.due_at = again_at
    return False


def _register(world: World, obj: AdapterObject, findings: Findings, *, known_only: bool, why: str) -> Verdict:
    if any(isinstance(action, ClaimAdapter) for action in findings.actions):
        # Registering activates, unless the object owns activation: that has to be known first.
        return Verdict("Ingested", "False", Reason.PROGRESSING, "registers the source after the claim")
    source = Source(uri=obj.source_uri, digest=obj.source_digest)
    named = world.memory.source_hashes.get(obj.meta.uid, frozenset()) | {_told_source(world, obj)}
    named_other = bool(named - {obj.source_hash, ""})
    request = RegisterSource(
        source=source, source_hash=obj.source_hash, known_only=known_only, returned=named_other and not known_only
    )
    register = Register(obj.meta.uid, obj.tenant, request, why=why)
    findings.actions.append(register)
    failure = world.failure(register)
    if failure is None:
        return Verdict("Ingested", "False", Reason.PROGRESSING, "registering the source")
    if failure.code in PASSING_REJECTIONS:
        advice = AGAIN
    elif failure.reason == Reason.ADAPTER_WITHDRAWN:
        advice = "; change spec.source to register another"
    else:
        advice = ""
    return Verdict("Ingested", "False", failure.reason, failure.message + advice)


def _told_source(world: World, obj: AdapterObject) -> str:
    """Of the source that this object registered last, by the feed; "" where it tells none."""
    entry = world.registry.adapters.get(obj.key) if world.registry else None
    return entry.source_hash if entry is not None and entry.claim_uid == obj.meta.uid else ""


def _told_version(world: World, obj: AdapterObject) -> Version | None:
    """The version that the object's source is, by the feed. A restart registers nothing that this tells."""
    entry = world.registry.adapters.get(obj.key) if world.registry else None
    return version_of(entry, entry.source_version) if entry is not None else None


def _current(world: World, obj: AdapterObject, known: Version, findings: Findings) -> Version | None:
    """The registered version as the feed has it now; None when the feed has it no more."""
    entry = world.registry.adapters.get(obj.key) if world.registry else None
    shown = version_of(entry, known.version)
    if shown is None and _told_source(world, obj) == obj.source_hash:
        shown = _told_version(world, obj)  # its bytes were a version already, and it became that one
    if shown is not None:
        return shown
    if world.registry is None or not world.registry.live:
        return known
    at = world.memory.registered_at.get((obj.meta.uid, obj.source_hash), world.now)
    removed = AdapterRef(*obj.key, known.version) in world.registry.withdrawn
    if removed or world.now >= at + FEED_LAG_SECONDS:
        return None
    findings.due_at = at + FEED_LAG_SECONDS
    return known


def _ingested(world: World, obj: AdapterObject, version: Version) -> Verdict:
    if version.state == "unverified":
        return Verdict("Ingested", "False", Reason.UNVERIFIED, version.message)
    if version.state == "pending_base":
        waits = version.message or "waits for an engine to tell the base model's configuration"
        return Verdict("Ingested", "False", Reason.PENDING_BASE, waits)
    if version.state == "ingesting":
        return Verdict("Ingested", "False", Reason.INGESTING, f"version {version.version} is being fetched and checked")
    if version.state == "rejected" and not version.digest:
        return Verdict("Ingested", "False", *_rejection(world, obj, version))
    return Verdict("Ingested", "True", Reason.INGESTED, f"version {version.version}, {version.bytes} bytes")


def _validate(world: World, obj: AdapterObject, findings: Findings) -> None:
    version = findings.version
    if version is not None and version.state == "rejected":
        findings.verdicts.append(Verdict("Validated", "False", *_rejection(world, obj, version)))
    elif findings.blocked or version is None:
        findings.verdicts.append(_pending("Validated", "waits for the artifact"))
    else:
        told = f"rank {version.rank}, base {version.base_model} by {version.base_evidence or 'declaration'}"
        findings.verdicts.append(Verdict("Validated", "True", Reason.VALIDATED, told))


def _rejection(world: World, obj: AdapterObject, version: Version) -> tuple[str, str]:
    reason, pool = reason_for(version.reason or "artifact_rejected"), world.pools.get(obj.pool)
    if version.reason in PASSING_REJECTIONS:
        return reason, version.message + AGAIN
    if reason != Reason.RANK_TOO_HIGH or pool is None:
        return reason, version.message
    rank = version.rank or pool.max_rank + 1  # a rejected artifact's rank is told in words only
    return reason, f"{version.message}; {roomier_pool(world, pool, obj.tenant, obj.meta.ref.namespace, rank)}"


def _activate(world: World, obj: AdapterObject, findings: Findings) -> None:
    """An object that owns activation moves pointer and weights; needs no phase before it but the claim."""
    entry = world.registry.adapters.get(obj.key) if world.registry else None
    wanted = obj.wanted_shares
    if not wanted or entry is None or not holds_claim(world, obj) or entry.activation_owner != "object":
        return
    now = shares_of(entry)
    if now == wanted or any(_unservable(entry, number) for number in wanted):
        return
    if obj.active_version is not None:
        request = Activate(version=obj.active_version, expect_active=entry.active_version)
        findings.actions.append(ActivateVersion(obj.meta.uid, obj.tenant, request, why="spec.activeVersion"))
    else:
        shares = SetTraffic(shares=_shares(wanted), expect=_shares(now))
        findings.actions.append(SplitTraffic(obj.meta.uid, obj.tenant, shares, why="spec.traffic"))


def _shares(shares: dict[int, int]) -> list[Share]:
    return [Share(version=version, weight=weight) for version, weight in sorted(shares.items())]


def _unservable(entry: Adapter, number: int) -> str:
    """Why this version cannot serve; "" when it can."""
    version = version_of(entry, number)
    if version is None:
        return f"there is no version {number}"
    return "" if version.state == "validated" else f"version {number} is {version.state}"


def _place(world: World, obj: AdapterObject, findings: Findings, wish: Wish | None) -> None:
    findings.verdicts.append(_placed(world, obj, findings, wish))


def _placed(world: World, obj: AdapterObject, findings: Findings, wish: Wish | None) -> Verdict:
    if not findings.verdicts[0].holds:
        return _pending("Placed", "waits for the claim")
    activation = _refuse_activation(world, obj, findings)
    if activation is not None:
        return activation
    if wish is None or not wish.weighted:
        return _not_active(world, obj, findings)
    if wish.refusal is not None:
        return Verdict("Placed", "False", *wish.refusal)
    if len(wish.replicas) < obj.warm_replicas:
        few = f"warmReplicas is {obj.warm_replicas}, the pool has {len(wish.replicas)} replicas"
        return Verdict("Placed", "False", Reason.NO_REPLICA, few)
    names = ", ".join(str(replica) for replica in wish.replicas) or "nowhere, as asked"
    shares = wish.weighted
    told = [f"{each.id.version} ({each.weight} %)" if len(shares) > 1 else str(each.id.version) for each in shares]
    return Verdict("Placed", "True", Reason.PLACED, f"version {', '.join(told)} on {names}")


def _not_active(world: World, obj: AdapterObject, findings: Findings) -> Verdict:
    pool = world.pools.get(obj.pool)
    if pool is None:
        return Verdict("Placed", "False", Reason.POOL_NOT_FOUND, f"there is no BaseModelPool {obj.pool}")
    if findings.version is not None and findings.version.state == "validated":
        refusal = refuse_placement(world, obj.pool, pool, findings.version, obj.meta.ref.namespace)
        if refusal is not None:
            return Verdict("Placed", "False", *refusal)
    return Verdict("Placed", "False", Reason.NOT_ACTIVATED, "no version is active")


def _refuse_activation(world: World, obj: AdapterObject, findings: Findings) -> Verdict | None:
    """Why what serves is not what the object asks for; None where it is, or where the object leaves it open."""
    entry = world.registry.adapters.get(obj.key) if world.registry else None
    wanted = obj.wanted_shares
    if not wanted or entry is None or shares_of(entry) == wanted:
        return None
    troubles = [why for why in (_unservable(entry, number) for number in sorted(wanted)) if why]
    if troubles:
        return Verdict("Placed", "False", Reason.NOT_ACTIVATABLE, "; ".join(troubles))
    for action in findings.actions:
        failure = world.failure(action)
        if isinstance(action, ActivateVersion | SplitTraffic) and failure is not None:
            return Verdict("Placed", "False", failure.reason, failure.message)
    if obj.active_version is not None:
        return Verdict("Placed", "False", Reason.PROGRESSING, f"activating version {obj.active_version}")
    return Verdict("Placed", "False", Reason.PROGRESSING, "setting the weights of spec.traffic")


def _status(world: World, obj: AdapterObject, findings: Findings, wish: Wish | None, rows: list[Row]) -> dict[str, Any]:
    """AdapterStatus as a plain object (a test holds it to the model): it is made for every object in every pass."""
    version = findings.version
    ready = sum(not row.reason for row in rows)
    optional = {
        "version": version and version.version,
        "activeVersion": wish and wish.weighted and wish.id.version,
        "baseModel": version and version.base_model,
        "digest": version and version.digest,
        "rank": version and version.rank,
        "bytes": version and version.bytes,
    }
    return {
        "conditions": render(findings.verdicts, obj.status, obj.meta.generation, world.now),
        "observedGeneration": obj.meta.generation,
        **{name: value for name, value in optional.items() if value},
        "targetModules": list(version.target_modules) if version else [],
        "replicas": [row.report for row in rows],
        "readyReplicas": ready,
        "warmReplicas": obj.warm_replicas,
        "resident": f"{ready}/{obj.warm_replicas}",
    }
