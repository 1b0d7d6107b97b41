"""The operator's arithmetic and the engine's are one: what it admits by `/state` is taken, what it refuses is refused.

The real core, the real capacity that `/state` tells, and the real planner; between them only the wire's types.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from loraplane_core.wire.engine import Capacity, Residence
from loraplane_engine.adapters.image import Manifest, convert
from loraplane_engine.messages import AdapterKey, LoadAdapter
from loraplane_engine.server.state import StateHub
from loraplane_operator.plan.reservations import admit
from loraplane_operator.plan.wishes import Wish, wishes
from loraplane_operator.words import AdapterObject
from tests.engine.harness import PAGE, Driven, drive, make_artifact
from tests.operator.worlds import NOW, POOL, adapter, engine, entry, meta, pool, registry, version, with_engines, world

Images = dict[int, tuple[Path, Manifest]]
RANKS = (1, 3, 4, 9, 16, 21)


@pytest.fixture(scope="module")
def images(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Images:
    folder = tmp_path_factory.mktemp("images")
    driven = drive(folder, base, max_model_len=64)
    driven.core.close()
    found = {}
    for rank in RANKS:
        image = folder / f"r{rank}.image"
        artifact = make_artifact(folder / f"r{rank}", seed=rank, rank=rank)
        found[rank] = (image, convert(artifact, image, driven.core.base.layout))
    return found


class Pool:
    """One replica and the operator's view of it. `refusals` is what the engine said no to in the last pass."""

    def __init__(self, driven: Driven, images: Images, wanted: list[tuple[int, bool]]) -> None:
        self.driven, self.images = driven, images
        self.keys: dict[str, AdapterKey] = {}
        self.objects: list[AdapterObject] = []
        self.entries: list[Any] = []
        self.refusals: list[str] = []
        self.tried: set[str] = set()
        for number, (rank, pinned) in enumerate(dict(wanted).items()):  # each rank once: equal bytes are one image
            name, (_, manifest) = f"a{number}", images[rank]
            self.keys[name] = AdapterKey(f"acme/{name}@1", manifest.digest)
            at = meta("LoRAAdapter", name, created_at=NOW - 100 + number)
            self.objects.append(adapter(name, meta=at, pinned=pinned))
            told = version(name, digest=manifest.digest, bytes=manifest.parameters * 4)  # what the registry knows
            self.entries.append(entry(name, told))
        self.rank_of = {f"a{number}": rank for number, rank in enumerate(dict(wanted))}
        self.hub = StateHub(snapshot=list, slots=None, max_rank=256)

    def capacity(self) -> Capacity:
        self.driven.step()
        assert self.driven.stats is not None
        self.hub.stepped(self.driven.stats)
        return self.hub.capacity()

    def residences(self) -> list[Residence]:
        """As the server tells them: the size is known as soon as there is an image."""
        found = []
        for name in self.tried:
            key, state = self.keys[name], self.driven.states.get(self.keys[name])
            held = state is not None and state.residency != "absent"
            found.append(
                Residence(
                    ref=key.ref,
                    digest=key.digest,
                    residency=state.residency if held and state else "disk",
                    bytes=self.images[self.rank_of[name]][1].data_bytes,
                    pinned=state.pinned if state else False,
                    warm_wanted=state.warm_wanted if state else False,
                )
            )
        return found

    def admitted(self) -> dict[str, Wish]:
        seen = world(
            pools={POOL: pool(replicas=1)},
            adapters=tuple(self.objects),
            registry=registry(*self.entries),
            memory=replace(world().memory, registered={}),
            **with_engines(engine(0, *self.residences(), capacity=self.capacity())),
        )
        return {name: wish for (_, name), wish in admit(seen, wishes(seen)).items()}

    def carry_out(self) -> dict[str, Wish]:
        """One pass: PUT and marks for all that got room."""
        self.refusals, found = [], self.admitted()
        for name, wish in sorted(found.items()):
            target, key = wish.targets[0], self.keys[name]
            if not target.replicas:
                continue
            self.tried.add(name)
            self.driven.failed.pop(key, None)
            state = self.driven.states.get(key)
            if state is None or state.residency == "absent":
                path = str(self.images[self.rank_of[name]][0])
                self.driven.core.handle(LoadAdapter(key=key, image=path, warm_wanted=True))
                self.driven.until(lambda: not self.driven.core.residency.loading)
            if key in self.driven.failed:
                self.refusals.append(self.driven.failed[key].message)
                continue
            self.driven.mark(key, pinned=bool(target.pinned_on))
            if key in self.driven.failed:
                self.refusals.append(self.driven.failed[key].message)
        return found


@settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(
    wanted=st.lists(st.tuples(st.sampled_from(RANKS), st.booleans()), min_size=1, max_size=6),
    host=st.integers(1, 40),
    device=st.integers(24, 60),
)
def test_what_the_operator_admits_the_engine_takes_and_nothing_else_is_reserved(
    base: Path,
    images: Images,
    tmp_path: Path,
    wanted: list[tuple[int, bool]],
    host: int,
    device: int,
) -> None:
    driven = drive(
        tmp_path,
        base,
        max_model_len=64,
        device_memory=(device + 4) * PAGE,
        adapter_memory=device * PAGE,
        host_cache=host * PAGE,
    )
    try:
        seen = Pool(driven, images, wanted)
        for _ in wanted:
            seen.carry_out()  # each pass may teach the operator a size that it had underestimated
        found = seen.carry_out()
        assert seen.refusals == []
        placed = {name for name, wish in found.items() if wish.targets[0].replicas}
        pinned = {name for name, wish in found.items() if wish.targets[0].pinned_on}
        states = {name: driven.states.get(key) for name, key in seen.keys.items()}
        warm = {name for name, state in states.items() if state is not None and state.residency != "absent"}
        assert warm == placed
        assert {name for name in warm if states[name].pinned} == pinned  # type: ignore[union-attr]

        def taken(names: set[str]) -> int:
            return sum(images[seen.rank_of[name]][1].data_bytes for name in names)

        capacity = seen.capacity()
        assert (capacity.host_reserved_bytes, capacity.reserved_bytes) == (taken(placed), taken(pinned))
        assert capacity.host_bytes == host * PAGE and capacity.adapter_bytes == device * PAGE
        assert (
            capacity.kv_tokens == (device + 4) * 16 and capacity.kv_tokens_displaced * PAGE == capacity.used_bytes * 16
        )
        for name in set(seen.keys) - placed:
            short = taken({name}) > capacity.host_bytes - capacity.host_reserved_bytes
            short |= found[name].pinned and taken({name}) > capacity.adapter_bytes - capacity.reserved_bytes
            assert found[name].targets[0].refusal is not None and short, name
    finally:
        driven.core.close()
