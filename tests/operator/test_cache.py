"""Reports of one object overtake each other; what is kept is the newest, and what is gone stays gone."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplane_operator.actions import ObjectRef
from loraplane_operator.cluster.cache import Cache

REF = ObjectRef("Thing", "default", "a")


def thing(version: int | None, uid: str = "u1", spec: Any = "x", name: str = "a") -> dict[str, Any]:
    metadata = {"name": name, "namespace": "default", "uid": uid}
    return {"metadata": metadata if version is None else {**metadata, "resourceVersion": str(version)}, "spec": spec}


@pytest.fixture
def cache() -> Cache:
    return made()


def made() -> Cache:
    return Cache({"Thing": lambda raw: raw["spec"]})


def test_late_watch_event_does_not_overwrite_the_answer_to_an_own_write(cache: Cache) -> None:
    cache.put("Thing", thing(5, spec="seen"))
    cache.put("Thing", thing(9, spec="written"))
    assert not cache.put("Thing", thing(7, spec="late"))
    assert cache.views("Thing") == ["written"]


def test_same_report_again_is_no_change(cache: Cache) -> None:
    assert cache.put("Thing", thing(5))
    assert not cache.put("Thing", thing(5))


def test_new_version_that_says_the_same_is_no_change_but_is_kept(cache: Cache) -> None:
    cache.put("Thing", thing(5))
    assert not cache.put("Thing", thing(6))
    entry = cache.get(REF)
    assert entry is not None and entry.resource_version == "6"


def test_deleted_object_is_not_resurrected_by_a_late_event(cache: Cache) -> None:
    cache.put("Thing", thing(5))
    assert cache.drop(REF, "u1")
    assert not cache.put("Thing", thing(6))
    assert cache.views("Thing") == []


def test_deletion_of_the_former_object_leaves_the_one_that_took_its_name(cache: Cache) -> None:
    cache.put("Thing", thing(5, "u1"))
    cache.put("Thing", thing(8, "u2", spec="second"))
    assert not cache.drop(REF, "u1")
    assert not cache.put("Thing", thing(6, "u1", spec="first"))
    assert cache.views("Thing") == ["second"]


def test_list_removes_what_it_does_not_hold(cache: Cache) -> None:
    cache.put("Thing", thing(5))
    assert cache.replace("Thing", "default", [thing(6, "u2", name="b", spec="b")], "7")
    assert cache.views("Thing") == ["b"]


def test_list_leaves_what_was_made_after_it(cache: Cache) -> None:
    cache.put("Thing", thing(9))
    assert not cache.replace("Thing", "default", [], "7")
    assert cache.views("Thing") == ["x"]


def test_list_leaves_other_kinds_and_namespaces(cache: Cache) -> None:
    cache.put("Thing", thing(5))
    assert not cache.replace("Thing", "other", [], "7")
    assert cache.views("Thing") == ["x"]


def test_list_does_not_bring_back_what_was_deleted_while_it_was_on_its_way(cache: Cache) -> None:
    cache.put("Thing", thing(5))
    cache.drop(REF, "u1")
    assert not cache.replace("Thing", "default", [thing(5)], "6")
    assert cache.views("Thing") == []


def test_unreadable_object_is_passed_over_and_its_name_kept() -> None:
    cache = Cache({"Thing": lambda raw: None})
    cache.put("Thing", thing(5))
    assert cache.views("Thing") == []
    assert cache.get(REF) is not None


def test_server_without_versions_is_believed_in_order(cache: Cache) -> None:
    cache.put("Thing", thing(None, spec="one"))
    assert cache.put("Thing", thing(None, spec="two"))
    assert cache.views("Thing") == ["two"]


@given(st.permutations(range(1, 8)), st.integers(0, 7))
def test_any_order_of_the_same_history_ends_alike(order: list[int], gone_after: int) -> None:
    """Versions 1..7 of one object in any order, with its deletion somewhere among them."""
    cache = made()
    for position, version in enumerate(order):
        if position == gone_after:
            cache.drop(REF, "u1")
        cache.put("Thing", thing(version, spec=version))
    assert cache.views("Thing") == ([] if gone_after < 7 else [7])


def test_an_object_that_cannot_be_read_is_told_with_its_uid() -> None:
    cache = Cache({"LoRAAdapter": lambda raw: None})
    cache.put("LoRAAdapter", {"metadata": {"namespace": "a", "name": "x", "uid": "u1", "resourceVersion": "5"}})
    assert cache.views("LoRAAdapter") == []
    assert cache.unreadable("LoRAAdapter") == {ObjectRef("LoRAAdapter", "a", "x"): "u1"}
    assert cache.unreadable("BaseModelPool") == {}


def test_object_whose_reading_breaks_costs_nobody_else_the_view(caplog: pytest.LogCaptureFixture) -> None:
    def read(raw: dict[str, Any]) -> object:
        return 1 / raw["spec"]

    cache = Cache({"Thing": read})
    cache.replace("Thing", "default", [thing(5, spec=0)], "5")
    assert cache.replace("Thing", "default", [thing(5, spec=0), thing(6, "u2", spec=1, name="b")], "6")
    assert cache.views("Thing") == [1.0]
    assert cache.unreadable("Thing") == {REF: "u1"}
    assert "reading an object broke" in caplog.text
