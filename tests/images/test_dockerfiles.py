"""What every Dockerfile promises, read from its text: builders differ, the text is what ships."""

import re
from pathlib import Path

import pytest

from tests.cluster.images.recipes import DEBIAN, IMAGES, ROOT, Image, copied

OURS = {"operator", "gateway", "engine"}
FOLDERS = {image.folder: image for image in IMAGES.values()}


def lines(image: Image) -> list[str]:
    """One instruction a line."""
    text = image.dockerfile.read_text().replace("\\\n", " ")
    return [line for line in text.splitlines() if line and not line.startswith("#")]


def of(image: Image, instruction: str) -> list[str]:
    return [line.partition(" ")[2] for line in lines(image) if line.startswith(f"{instruction} ")]


def settings(image: Image, instruction: str) -> list[str]:
    """Those of the stage that the image is, and of the stages that it starts from."""
    stages: dict[str, list[str]] = {}
    name = ""
    for line in lines(image):
        word, _, rest = line.partition(" ")
        if word == "FROM":
            source, _, name = rest.partition(" AS ")
            stages[name] = list(stages.get(source, []))
        elif word == instruction:
            stages[name].append(rest)
    return stages[image.target or name]


def test_every_folder_with_a_dockerfile_is_built() -> None:
    assert {path.parent.name for path in (ROOT / "images").glob("*/Dockerfile")} == FOLDERS.keys()


@pytest.mark.parametrize("image", FOLDERS.values(), ids=FOLDERS)
def test_stages_start_from_the_given_base_or_from_each_other(image: Image) -> None:
    base, *others = of(image, "ARG")
    assert base.startswith("BASE=")
    assert others == []
    stages: set[str] = set()
    for stage in of(image, "FROM"):
        source, _, name = stage.partition(" AS ")
        assert source == "${BASE}" or source in stages
        stages.add(name)
    assert len(of(image, "FROM")) > 1


@pytest.mark.parametrize("image", IMAGES.values(), ids=IMAGES)
def test_the_user_is_a_number_that_is_not_root(image: Image) -> None:
    """`runAsNonRoot` refuses a name, which might be root."""
    assert settings(image, "USER") == ["65532:65532"]


@pytest.mark.parametrize("image", IMAGES.values(), ids=IMAGES)
def test_no_program_runs_as_somebody_else(image: Image) -> None:
    """The base brings su, mount and the like; the chart's pods forbid it, too, but an image may run elsewhere."""
    assert any("-perm /6000 -exec chmod a-s" in run for run in settings(image, "RUN"))


@pytest.mark.parametrize("name", sorted(OURS))
def test_one_of_ours_holds_its_own_packages_hash_checked_and_its_own_component(name: str) -> None:
    image = FOLDERS[name]
    installs = [line for line in of(image, "RUN") if "pip install" in line]
    assert len(installs) == 1
    assert "--require-hashes" in installs[0]
    expected = {f"requirements/{name}.txt", "core/loraplane_core", f"{name}/loraplane_{name}"}
    if name == "gateway":
        expected.add("migrations")
    assert {str(path) for path in copied(image)} == expected


@pytest.mark.parametrize("image", FOLDERS.values(), ids=FOLDERS)
def test_what_is_copied_exists_and_nothing_is_added_from_elsewhere(image: Image) -> None:
    assert all((ROOT / path).exists() for path in copied(image))
    text = image.dockerfile.read_text()
    assert not re.search(r"https?://|^ADD ", text, re.MULTILINE)


@pytest.mark.parametrize("image", IMAGES.values(), ids=IMAGES)
def test_the_entry_point_is_a_command_without_a_shell_before_it(image: Image) -> None:
    """A shell would keep signals from the server."""
    (entry,) = settings(image, "ENTRYPOINT")
    command = "start" if image.base is DEBIAN else f"loraplane-{image.folder}"
    assert entry == f'["{command}"]'


@pytest.mark.parametrize("script", sorted((ROOT / "images").glob("*/start")), ids=lambda path: path.parent.name)
def test_a_start_script_becomes_the_server(script: Path) -> None:
    body = [line for line in script.read_text().splitlines() if line and not line.startswith("#")]
    assert sum(line.startswith("exec ") for line in body) == 1
    assert "set -eu" in body[0]
