"""What was registered is told by the feed, too, so that a restart asks for nothing twice."""

from dataclasses import replace

from loraplane_core.wire.registry import Version
from loraplane_operator.actions import Register
from loraplane_operator.words import World
from tests.operator.plans import condition, of
from tests.operator.worlds import entry, registry, version, world


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
