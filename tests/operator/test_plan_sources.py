"""What was registered is told by the feed, too, so that a restart asks for nothing twice."""

from dataclasses import replace

from loraplane_core.wire.registry import Version
from loraplane_operator.actions import Register
from loraplane_operator.plan import plan
from loraplane_operator.plan.adapters import AGAIN_SECONDS, FEED_LAG_SECONDS
from loraplane_operator.words import World
from tests.operator.plans import condition, failed, of, status
from tests.operator.worlds import adapter, entry, pool, registry, version, world


def restarted(source_hash: str, number: int, *versions: Version, claim: str = "uid-pirate") -> World:
    """Only the feed knows what was registered: as which version, from which source, for whom."""
    shown = entry("pirate", *versions, source_hash=source_hash, source_version=number, claim_uid=claim)
    memory = replace(world().memory, registered={}, registered_at={}, claims=frozenset({"uid-pirate"}))
    return world(registry=registry(shown), memory=memory)


def test_source_that_the_feed_shows_is_not_registered_again() -> None:
    seen = restarted("h1", 1)
    assert not of(Register, seen)
    assert condition(seen, "Validated") == ("True", "Validated")


def test_source_whose_version_was_removed_is_asked_for_but_not_made_again() -> None:
    seen = restarted("h1", 2, version(number=1))
    (register,) = of(Register, seen)
    assert register.request.known_only
    assert condition(seen, "Ingested")[0] == "False"


def test_source_set_back_while_the_operator_was_down_is_told_as_a_return() -> None:
    (register,) = of(Register, restarted("h0", 1))
    assert register.request.returned


def test_source_that_another_object_registered_is_none_of_ours() -> None:
    (register,) = of(Register, restarted("h0", 1, claim="uid-of-the-one-before"))
    assert not register.request.returned
    (register,) = of(Register, restarted("h1", 1, claim="uid-of-the-one-before"))
    assert not register.request.known_only


def test_answer_is_newer_than_the_feed() -> None:
    """The feed still shows the source before; registering it again would be a return that nobody asked for."""
    seen = restarted("h0", 1)
    memory = replace(seen.memory, registered={("uid-pirate", "h1"): version(number=2)})
    assert not of(Register, replace(seen, memory=memory))


def given_up(reason: str, *, asked: float | None) -> World:
    """The registry rejected the source's version; the operator asked for it `asked` seconds ago, if it remembers."""
    rejected = version(state="rejected", reason=reason, message="no answer", digest="", rank=0)
    seen = restarted("h1", 1, rejected)
    at = {} if asked is None else {("uid-pirate", "h1"): seen.now - asked}
    known = dict.fromkeys(at, rejected)
    return replace(seen, memory=replace(seen.memory, registered=known, registered_at=at))


def test_source_that_could_not_be_read_is_tried_again_now_and_then_o4() -> None:
    seen = given_up("source_unavailable", asked=AGAIN_SECONDS - 1)
    assert not of(Register, seen)
    assert condition(seen, "Ready") == ("False", "SourceUnavailable")
    ready = next(each for each in status(seen)["conditions"] if each["type"] == "Ready")
    assert ready["message"] == "no answer; tried again every minute"
    assert plan(seen).due_at == seen.now + 1
    (register,) = of(Register, given_up("source_unavailable", asked=AGAIN_SECONDS))
    assert register.request.known_only
    assert of(Register, given_up("source_unavailable", asked=None))
    assert not of(Register, given_up("digest_mismatch", asked=None))  # these bytes stay what they are


def test_registering_that_may_come_right_says_that_it_is_tried_again() -> None:
    seen = world(adapters=(adapter(source_hash="h2"),))
    for code, told in (("source_not_found", "no; tried again every minute"), ("source_not_allowed", "no")):
        ready = next(each for each in status(failed(seen, Register, code))["conditions"] if each["type"] == "Ready")
        assert ready["message"] == told


def test_rank_refused_before_there_is_a_digest_names_a_pool_that_fits_o14() -> None:
    seen = given_up("rank_too_high", asked=None)
    roomy = pool("roomy", max_rank=256)
    seen = replace(seen, pools={**seen.pools, roomy.ref: roomy})
    ready = next(each for each in status(seen)["conditions"] if each["type"] == "Ready")
    assert ready["reason"] == "RankTooHigh"
    assert "roomy" in ready["message"]


def test_version_that_became_an_older_one_of_the_same_bytes_is_known_by_the_feed_at_once() -> None:
    seen = restarted("h1", 1)
    memory = replace(
        seen.memory,
        registered={("uid-pirate", "h1"): version(number=7, state="ingesting")},
        registered_at={("uid-pirate", "h1"): seen.now},
    )
    seen = replace(seen, memory=memory)
    assert not of(Register, seen)
    assert condition(seen, "Validated") == ("True", "Validated")
    assert status(seen)["version"] == 1


def test_version_that_the_feed_never_shows_is_asked_for_when_the_feed_would_have_told_it() -> None:
    seen = restarted("h0", 1)
    fresh = {("uid-pirate", "h1"): seen.now}
    memory = replace(seen.memory, registered={("uid-pirate", "h1"): version(number=2)}, registered_at=fresh)
    seen = replace(seen, memory=memory)
    assert not of(Register, seen)
    assert plan(seen).due_at == seen.now + FEED_LAG_SECONDS
    assert of(Register, replace(seen, now=seen.now + FEED_LAG_SECONDS))


def test_adapter_of_a_pool_that_is_not_honoured_says_so() -> None:
    seen = world(pool_namespaces=frozenset({"elsewhere"}), registry=registry())
    assert condition(seen, "Ready") == ("False", "PoolNamespaceNotHonoured")
