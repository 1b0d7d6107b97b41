"""An object of another release's schema exists, although nothing can be planned for it."""

from dataclasses import replace

from loraplane_core.labels import ADAPTER_KIND, POOL_KIND
from loraplane_operator.actions import DeleteWorkload, ObjectRef, ReleaseClaim, RemoveReport
from loraplane_operator.plan import plan
from tests.operator.worlds import world

_ENDINGS = (DeleteWorkload, ReleaseClaim, RemoveReport)


def test_what_no_longer_exists_is_cleared_away() -> None:
    gone = replace(world(), pools={}, adapters=())
    assert {type(action) for action in plan(gone).actions} >= set(_ENDINGS)


def test_what_cannot_be_read_keeps_its_claim_its_engines_and_its_report() -> None:
    unread = {ObjectRef(ADAPTER_KIND, "default", "pirate"): "uid-pirate", ObjectRef(POOL_KIND, "default", "pool"): "u"}
    planned = plan(replace(world(), pools={}, adapters=(), unreadable=unread))
    assert not [action for action in planned.actions if isinstance(action, _ENDINGS)]
