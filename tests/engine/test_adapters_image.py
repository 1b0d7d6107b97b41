"""Artifact -> engine image: what lies where, and what is refused."""

import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from loraplane_core.artifact.digest import artifact_digest
from loraplane_core.artifact.layout import MODULES, Site
from loraplane_core.errors import ArtifactRejected, Unavailable
from loraplane_engine.adapters.image import ALIGN_TENSOR, Layout, Manifest, _cast, convert, read_data, read_manifest
from loraplane_engine.adapters.sites import site_index
from tests.engine.harness import TINY, make_artifact

PAGE = 8192


def data_of(path: Path) -> tuple[Manifest, np.ndarray]:
    manifest, start = read_manifest(path)
    data = np.empty(manifest.data_bytes, dtype=np.uint8)
    read_data(path, manifest, start, data.data)
    return manifest, data


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_every_matrix_is_found_where_the_manifest_says(tmp_path: Path, dtype: str) -> None:
    folder = make_artifact(tmp_path / "a", rank=8, rank_pattern={"k_proj": 3, "layers.1.mlp.up_proj": 17})
    manifest = convert(folder, tmp_path / "image", Layout.parse(f"v1/{dtype}/{PAGE}"))
    read, data = data_of(tmp_path / "image")
    assert read == manifest
    assert manifest.digest == artifact_digest(folder)
    assert (manifest.rank, len(manifest.sites)) == (17, 14)
    tensors = load_file(folder / "adapter_model.safetensors")
    torch_dtype = getattr(torch, dtype)
    flat = torch.from_numpy(data).view(torch_dtype)
    item = torch_dtype.itemsize
    for entry in manifest.sites:
        layer, module = divmod(entry.site, len(MODULES))
        name = f"base_model.model.{Site(layer, MODULES[module]).path}"
        a, b = tensors[f"{name}.lora_A.weight"].to(torch_dtype), tensors[f"{name}.lora_B.weight"].to(torch_dtype)
        assert entry.rank == a.shape[0]
        assert entry.scale == pytest.approx(16 / entry.rank)
        found_a = flat[entry.a // item : entry.a // item + a.numel()].view(a.shape)
        found_b = flat[entry.b // item : entry.b // item + b.numel()].view(b.T.shape)
        assert torch.equal(found_a, a)
        assert torch.equal(found_b, b.T)


def test_matrices_that_share_an_input_lie_next_to_each_other(tmp_path: Path) -> None:
    folder = make_artifact(tmp_path / "a", rank=4, modules=("q_proj", "v_proj"))
    manifest = convert(folder, tmp_path / "image", Layout.parse(f"v1/float32/{PAGE}"))
    entries = {entry.site: entry for entry in manifest.sites}
    q, v = entries[site_index(Site(0, "q_proj"))], entries[site_index(Site(0, "v_proj"))]
    assert v.a == q.a + q.rank * q.in_features * 4


@settings(deadline=None, derandomize=True, database=None, max_examples=15)
@given(rank=st.integers(1, 80), page=st.sampled_from([2048, 4096, 8192, 65536]))
def test_no_tensor_crosses_a_page_unless_its_run_is_declared(
    tmp_path_factory: pytest.TempPathFactory, rank: int, page: int
) -> None:
    folder = tmp_path_factory.mktemp("image")
    manifest = convert(make_artifact(folder / "a", rank=rank), folder / "image", Layout.parse(f"v1/float32/{page}"))
    runs = dict(manifest.runs)
    in_run = {first + i: first for first, count in runs.items() for i in range(count)}
    units: list[tuple[int, int]] = [(e.b, e.rank * e.out_features * 4) for e in manifest.sites]
    units += [(e.a, e.rank * e.in_features * 4) for e in manifest.sites]
    for offset, size in units:
        first, last = offset // page, (offset + size - 1) // page
        assert last < manifest.pages
        if first != last:
            assert in_run.get(first) is not None and in_run.get(first) == in_run.get(last)
    assert all(entry.b % ALIGN_TENSOR == 0 for entry in manifest.sites)
    spans = sorted(units)
    assert all(start + size <= following for (start, size), (following, _) in itertools.pairwise(spans))


def test_bfloat16_is_rounded_as_torch_rounds() -> None:
    values = torch.randn(4096, generator=torch.Generator().manual_seed(1)) * 10
    expected = values.to(torch.bfloat16).view(torch.uint16).numpy()
    assert np.array_equal(_cast(values.numpy(), "bfloat16", "x"), expected)


def test_nan_is_refused(tmp_path: Path) -> None:
    folder = make_artifact(tmp_path / "a")
    tensors = load_file(folder / "adapter_model.safetensors")
    next(iter(tensors.values()))[0, 0] = float("nan")
    save_file(tensors, folder / "adapter_model.safetensors")
    with pytest.raises(ArtifactRejected) as refused:
        convert(folder, tmp_path / "image", Layout.parse(f"v1/float32/{PAGE}"))
    assert refused.value.code == "not_finite"
    assert not (tmp_path / "image").exists()


def test_another_digest_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    folder = make_artifact(tmp_path / "a")
    with pytest.raises(ArtifactRejected) as refused:
        convert(folder, tmp_path / "image", Layout.parse(f"v1/float32/{PAGE}"), "0" * 64)
    assert refused.value.code == "digest_mismatch"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize("damage", ["flip", "scale", "truncate", "magic", "length", "empty"])
def test_a_damaged_image_is_refused(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "image"
    convert(make_artifact(tmp_path / "a"), path, Layout.parse(f"v1/float32/{PAGE}"))
    raw = bytearray(path.read_bytes())
    if damage == "flip":
        _, start = read_manifest(path)
        raw[start + 5] ^= 1  # in the data, not in the manifest's padding
    elif damage == "scale":  # one digit of a number that decides the answer; still a whole manifest
        scale = f"{read_manifest(path)[0].sites[0].scale:.1f}".encode()
        raw[raw.index(b"," + scale + b",") + 1] ^= 1
    elif damage == "truncate":
        raw = raw[:-1]
    elif damage == "magic":
        raw[0] ^= 1
    elif damage == "length":
        raw[8:16] = (1 << 40).to_bytes(8, "little")
    else:
        raw = bytearray()
    path.write_bytes(raw)
    with pytest.raises(Unavailable) as refused:
        data_of(path)
    assert refused.value.code == "image_broken"


@pytest.mark.parametrize(
    "text", ["", "v2/float32/4096", "v1/int8/4096", "v1/float32/0", "v1/float32/100", "v1/float32"]
)
def test_a_layout_of_another_version_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"image layout|multiple"):
        Layout.parse(text)


def run_converter(*arguments: str) -> tuple[int, Any]:
    code = (
        "import sys; from loraplane_engine.adapters.convert import main; status = main(sys.argv[1:]);"
        "assert 'torch' not in sys.modules; sys.exit(status)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=60, check=False
    )
    assert "AssertionError" not in done.stderr, done.stderr
    return done.returncode, json.loads(done.stdout)


def test_the_converter_process_needs_no_torch(tmp_path: Path) -> None:
    folder = make_artifact(tmp_path / "a", base=TINY, dtype=torch.bfloat16)
    common = ["--artifact", str(folder), "--out", str(tmp_path / "image"), "--layout", f"v1/float32/{PAGE}"]
    status, said = run_converter(*common, "--digest", artifact_digest(folder))
    assert status == 0
    assert said["digest"] == artifact_digest(folder) and said["rank"] == 4
    status, said = run_converter(*common, "--digest", "1" * 64)
    assert status == 1
    assert said["error"]["code"] == "digest_mismatch"
