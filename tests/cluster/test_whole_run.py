"""The audit at the end of a run: that it is there, and when it may judge that every right is used."""

import json
from pathlib import Path

import pytest

from tests.cluster.audit import WholeRun, events, missing_from


def test_every_run_ends_with_the_audit_o25(request: pytest.FixtureRequest) -> None:
    last = request.session.items[-1]
    assert isinstance(last, WholeRun)
    assert any(rule["resources"] == ["secrets"] for rule in last.rules)


@pytest.mark.parametrize(
    ("chosen", "deselected", "arguments", "left"),
    [
        (["test_a.py", "test_b.py"], [], ["tests"], ""),
        (["test_a.py", "below/test_b.py"], [], ["tests"], "test_b.py"),
        (["test_a.py", "test_b.py"], ["test_b.py::test_x"], ["tests"], "test_b.py::test_x"),
        (["test_a.py", "test_b.py"], [], ["test_a.py", "test_b.py::test_x"], "all but test_b.py::test_x"),
    ],
)
def test_a_run_knows_what_it_leaves_out(
    tmp_path: Path, chosen: list[str], deselected: list[str], arguments: list[str], left: str
) -> None:
    for name in ("test_a.py", "test_b.py", "helper.py"):
        (tmp_path / name).touch()
    assert missing_from(tmp_path, [tmp_path / name for name in chosen], deselected, arguments) == left


def test_what_the_api_server_put_aside_is_read_first(tmp_path: Path) -> None:
    for number, name in enumerate(["audit-2026-11-30T06-00-00.000.log", "audit.log"]):
        event = {"user": {"username": "system:serviceaccount:ns:me"}, "stage": "ResponseComplete", "number": number}
        (tmp_path / name).write_text(json.dumps(event) + "\n{")
    assert [event["number"] for event in events(tmp_path / "audit.log", "me")] == [0, 1]
    assert list(events(tmp_path / "none.log", "me")) == []
