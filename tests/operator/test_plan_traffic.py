"""Which versions serve: weights that an object asks for, and versions that become active once they are warm."""

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from loraplane_core.resources.adapter import LoRAAdapter
from loraplane_core.wire.registry import Adapter, SetTraffic, Share, Warmed
from loraplane_operator.actions import ActivateVersion, ClaimAdapter, ConfirmWarm, SplitTraffic, Warm
from loraplane_operator.objects import adapter_object
from loraplane_operator.words import AdapterObject, World
from tests.operator.plans import HOME, condition, failed, of, status
from tests.operator.worlds import (
    adapter,
    engine,
    entry,
    everywhere,
    pool,
    registry,
    residence,
    version,
    with_engines,
    world,
)

CANARY = ((1, 90), (2, 10))


def weighted(*weights: int, **changes: Any) -> Adapter:
    versions = [version(number=number, weight=weight) for number, weight in enumerate(weights, 1)]
    heaviest = max(range(len(weights)), key=lambda index: (weights[index], -index)) + 1
    fields: dict[str, Any] = {"active_version": heaviest if any(weights) else 0, "activation_owner": "object"}
    return entry("pirate", *versions, **{**fields, **changes})


def asked(shown: Adapter, obj: AdapterObject | None = None, **changes: Any) -> World:
    return world(adapters=(obj or adapter(traffic=CANARY),), registry=registry(shown), **changes)


BOTH = (residence(), residence("acme/pirate@2"))

# -- weights


def test_manifest_with_one_whole_share_is_an_active_version() -> None:
    def read(*shares: tuple[int, int]) -> AdapterObject:
        traffic = [{"version": number, "weight": weight} for number, weight in shares]
        spec = {"tenant": "acme", "poolRef": {"name": "pool"}, "source": {"uri": "file:x"}, "traffic": traffic}
        return adapter_object(LoRAAdapter.model_validate({"metadata": {"name": "pirate"}, "spec": spec}), {})

    one = read((3, 100), (4, 0))
    assert (one.active_version, one.traffic, one.owns_activation) == (3, (), True)
    two = read((4, 10), (3, 90))
    assert (two.active_version, two.traffic, two.owns_activation) == (None, ((3, 90), (4, 10)), True)


def test_weights_are_set_in_one_request_by_compare_and_set() -> None:
    seen = asked(weighted(100, 0))
    (split,) = of(SplitTraffic, seen)
    assert split.request == SetTraffic(
        shares=[Share(version=1, weight=90), Share(version=2, weight=10)], expect=[Share(version=1, weight=100)]
    )
    assert of(ActivateVersion, seen) == []
    assert condition(seen, "Placed") == ("False", "Progressing")


def test_weights_that_are_set_are_left_alone() -> None:
    seen = asked(weighted(90, 10), **everywhere(*BOTH))
    assert of(SplitTraffic, seen) == of(ActivateVersion, seen) == []
    assert condition(seen, "Ready") == ("True", "Ready")
    assert condition(seen, "Placed") == ("True", "Placed")


def test_weights_changed_by_somebody_else_are_set_again() -> None:
    (split,) = of(SplitTraffic, asked(weighted(50, 50)))
    assert [share.weight for share in split.request.expect or []] == [50, 50]


def test_whole_share_of_one_version_ends_a_split() -> None:
    seen = asked(weighted(90, 10), adapter(active_version=2))
    (moved,) = of(ActivateVersion, seen)
    assert (moved.request.version, moved.request.expect_active) == (2, 1)
    same = asked(weighted(90, 10), adapter(active_version=1))
    assert [each.request.version for each in of(ActivateVersion, same)] == [1]


@pytest.mark.parametrize(
    ("versions", "told"),
    [
        ([version()], "there is no version 2"),
        ([version(), version(number=2, state="ingesting")], "version 2 is ingesting"),
        ([version(), version(number=2, state="rejected")], "version 2 is rejected"),
    ],
)
def test_version_that_cannot_serve_holds_up_the_split_and_says_so(versions: list[Any], told: str) -> None:
    shown = entry("pirate", *versions, activation_owner="object")
    seen = asked(shown, **everywhere(residence()))
    assert of(SplitTraffic, seen) == []
    (placed,) = [each for each in status(seen)["conditions"] if each["type"] == "Placed"]
    assert (placed["status"], placed["reason"], placed["message"]) == ("False", "NotActivatable", told)
    assert status(seen)["resident"] == "1/1"  # version 1 goes on serving


def test_refused_split_gives_its_reason() -> None:
    seen = failed(asked(weighted(100, 0)), SplitTraffic, "active_changed")
    assert condition(seen, "Placed") == ("False", "ActiveChanged")


def test_every_version_with_weight_is_warmed_on_the_same_replicas() -> None:
    shown = msgspec.structs.replace(weighted(60, 0, 40), warm_replicas=2)
    seen = asked(shown, adapter(warm_replicas=2, traffic=((1, 60), (3, 40))))
    assert {(each.replica, each.id.version) for each in of(Warm, seen)} == {
        (replica, number) for replica in pool().replica_ids for number in (1, 3)
    }


def test_object_is_ready_only_when_all_its_weighted_versions_are_warm() -> None:
    half = asked(weighted(90, 10), **everywhere(residence()))
    assert condition(half, "Ready") == ("False", "NotWarm")
    assert status(half)["resident"] == "0/1"
    loading = asked(weighted(90, 10), **everywhere(residence(), residence("acme/pirate@2", residency="loading")))
    assert condition(loading, "Ready") == ("False", "Loading")
    (row,) = status(loading)["replicas"]
    assert row["residency"] == "loading"


def test_row_of_a_split_names_the_version_that_is_in_trouble() -> None:
    bad = residence("acme/pirate@2", residency="absent", message="truncated")
    (row,) = status(asked(weighted(90, 10), **everywhere(residence(), bad)))["replicas"]
    assert row["message"] == "version 2: truncated"


def test_unset_activation_is_given_back_and_the_pointer_stays() -> None:
    seen = asked(weighted(0, 100), adapter(), **everywhere(*BOTH))
    (claim,) = of(ClaimAdapter, seen)
    assert not claim.request.owns_activation
    assert of(ActivateVersion, seen) == of(SplitTraffic, seen) == []


def test_weights_wait_until_the_registry_knows_who_decides() -> None:
    seen = asked(weighted(100, 0, activation_owner="registry"))
    assert of(SplitTraffic, seen) == []
    assert [claim.request.owns_activation for claim in of(ClaimAdapter, seen)] == [True]


# -- versions that wait until they are warm


def waiting(**changes: Any) -> World:
    shown = weighted(100, 0, activation_owner="registry", intent_version=2)
    return asked(shown, adapter(), **changes)


def test_waiting_version_is_warmed_beside_the_active_one() -> None:
    seen = waiting()
    assert {(each.replica, each.id.version) for each in of(Warm, seen)} == {(HOME, 1), (HOME, 2)}
    assert of(ConfirmWarm, seen) == []


def test_waiting_version_is_confirmed_once_it_is_warm_everywhere() -> None:
    confirmed = of(ConfirmWarm, waiting(**everywhere(*BOTH)))
    assert [(each.tenant, each.adapter, each.request) for each in confirmed] == [
        ("acme", "pirate", Warmed(version=2, digest="2" * 64))
    ]
    two = waiting(**with_engines(engine(0, *BOTH), engine(1, residence())))
    two = replace(two, adapters=(adapter(warm_replicas=2),))
    assert of(ConfirmWarm, two) == []


def test_waiting_version_changes_neither_status_nor_ready() -> None:
    seen = waiting(**everywhere(residence()))
    assert condition(seen, "Ready") == ("True", "Ready")
    assert status(seen)["activeVersion"] == 1


def test_waiting_version_of_an_adapter_made_by_rest_alone_is_confirmed_too() -> None:
    shown = weighted(0, 0, claim_uid="", claim_ref="", intent_version=1, activation_owner="registry")
    cold = world(adapters=(), registry=registry(shown))
    assert {(each.replica, each.id.version) for each in of(Warm, cold)} == {(HOME, 1)}
    warm = replace(cold, **everywhere(residence()))
    assert [each.request.version for each in of(ConfirmWarm, warm)] == [1]


@pytest.mark.parametrize("state", ["unverified", "pending_base", "ingesting", "rejected"])
def test_version_that_is_not_validated_reaches_no_engine_o13(state: str) -> None:
    shown = entry("pirate", version(), version(number=2, state=state), intent_version=2)
    assert {each.id.version for each in of(Warm, world(registry=registry(shown)))} == {1}


def test_version_that_waits_to_get_all_requests_while_it_gets_some_is_confirmed() -> None:
    shown = weighted(60, 40, intent_version=1, activation_owner="registry")
    seen = world(registry=registry(shown), **everywhere(*BOTH))
    assert [each.request.version for each in of(ConfirmWarm, seen)] == [1]


def test_waiting_version_that_may_not_run_there_is_never_confirmed_and_whoever_waits_is_told_why() -> None:
    shown = entry("pirate", version(), version(number=2, rank=128), intent_version=2)
    seen = world(registry=registry(shown), **everywhere(*BOTH))
    (told,) = of(ConfirmWarm, seen)
    assert (told.request.version, told.request.digest) == (2, "")  # no digest: no registry can take it for a flip
    assert "128" in told.request.refusal
    assert condition(seen, "Ready") == ("True", "Ready")  # version 1 is not affected
