"""When actions run: at once, or later."""

from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from typing import Any, cast

import pytest

from loraplane_operator.actions import ClaimAdapter, Note, ObjectRef, SetStatus, Warm
from loraplane_operator.cluster.port import Cluster
from loraplane_operator.engines.fleet import Fleet
from loraplane_operator.execute import PASSING_SECONDS, Executor
from loraplane_operator.notebook import Notebook
from loraplane_operator.registry.client import RegistryClient
from loraplane_operator.words import World
from tests.operator.plans import failed, of, told, unclaimed
from tests.operator.worlds import engine, everywhere, residence, with_engines, world

PIRATE = ObjectRef("LoRAAdapter", "default", "pirate")


class Statuses:
    """A cluster that keeps what is written, and an executor on it with a clock of the test's."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.written: list[Mapping[str, Any]] = []
        nobody = cast(Any, None)
        self.executor = Executor(
            cluster=cast(Cluster, self),
            registry=cast(RegistryClient, nobody),
            fleet=cast(Fleet, nobody),
            notebook=Notebook(),
            master=b"",
            wake=lambda: None,
            clock=lambda: self.now,
        )

    async def patch_status(self, ref: ObjectRef, uid: str, status: Mapping[str, Any]) -> None:
        self.written.append(status)

    async def emit(self, note: Note) -> None:
        pass

    async def submit(self, *actions: SetStatus) -> float | None:
        due = self.executor.submit(actions)
        await self.executor.idle()
        return due


@pytest.fixture
async def statuses() -> AsyncIterator[Statuses]:
    made = Statuses()
    yield made
    await made.executor.close()


def status(text: str, *, passing: bool) -> SetStatus:
    return SetStatus(PIRATE, "uid-pirate", {"said": text}, passing=passing)


async def test_what_is_over_in_a_moment_is_never_written(statuses: Statuses) -> None:
    assert await statuses.submit(status("claiming", passing=True)) == statuses.now + PASSING_SECONDS
    statuses.now += PASSING_SECONDS / 2
    assert await statuses.submit(status("loading", passing=True)) == statuses.now + PASSING_SECONDS / 2
    await statuses.submit(status("ready", passing=False))
    assert statuses.written == [{"said": "ready"}]


async def test_what_lasts_is_written_in_its_newest_form_whatever_changed_meanwhile(statuses: Statuses) -> None:
    await statuses.submit(status("claiming", passing=True))
    statuses.now += PASSING_SECONDS - 0.1
    await statuses.submit(status("loading", passing=True))
    assert statuses.written == []
    statuses.now += 0.1
    await statuses.submit(status("loading", passing=True))
    assert statuses.written == [{"said": "loading"}]


async def test_each_spell_is_held_back_anew(statuses: Statuses) -> None:
    await statuses.submit(status("claiming", passing=True))
    await statuses.submit()
    statuses.now += PASSING_SECONDS
    await statuses.submit(status("claiming", passing=True))
    assert statuses.written == []


def write_of(seen: World) -> SetStatus:
    (write,) = [write for write in of(SetStatus, seen) if write.ref.kind == "LoRAAdapter"]
    return cast(SetStatus, write)


def test_work_under_way_and_silence_are_passing() -> None:
    warm = told(world(**everywhere(residence())))
    assert write_of(unclaimed()).passing
    assert write_of(world(**with_engines(engine(0), engine(1)))).passing  # not loaded yet
    assert write_of(replace(warm, engines={})).passing  # no stream of theirs is there yet
    assert write_of(replace(warm, registry=None)).passing


def test_ends_failures_and_a_loss_of_what_was_ready_are_not_passing() -> None:
    cold = world(**with_engines(engine(0), engine(1)))
    warm = told(world(**everywhere(residence())))
    assert not write_of(world(**everywhere(residence()))).passing
    assert not write_of(replace(warm, **with_engines(engine(0), engine(1)))).passing
    assert not write_of(failed(cold, Warm, "load_failed")).passing
    assert not write_of(failed(unclaimed(), ClaimAdapter, "claim_conflict")).passing
