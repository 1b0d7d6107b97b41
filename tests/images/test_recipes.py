"""The key of an image covers what decides about it, and nothing else."""

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from tests.cluster.images.recipes import IMAGES, ROOT, Image, copied, stage


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """What the gateway's and the operator's images are made of."""
    root = tmp_path / "checkout"
    for name in ("gateway", "operator"):
        for source in copied(IMAGES[name]):
            target = root / source
            target.parent.mkdir(parents=True, exist_ok=True)
            if target.exists():
                continue
            if (ROOT / source).is_dir():
                shutil.copytree(ROOT / source, target, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(ROOT / source, target)
    return root


def key(image: Image, checkout: Path, tmp_path: Path) -> str:
    context = tmp_path / f"context-{os.urandom(4).hex()}"
    return stage(image, context, checkout)


@pytest.mark.parametrize(
    ("path", "changes"),
    [
        ("gateway/loraplane_gateway/keys.py", True),
        ("core/loraplane_core/identity.py", True),
        ("migrations/env.py", True),
        ("requirements/gateway.txt", True),
        ("operator/loraplane_operator/lanes.py", False),
        ("requirements/operator.txt", False),
        ("gateway/loraplane_gateway/__pycache__/keys.pyc", False),
        ("gateway/loraplane_gateway/new.py", True),
        ("README.md", False),
    ],
)
def test_an_image_is_made_again_when_what_goes_into_it_changes(
    checkout: Path, tmp_path: Path, path: str, changes: bool
) -> None:
    before = key(IMAGES["gateway"], checkout, tmp_path)
    file = checkout / path
    file.parent.mkdir(exist_ok=True, parents=True)
    with file.open("a") as changed:
        changed.write("# changed\n")
    assert (key(IMAGES["gateway"], checkout, tmp_path) != before) == changes


def test_time_stamps_do_not_matter_and_the_executable_bit_does(checkout: Path, tmp_path: Path) -> None:
    before = key(IMAGES["gateway"], checkout, tmp_path)
    file = checkout / "gateway" / "loraplane_gateway" / "keys.py"
    os.utime(file, (1, 1))
    assert key(IMAGES["gateway"], checkout, tmp_path) == before
    file.chmod(0o755)
    assert key(IMAGES["gateway"], checkout, tmp_path) != before


def test_another_base_target_or_dockerfile_is_another_image(checkout: Path, tmp_path: Path) -> None:
    image = IMAGES["gateway"]
    variants = [
        image,
        replace(image, base=replace(image.base, suite="trixie")),
        replace(image, base=replace(image.base, packages=("python3",))),
        replace(image, target="dependencies"),
    ]
    assert len({key(each, checkout, tmp_path) for each in variants}) == len(variants)


def test_the_context_holds_exactly_what_the_dockerfile_copies(checkout: Path, tmp_path: Path) -> None:
    context = tmp_path / "context"
    stage(IMAGES["gateway"], context, checkout)
    assert (context / "migrations" / "env.py").read_bytes() == (ROOT / "migrations" / "env.py").read_bytes()
    assert {path.name for path in context.iterdir()} == {"core", "gateway", "migrations", "requirements"}
    assert [path.name for path in (context / "requirements").iterdir()] == ["gateway.txt"]
    assert not list(context.rglob("__pycache__"))


def test_a_source_that_is_missing_is_named(checkout: Path, tmp_path: Path) -> None:
    shutil.rmtree(checkout / "migrations")
    with pytest.raises(FileNotFoundError, match=r"migrations does not exist, and a Dockerfile copies it"):
        key(IMAGES["gateway"], checkout, tmp_path)
