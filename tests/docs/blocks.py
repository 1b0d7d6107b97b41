"""Reads the fenced blocks of our Markdown, and the marker before each: an HTML comment that says who runs it.

    run: PLACE              local: needs a checkout only; system: beside what the document started before;
                            cluster: on a Kubernetes cluster with our images
    run: PLACE until TEXT   the same for a command that stays: the next block waits for TEXT in what it prints
    not run: WHY
    output                  what the block before it prints
    values, object, file    a YAML block: values of the chart, an object of the API server, a file's content

A document's blocks of one place are run in order, in one shell.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
SHELLS = frozenset({"sh", "bash", "shell", "console", "zsh"})
PLACES = frozenset({"local", "system", "cluster"})
YAML_MARKERS = frozenset({"values", "object", "file"})
_FENCE = re.compile(r"^( *)(`{3,}|~{3,}) *([^`\s]*) *$")
_MARKER = re.compile(r"^ *<!-- (?:(run: .+|not run: .+|output)|(values|object|file)( [\w./-]+)?) -->$")
_RUN = re.compile(r'^run: (\w+)(?: until "(.+)")?$')
_ITEM = re.compile(r"^ *([-*+]|\d+[.)]) ")


class Malformed(Exception):
    """Text that the reader, or a person, would misread."""


@dataclass(frozen=True)
class Block:
    file: Path
    line: int  # of the fence
    language: str
    text: str
    marker: str = ""  # without the comment's signs
    name: str = ""  # of a file: what `values`, `object` and `file` are called

    @property
    def is_shell(self) -> bool:
        return self.language in SHELLS

    @property
    def place(self) -> str:
        """Where it is run; "" when it is not."""
        found = _RUN.match(self.marker)
        return found[1] if found else ""

    @property
    def until(self) -> str:
        """What a command that stays prints once it is there; "" for one that ends."""
        found = _RUN.match(self.marker)
        return (found[2] or "") if found else ""

    @property
    def why_not(self) -> str:
        return self.marker.removeprefix("not run: ") if self.marker.startswith("not run: ") else ""

    def __str__(self) -> str:
        name = self.file.relative_to(ROOT) if self.file.is_relative_to(ROOT) else self.file.name
        return f"{name}:{self.line}"


def documents() -> list[Path]:
    """Everything that a person may type from."""
    top = [ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md")]
    return [*top, *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "images").glob("*.md"))]


def read(file: Path) -> list[Block]:
    """In order. Raises Malformed for a fence without an end, a marker without a block, and an indented block."""
    return list(_blocks(file, file.read_text().splitlines()))


def _blocks(file: Path, lines: list[str]) -> Iterator[Block]:
    marker: re.Match[str] | None = None
    number = 0
    while number < len(lines):
        line = lines[number]
        fence = _FENCE.match(line)
        if fence is not None:
            end = _end(file, lines, number, fence[2])
            indent = len(fence[1])
            text = "".join(f"{each[indent:]}\n" for each in lines[number + 1 : end])
            said, name = (marker[1] or marker[2], (marker[3] or "").strip()) if marker else ("", "")
            yield Block(file, number + 1, fence[3], text, said, name)
            marker, number = None, end + 1
            continue
        found = _MARKER.match(line)
        if marker is not None:
            raise Malformed(f"{file.name}:{number}: a marker stands right before its block")
        if found is None and line.startswith("    ") and _begins_code(lines, number):
            raise Malformed(f"{file.name}:{number + 1}: an indented block; fence it, so that it can be marked")
        marker, number = found, number + 1
    if marker is not None:
        raise Malformed(f"{file.name}: a marker without a block")


def _end(file: Path, lines: list[str], start: int, fence: str) -> int:
    for number in range(start + 1, len(lines)):
        if lines[number].strip() == fence:
            return number
    raise Malformed(f"{file.name}:{start + 1}: the fence has no end")


def _begins_code(lines: list[str], number: int) -> bool:
    """Four spaces after an empty line, outside of a list."""
    if number == 0 or lines[number - 1].strip():
        return False
    for line in reversed(lines[:number]):
        if _ITEM.match(line):
            return False
        if line and not line.startswith(" "):
            return True
    return True
