"""The disk tier of a managed engine."""

import asyncio
import shutil
from pathlib import Path

import pytest

from loraplane_core.errors import Unavailable
from loraplane_engine import messages as m
from loraplane_engine.server import images
from loraplane_engine.server.images import ImageStore
from tests.engine.server.artifacts import Source
from tests.engine.server.fake_core import LAYOUT
from tests.engine.server.managed import Known, ask, offer, put
from tests.engine.server.world import World, managed, running

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_a_restart_finds_its_images_again(model: Path, tmp_path: Path, source: Source, known: Known) -> None:
    settings = managed(model, tmp_path, source.url)
    async with running(settings, tmp_path) as world:
        await put(world, known)
    image = next((tmp_path / "cache" / "images").rglob("*.image"))
    async with running(settings, tmp_path) as world:
        assert (await ask(world, known)).status_code == 200
        assert source.served["adapter_model.safetensors"] == 1
    image.write_bytes(image.read_bytes()[:-1])
    async with running(settings, tmp_path) as world:
        assert (await ask(world, known)).status_code == 200
        assert source.served["adapter_model.safetensors"] == 2


async def test_an_image_whose_data_are_damaged_is_made_again(
    model: Path, tmp_path: Path, source: Source, known: Known
) -> None:
    settings = managed(model, tmp_path, source.url)
    async with running(settings, tmp_path) as world:
        await put(world, known)
    image = next((tmp_path / "cache" / "images").rglob("*.image"))
    whole = image.read_bytes()
    image.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))  # only who reads the data can see it
    async with running(settings, tmp_path) as world:
        load = world.core.load_answer

        def reading(message: m.LoadAdapter) -> m.AdapterState | m.AdapterFailed | None:
            if Path(message.image).read_bytes() != whole:
                return m.AdapterFailed(key=message.key, code="image_broken", message="checksum")
            return load(message)

        world.core.load_answer = reading
        assert (await ask(world, known)).status_code == 200
    assert image.read_bytes() == whole
    assert source.served["adapter_model.safetensors"] == 2


async def test_a_cache_folder_emptied_or_littered_is_no_obstacle(
    model: Path, tmp_path: Path, source: Source, known: Known
) -> None:
    settings = managed(model, tmp_path, source.url)
    async with running(settings, tmp_path) as world:
        await put(world, known)
        folder = next((tmp_path / "cache" / "images").iterdir())
        shutil.rmtree(tmp_path / "cache")
        assert (await put(world, offer(source, tmp_path))).status_code == 200
    (folder / "odd").mkdir()
    (folder / "nowhere.image").symlink_to(tmp_path / "nothing")
    async with running(settings, tmp_path):
        assert [path.name for path in folder.iterdir() if path.suffix != ".image" or path.is_symlink()] == []


async def test_a_cache_folder_has_one_engine_and_the_next_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def store() -> ImageStore:
        return ImageStore(tmp_path, LAYOUT, limit=1 << 20, fetcher=None, in_use=lambda _: False)

    first, second, third = store(), store(), store()
    await first.open()
    waiting = asyncio.create_task(second.open())
    await asyncio.sleep(0)
    with monkeypatch.context() as patch:
        patch.setattr(images, "OWNER_SECONDS", 0.0)
        with pytest.raises(Unavailable, match="in use by another engine"):
            await third.open()
    await third.close()
    assert (tmp_path / "staging").is_dir()  # the owner's
    await first.close()
    async with asyncio.timeout(5):
        await waiting
    await second.close()


async def test_a_cache_folder_that_cannot_be_written_is_refused_with_its_reason(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    store = ImageStore(tmp_path / "file", LAYOUT, limit=1 << 20, fetcher=None, in_use=lambda _: False)
    with pytest.raises(Unavailable, match="cannot be used"):
        await store.open()


async def test_the_disk_tier_is_bounded_and_forgets_the_least_recently_used(
    model: Path, tmp_path: Path, source: Source
) -> None:
    first, second = offer(source, tmp_path), offer(source, tmp_path)
    settings = managed(model, tmp_path, source.url, "--disk-cache", "100Ki")  # one image has 64 KiB and a head
    async with running(settings, tmp_path) as world:
        await put(world, first)
        await put(world, second)
        kept = [file.name for file in (tmp_path / "cache" / "images").rglob("*.image")]
    assert kept == [f"{second.digest}.image"]


async def test_staging_is_empty_after_a_failure(pool: World, source: Source, known: Known) -> None:
    source.corrupt = True
    await ask(pool, known)
    assert pool.settings.cache_dir is not None
    assert list((pool.settings.cache_dir / "staging").iterdir()) == []
