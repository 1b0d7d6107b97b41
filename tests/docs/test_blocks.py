"""Every command in our documents is run by a test, or says why it is not."""

from pathlib import Path

import pytest

from tests.docs.blocks import PLACES, YAML_MARKERS, Block, Malformed, documents, read

DOCUMENTS = documents()
every_document = pytest.mark.parametrize("file", DOCUMENTS, ids=lambda file: file.name)


@every_document
def test_every_block_says_what_it_is(file: Path) -> None:
    assert [str(block) for block in read(file) if not block.language] == []


@every_document
def test_every_command_block_is_run_or_says_why_not(file: Path) -> None:
    for block in read(file):
        if block.is_shell:
            assert block.place in PLACES or len(block.why_not.split()) >= 3, f"{block}: {block.marker or 'no marker'}"


@every_document
def test_every_yaml_block_is_tried_or_says_why_not(file: Path) -> None:
    for block in read(file):
        if block.language == "yaml":
            assert block.marker in YAML_MARKERS or len(block.why_not.split()) >= 3, str(block)


@every_document
def test_an_output_follows_a_block_that_is_run(file: Path) -> None:
    found = read(file)
    for before, block in zip([None, *found], found, strict=False):
        if block.marker == "output":
            assert before is not None and before.place, str(block)
            assert not block.is_shell, str(block)


@every_document
def test_a_place_is_run_by_a_test(file: Path) -> None:
    """tests/docs/test_readme.py and tests/cluster/node/test_docs.py run these, and nothing else is promised."""
    allowed = {"README.md": {"local", "system"}, "install.md": {"cluster"}}
    assert {block.place for block in read(file)} - {""} <= allowed.get(file.name, set())


# -- the reader itself


def written(folder: Path, text: str) -> Path:
    file = folder / "page.md"
    file.write_text(text)
    return file


def test_a_block_is_read_with_its_marker(tmp_path: Path) -> None:
    text = "Text\n\n<!-- run: cluster -->\n```sh\nls\n\npwd\n```\n<!-- output -->\n```text\na\n```\n"
    file = written(tmp_path, text + "```python\nx = 1\n```\n")
    assert read(file) == [
        Block(file, 4, "sh", "ls\n\npwd\n", "run: cluster"),
        Block(file, 10, "text", "a\n", "output"),
        Block(file, 13, "python", "x = 1\n"),
    ]


@pytest.mark.parametrize(
    ("marker", "place", "until", "why_not"),
    [
        ("run: local", "local", "", ""),
        ('run: cluster until "Forwarding from"', "cluster", "Forwarding from", ""),
        ("not run: needs a GPU", "", "", "needs a GPU"),
        ("output", "", "", ""),
    ],
)
def test_a_marker_is_understood(tmp_path: Path, marker: str, place: str, until: str, why_not: str) -> None:
    (block,) = read(written(tmp_path, f"<!-- {marker} -->\n```sh\nls\n```\n"))
    assert (block.place, block.until, block.why_not) == (place, until, why_not)


def test_a_yaml_block_may_have_a_name(tmp_path: Path) -> None:
    (block,) = read(written(tmp_path, "<!-- values my-values.yaml -->\n```yaml\na: 1\n```\n"))
    assert (block.marker, block.name) == ("values", "my-values.yaml")


def test_a_block_in_a_list_loses_its_indent(tmp_path: Path) -> None:
    (block,) = read(written(tmp_path, "1. One:\n\n   <!-- run: local -->\n   ```sh\n   ls\n     -l\n   ```\n"))
    assert (block.text, block.place) == ("ls\n  -l\n", "local")


@pytest.mark.parametrize(
    "text",
    [
        "```sh\nls\n",
        "<!-- run: local -->\n\n```sh\nls\n```\n",
        "<!-- run: local -->\nText\n",
        "<!-- run: local -->",
        "Text\n\n    ls\n",
        "- item\n\nText\n\n    ls\n",
    ],
)
def test_what_would_be_misread_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(Malformed):
        read(written(tmp_path, text))


@pytest.mark.parametrize("text", ["- item\n\n    more of it\n", "Text\n    folded\n", "```text\nx\n\n    y\n```\n"])
def test_what_only_looks_like_it_is_not(tmp_path: Path, text: str) -> None:
    read(written(tmp_path, text))
