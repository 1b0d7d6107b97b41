"""Blocks run as they are read: one shell, in order, and the first failure is told."""

from pathlib import Path

import pytest

from tests.docs.blocks import Block, read
from tests.docs.shell import Failed, run


def blocks(folder: Path, *texts: str) -> list[Block]:
    file = folder / "page.md"
    file.write_text("\n".join(f"<!-- {marker} -->\n```sh\n{text}\n```" for marker, text in map(_split, texts)))
    return read(file)


def _split(text: str) -> tuple[str, str]:
    head, _, rest = text.partition(" => ")
    return (head, rest) if rest else ("run: local", text)


def printed(folder: Path, *texts: str, seconds: float = 20) -> list[str]:
    return list(run(blocks(folder, *texts), folder, folder / "out", {}, seconds, {"%PORT%": "1"}).values())


def test_variables_and_functions_live_on(tmp_path: Path) -> None:
    assert printed(tmp_path, "a=1\nexport b=%PORT%", "echo $a$b\npwd >&2") == ["", f"11\n{tmp_path}\n"]


def test_the_first_failure_ends_it(tmp_path: Path) -> None:
    with pytest.raises(Failed, match=r"page\.md:6 ended with 3:\necho no; \(exit 3\)\n---\nno"):
        printed(tmp_path, "true", "echo no; (exit 3)", "touch never")
    assert not (tmp_path / "never").exists()


def test_a_failure_inside_a_pipe_counts(tmp_path: Path) -> None:
    with pytest.raises(Failed):
        printed(tmp_path, "false | cat\ntrue")


def test_what_stays_is_waited_for_and_ended(tmp_path: Path) -> None:
    stays = "trap 'touch ended; exit' TERM\nsleep 0.3\necho ready\nwhile true; do sleep 0.05; done"
    found = printed(tmp_path, f'run: local until "ready" => {stays}', "echo after")
    assert found[1] == "after\n"
    assert (tmp_path / "ended").exists()


def test_what_stays_and_does_not_stay_is_a_failure(tmp_path: Path) -> None:
    with pytest.raises(Failed, match="refused"):
        printed(tmp_path, 'run: local until "ready" => echo refused >&2', "echo after")


def test_there_is_a_deadline(tmp_path: Path) -> None:
    with pytest.raises(Failed, match=r"took longer than 0\.3 s"):
        printed(tmp_path, "sleep 30", seconds=0.3)
