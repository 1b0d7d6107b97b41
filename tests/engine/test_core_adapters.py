"""Adapters coming and going in the core: images, drains, marks."""

from pathlib import Path
from typing import Any

import pytest

from loraplane_engine.adapters.image import Layout, convert
from loraplane_engine.messages import AdapterKey, LoadAdapter, Output, Scheduled, UnloadAdapter
from tests.engine.harness import PAGE, TINY, Clock, Driven, failure, make_artifact


def test_a_request_may_come_while_its_adapter_is_still_read(engine: Driven, tmp_path: Path) -> None:
    key = engine.load(make_artifact(tmp_path / "a"), "t/a@1", wait=False)
    engine.generate("early", [1, 2, 3], key)
    engine.finish("early")
    assert isinstance(engine.ended["early"], Output)
    assert next(m for m in engine.said if isinstance(m, Scheduled)).cold
    assert engine.tokens["early"] == engine.complete([1, 2, 3], key)


def test_a_broken_image_fails_the_adapter_and_its_waiting_requests(engine: Driven, tmp_path: Path) -> None:
    image = tmp_path / "image"
    manifest = convert(make_artifact(tmp_path / "a"), image, engine.core.base.layout)
    raw = bytearray(image.read_bytes())
    raw[-PAGE] ^= 1
    image.write_bytes(raw)
    key = AdapterKey("t/a@1", manifest.digest)
    engine.core.handle(LoadAdapter(key=key, image=str(image)))
    engine.generate("waits", [1, 2], key)
    engine.finish("waits")
    assert failure(engine, "waits").code == "artifact_unavailable"
    assert engine.failed[key].code == "image_broken"
    assert engine.states[key].residency == "absent"
    assert engine.core.residency.host_used == 0
    engine.core.handle(LoadAdapter(key=key, image=str(tmp_path / "none")))
    engine.drain()
    assert engine.failed[key].code == "image_broken"


@pytest.mark.parametrize(
    ("layout", "config", "code"),
    [
        (f"v1/bfloat16/{PAGE}", TINY, "image_broken"),
        (f"v1/float32/{2 * PAGE}", TINY, "image_broken"),
        (f"v1/float32/{PAGE}", {**TINY, "num_hidden_layers": 3}, "shape_mismatch"),
        (f"v1/float32/{PAGE}", {**TINY, "intermediate_size": 80}, "shape_mismatch"),
    ],
)
def test_an_image_for_another_base_or_layout_is_refused(
    engine: Driven, tmp_path: Path, layout: str, config: dict[str, Any], code: str
) -> None:
    manifest = convert(make_artifact(tmp_path / "a", base=config), tmp_path / "image", Layout.parse(layout))
    key = AdapterKey("t/a@1", manifest.digest)
    engine.core.handle(LoadAdapter(key=key, image=str(tmp_path / "image")))
    engine.drain()
    assert engine.failed[key].code == code
    assert not engine.core.residency.adapters


def test_an_image_under_another_digest_is_refused(engine: Driven, tmp_path: Path) -> None:
    convert(make_artifact(tmp_path / "a"), tmp_path / "image", engine.core.base.layout)
    key = AdapterKey("t/a@1", "f" * 64)
    engine.core.handle(LoadAdapter(key=key, image=str(tmp_path / "image")))
    engine.drain()
    assert engine.failed[key].code == "image_broken"


def test_equal_bytes_under_two_ids_share_one_copy(engine: Driven, tmp_path: Path) -> None:
    artifact = make_artifact(tmp_path / "a")
    one, two = engine.load(artifact, "acme/a@1"), engine.load(artifact, "globex/b@4")
    assert one.digest == two.digest
    assert engine.complete([1, 2, 3], one) == engine.complete([1, 2, 3], two)
    assert len(engine.core.residency.images) == 1
    assert engine.states[one].residency == engine.states[two].residency == "device"
    engine.core.handle(UnloadAdapter(key=one, drain_s=1))
    engine.drain()
    assert engine.states[one].residency == "absent"
    assert len(engine.complete([1, 2, 3], two)) == 8
    engine.core.handle(UnloadAdapter(key=two, drain_s=1))
    engine.drain()
    assert engine.core.base.arena.pages.free == 128 and engine.core.residency.host_used == 0


def test_unload_refuses_new_requests_drains_and_frees(engine: Driven, tmp_path: Path, clock: Clock) -> None:
    key = engine.load(make_artifact(tmp_path / "a"), "t/a@1")
    engine.generate("old", [1, 2], key)
    engine.step()
    engine.core.handle(UnloadAdapter(key=key, drain_s=5))
    engine.generate("new", [1, 2], key)
    engine.drain()
    assert (failure(engine, "new").status, failure(engine, "new").code) == (410, "adapter_withdrawn")
    assert engine.states[key].residency == "device"
    engine.finish("old")
    assert isinstance(engine.ended["old"], Output) and engine.ended["old"].finish == "length"
    assert engine.states[key].residency == "absent"
    assert engine.core.base.arena.pages.free == 128
    engine.generate("after", [1, 2], key)
    engine.drain()
    assert failure(engine, "after").code == "artifact_unavailable"


def test_unload_aborts_what_runs_past_the_deadline(engine: Driven, tmp_path: Path, clock: Clock) -> None:
    key = engine.load(make_artifact(tmp_path / "a"), "t/a@1")
    engine.generate("slow", [1, 2], key, max_tokens=100)
    engine.step()
    engine.core.handle(UnloadAdapter(key=key, drain_s=5))
    engine.step()
    assert "slow" not in engine.ended
    wait = engine.core.wait_seconds()
    assert wait is not None and wait <= 5
    clock.now += 5
    engine.step()
    ended = engine.ended["slow"]
    assert isinstance(ended, Output) and ended.finish == "abort"
    assert engine.states[key].residency == "absent"
    assert engine.core.base.arena.pages.free == 128


def test_unloading_what_is_not_there_says_absent(engine: Driven) -> None:
    key = AdapterKey("t/none@1", "0" * 64)
    engine.core.handle(UnloadAdapter(key=key, drain_s=1))
    engine.drain()
    assert engine.states[key].residency == "absent"


def test_a_load_during_the_drain_keeps_the_adapter(engine: Driven, tmp_path: Path) -> None:
    artifact = make_artifact(tmp_path / "a")
    key = engine.load(artifact, "t/a@1")
    engine.generate("old", [1, 2], key)
    engine.step()
    engine.core.handle(UnloadAdapter(key=key, drain_s=5))
    engine.load(artifact, "t/a@1")
    engine.finish("old")
    assert engine.states[key].residency == "device"
    assert len(engine.complete([1, 2], key)) == 8


def test_kv_tokens_displaced_follow_the_adapters(engine: Driven, tmp_path: Path) -> None:
    key = engine.load(make_artifact(tmp_path / "a", rank=16), "t/a@1", pinned=True)
    engine.step()
    assert engine.stats is not None
    pages = engine.core.residency.images[key.digest].pages
    assert engine.stats.kv_tokens_displaced == pages * 16
    assert engine.stats.adapter_used_bytes == pages * PAGE == engine.states[key].bytes
    engine.core.handle(UnloadAdapter(key=key, drain_s=0))
    engine.step()
    assert engine.stats.kv_tokens_displaced == 0


def test_marks_are_kept_and_reported(engine: Driven, tmp_path: Path) -> None:
    key = engine.load(make_artifact(tmp_path / "a"), "t/a@1", warm_wanted=True)
    assert engine.states[key].warm_wanted and not engine.states[key].pinned
    assert engine.states[key].residency == "host"
    engine.mark(key, pinned=True)
    assert engine.states[key].pinned and engine.states[key].warm_wanted
    assert engine.states[key].residency == "device"
    engine.mark(key, pinned=False, warm_wanted=False)
    assert not engine.states[key].pinned and not engine.states[key].warm_wanted
