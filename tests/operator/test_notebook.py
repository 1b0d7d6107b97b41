"""What the operator remembers, and when it forgets."""

from loraplane_core.wire.registry import PoolReport
from loraplane_operator.actions import Action, ClaimAdapter, Warm
from loraplane_operator.notebook import Notebook
from loraplane_operator.plan import plan
from loraplane_operator.plan.adapters import claim_request
from loraplane_operator.words import Failure, Plan
from tests.operator.worlds import NOW, POOL, adapter, entry, registry, world

CLAIM = ClaimAdapter("uid-pirate", claim_request(adapter()), why="")
FAILED = Failure("tenant_not_bound", "no", 3, NOW + 30)


def test_change_of_a_tenant_voids_its_refusals_only() -> None:
    book = Notebook()
    (warm,) = [action for action in plan(world()).actions if isinstance(action, Warm)]
    book.failures = {CLAIM: FAILED, warm: FAILED}
    book.tenant_changed("globex")
    assert set(book.failures) == {CLAIM, warm}
    book.tenant_changed("acme")
    assert set(book.failures) == {warm}


def test_failure_of_what_is_no_longer_planned_is_forgotten() -> None:
    book = Notebook()
    book.failures = {CLAIM: FAILED}
    actions: tuple[Action, ...] = (CLAIM,)
    book.planned(Plan(actions), NOW)
    assert set(book.failures) == {CLAIM}
    book.planned(Plan(), NOW)
    assert book.failures == {}


def test_new_feed_makes_it_report_pools_again() -> None:
    book = Notebook()
    book.reports[POOL] = PoolReport(base_model="base-a")
    book.claims.add("u")
    book.reconnected()
    assert (book.reports, book.claims) == ({}, set())


def test_answers_are_overtaken_by_the_feed() -> None:
    book = Notebook()
    book.claims, book.released = {"uid-pirate", "late"}, {"uid-json", "gone"}
    book.learn([], frozenset(), registry(entry(), entry("json")))
    assert (book.claims, book.released) == ({"late"}, {"uid-json"})
