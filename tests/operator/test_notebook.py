"""What the operator remembers, and when it forgets."""

from dataclasses import replace
from typing import Any

import pytest

from loraplane_core.wire.engine import ModelInfo
from loraplane_core.wire.registry import PoolReport
from loraplane_operator.actions import Action, ClaimAdapter, Warm
from loraplane_operator.notebook import Notebook
from loraplane_operator.plan import plan
from loraplane_operator.plan.adapters import claim_request
from loraplane_operator.words import Engine, Failure, Plan, PoolObject
from tests.operator.worlds import NOW, POOL, adapter, engine, entry, meta, pool, registry, world

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


def learnt(book: Notebook, *engines: Engine, of: PoolObject) -> str:
    """The base digest that the pool has by now."""
    book.learn(engines, frozenset({of.meta.uid}), None, {of.ref: of})
    found = book.models.get(of.meta.uid)
    return found.base_digest if found else ""


def telling(digest: str, base: str = "base-a", ordinal: int = 0) -> Engine:
    model = ModelInfo(base=base, base_digest=digest, config={}, dtype="float32", max_model_len=8, max_rank=8)
    return engine(ordinal, base=base, base_digest=digest, model=model)


RIGHT, WRONG = "a" * 64, "c" * 64


def test_one_engine_with_another_base_changes_nothing_for_its_pool() -> None:
    book = Notebook()
    assert learnt(book, telling(RIGHT), of=pool()) == RIGHT
    assert learnt(book, telling(RIGHT), telling(WRONG, ordinal=1), of=pool()) == RIGHT


@pytest.mark.parametrize("told", [{"base_digest": RIGHT}, {"status": {"baseDigest": RIGHT}}])
def test_engine_that_differs_from_what_the_pool_says_teaches_nothing(told: dict[str, Any]) -> None:
    """Declared, or found by an operator before this one."""
    book = Notebook()
    assert learnt(book, telling(WRONG), of=pool(**told)) == ""
    assert learnt(book, telling(WRONG), telling(RIGHT, ordinal=1), of=pool(**told)) == RIGHT


def test_pool_made_again_under_its_name_begins_without_the_former_base() -> None:
    book = Notebook()
    assert learnt(book, telling(RIGHT), of=pool()) == RIGHT
    again = pool(base_model="base-b", meta=meta("BaseModelPool", "pool", uid="another"))
    assert learnt(book, of=again) == ""
    assert learnt(book, telling(RIGHT), of=again) == ""  # an engine of the former pool, which is still going
    assert learnt(book, telling(WRONG, "base-b"), of=again) == WRONG
    assert set(book.models) == {"another"}


def test_engine_that_contradicts_itself_teaches_nothing() -> None:
    assert learnt(Notebook(), replace(telling(RIGHT), base_digest=WRONG), of=pool()) == ""
