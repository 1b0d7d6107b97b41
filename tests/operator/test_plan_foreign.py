"""What somebody else wrote into our objects, and clocks that are not ours: the plan holds, and nothing is lost."""

import copy
from dataclasses import replace
from typing import Any

import pytest

from loraplane_core.labels import ADAPTER_KIND, POOL_KIND
from loraplane_core.resources.reasons import Reason
from loraplane_operator.actions import (
    ActivateVersion,
    ApplyWorkload,
    ReleaseClaim,
    SetFinalizer,
    SetStatus,
    Warm,
    Withdraw,
)
from loraplane_operator.cluster.ownership import owned_status
from loraplane_operator.plan import plan
from loraplane_operator.plan.deletion import DEADLINE_SECONDS
from loraplane_operator.plan.pools import DELETION_SECONDS
from loraplane_operator.words import Wait, World
from tests.operator.plans import condition, of, told
from tests.operator.worlds import (
    NOW,
    POOL,
    adapter,
    entry,
    everywhere,
    meta,
    pool,
    registry,
    residence,
    world,
)

GONE = NOW - 3600  # by the clock of the API server, which may be any


def without(status: Any, field: str) -> dict[str, Any]:
    """As it is read once somebody else has set this field of its conditions, which makes it theirs."""
    left: dict[str, Any] = copy.deepcopy(dict(status))
    for each in left["conditions"]:
        del each[field]
    return left


def taken(seen: World, field: str) -> World:
    written = told(seen)
    objects = tuple(replace(obj, status=without(obj.status, field)) for obj in written.adapters)
    pools = {ref: replace(each, status=without(each.status, field)) for ref, each in written.pools.items()}
    return replace(written, adapters=objects, pools=pools)


@pytest.mark.parametrize("field", ["status", "reason", "message", "lastTransitionTime"])
def test_condition_of_which_another_took_a_part_is_written_anew_and_breaks_no_plan(field: str) -> None:
    warm = world(**everywhere(residence()))
    seen = plan(taken(warm, field))
    assert not seen.broken
    written = {action.ref.kind for action in seen.actions if isinstance(action, SetStatus)}
    assert written == {ADAPTER_KIND, POOL_KIND}
    assert condition(taken(warm, field), "Ready") == ("True", "Ready")


@pytest.mark.parametrize("field", ["status", "reason", "message", "lastTransitionTime"])
def test_deletion_goes_on_where_another_took_a_part_of_the_status(field: str) -> None:
    seen = taken(world(**everywhere(residence())), field)
    (obj,) = seen.adapters
    going = replace(seen, adapters=(replace(obj, meta=replace(obj.meta, deleting_since=NOW)),))
    assert not plan(going).broken
    assert of(ActivateVersion, going)


def test_field_that_another_manager_took_is_not_read_as_ours() -> None:
    """The ground of the above: server-side apply leaves us the rest of the condition."""
    raw = {
        "metadata": {
            "managedFields": [
                {
                    "manager": "loraplane-operator",
                    "operation": "Apply",
                    "subresource": "status",
                    "fieldsV1": {"f:status": {"f:conditions": {'k:{"type":"Ready"}': {"f:type": {}, "f:status": {}}}}},
                }
            ]
        },
        "status": {"conditions": [{"type": "Ready", "status": "True", "reason": "Theirs"}]},
    }
    assert owned_status(raw) == {"conditions": [{"type": "Ready", "status": "True"}]}


# -- deletion, by a clock of our own


def going(**changes: Any) -> World:
    return world(adapters=(adapter(meta=meta(ADAPTER_KIND, "pirate", deleting_since=GONE)),), **changes)


def since(seen: World, uid: str, seconds: float) -> World:
    waits: dict[Wait, float] = {("delete", uid): NOW - seconds}
    return replace(seen, memory=replace(seen.memory, waits=waits))


def test_deletion_that_is_old_by_another_clock_is_carried_out_all_the_same() -> None:
    """The API server's clock may be ahead, or the operator was away: what is due is not skipped."""
    seen = going(**everywhere(residence()))
    assert [action.request.version for action in of(ActivateVersion, seen)] == [0]
    assert of(SetFinalizer, seen) == []
    assert ("delete", "uid-pirate") in plan(seen).waits


def test_deadline_counts_from_when_the_deletion_was_first_seen() -> None:
    seen = going(registry=None)
    assert of(SetFinalizer, since(seen, "uid-pirate", DEADLINE_SECONDS - 1)) == []
    (gone,) = of(SetFinalizer, since(seen, "uid-pirate", DEADLINE_SECONDS))
    assert not gone.present
    assert [note.reason for note in gone.notes] == [Reason.DELETION_TIMED_OUT]


def test_pools_deadline_counts_from_when_the_deletion_was_first_seen() -> None:
    gone = pool(meta=meta(POOL_KIND, "pool", deleting_since=GONE))
    seen = world(pools={POOL: gone}, adapters=(), registry=registry())
    assert of(SetFinalizer, seen) == []
    assert of(SetFinalizer, since(seen, gone.meta.uid, DELETION_SECONDS - 1)) == []
    assert of(SetFinalizer, since(seen, gone.meta.uid, DELETION_SECONDS))


def test_object_that_another_finalizer_holds_is_served_no_more_though_ours_was_taken_off() -> None:
    """Somebody edited the finalizers; the object stays for another's sake, maybe for days."""
    gone = adapter(meta=meta(ADAPTER_KIND, "pirate", deleting_since=NOW, finalized=False), deletion_policy="delete")
    seen = world(adapters=(gone,), **everywhere(residence()))
    assert of(ActivateVersion, seen)
    stopped = replace(seen, registry=registry(entry(active_version=0)))
    told_at = dict.fromkeys(plan(stopped).residues, NOW)
    late = replace(stopped, now=NOW + 10, memory=replace(stopped.memory, residue_since=told_at))
    assert of(Withdraw, late)
    free = replace(late, **everywhere())
    assert [action.versions for action in of(ReleaseClaim, free)] == ["delete"]
    assert of(SetFinalizer, free) == of(Warm, free) == []
    left = plan(replace(free, registry=registry())).actions
    assert [action for action in left if getattr(action, "ref", gone.meta.ref) == gone.meta.ref] == []


def test_workload_of_which_somebody_may_have_changed_a_part_is_applied_again() -> None:
    seen = world(suspects=frozenset({POOL}))
    (action,) = of(ApplyWorkload, seen)
    assert action.why == "somebody may have changed a part of it"
    assert of(ApplyWorkload, world()) == []
