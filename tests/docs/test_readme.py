"""README's blocks, typed in order into a copy of the checkout: a whole system comes up, answers, and goes."""

import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.docs.blocks import ROOT, Block, read
from tests.docs.shell import checkout, run

README = read(ROOT / "README.md")
SYSTEM_SECONDS = 150.0  # a tenth of it on two idle cores
ENGINE_SECONDS = 90.0
#: What those processes may learn from the tests' environment; nothing of another installation.
ENV = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}


def of(place: str) -> list[Block]:
    return [block for block in README if block.place == place]


def _one_engine(pool: dict[str, Any]) -> dict[str, Any]:
    pool["spec"]["replicas"] = 1
    return pool


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@pytest.fixture
def copy(tmp_path: Path) -> Iterator[Path]:
    """Taken down whatever happens; what `make down` leaves is the database's folder, which is not below this one."""
    folder = checkout(tmp_path / "loraplane", _one_engine)
    yield folder
    clean = Block(Path(__file__), 0, "sh", ".venv/bin/loraplane down --purge\n")
    run([clean], folder, tmp_path / "clean", ENV, 60, {})


@pytest.mark.timeout(200)
def test_a_system_comes_up_answers_and_goes(copy: Path, tmp_path: Path) -> None:
    begin, operate = of("system")
    printed = run([begin, operate], copy, tmp_path / "out", ENV, SYSTEM_SECONDS, {})
    assert '"content":"' in printed[begin]
    told = printed[operate]
    for words in ("acme/pirate@2 validated, active", "acme/pirate@1 serves", "tenant umbrella", "stopped"):
        assert words in told, told


@pytest.mark.timeout(120)
def test_the_engine_alone_becomes_ready(copy: Path, tmp_path: Path) -> None:
    (block,) = of("local")
    port = free_port()
    asks = Block(Path(__file__), 0, "sh", f"curl -sSf http://127.0.0.1:{port}/v1/models\n")
    changes = {"--port 8000": f"--port {port}"}
    printed = run([block, asks], copy, tmp_path / "out", ENV, ENGINE_SECONDS, changes)
    assert '"id":"pirate"' in printed[asks]
