import json
import stat
from pathlib import Path

import pytest

from loraplane_core.files import write_atomic, write_ports


def test_replaces_whole_with_the_mode_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    write_atomic(path, "old")
    write_atomic(path, b"new", 0o644)
    assert path.read_text() == "new"
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    assert [each.name for each in tmp_path.iterdir()] == ["secret"]


def test_leaves_no_part_behind_when_it_cannot_replace(tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    with pytest.raises(OSError, match="taken"):
        write_atomic(tmp_path / "taken", "text")
    assert [each.name for each in tmp_path.iterdir()] == ["taken"]


def test_ports_are_readable_by_who_started_it(tmp_path: Path) -> None:
    write_ports(tmp_path / "ports.json", {"data": 1})
    assert json.loads((tmp_path / "ports.json").read_text()) == {"data": 1}
    assert stat.S_IMODE((tmp_path / "ports.json").stat().st_mode) == 0o644
