"""The build's bookkeeping, with a stand-in for the `go` command; the real one is what the other tests run on."""

import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cluster.tool import ClusterError
from tests.cluster.tool import build as building

# Writes half of the output first, as a killed build leaves it. BROKEN: the package whose build fails.
GO = """#!/bin/sh
if [ "$1" = env ]; then echo "go$VERSION"; exit; fi
for package; do :; done
while [ "$1" != -o ]; do shift; done
printf half >"$2"
[ "$package" != "$BROKEN" ] || exit 1
printf whole >"$2"
echo "$package" >>"$CALLS"
"""
ALL = [binary.package for binary in building.API_LEVEL]


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """What was built, in order."""
    go, log = tmp_path / "bin" / "go", tmp_path / "calls"
    go.parent.mkdir()
    go.write_text(GO)
    go.chmod(0o755)
    shutil.copytree(building.MODULES, tmp_path / "modules")
    monkeypatch.setattr(building, "MODULES", tmp_path / "modules")
    for name, value in {"VERSION": "1", "BROKEN": "", "CALLS": str(log), "XDG_CACHE_HOME": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PATH", f"{go.parent}:{os.environ['PATH']}")
    return lambda: log.read_text().split() if log.exists() else []


def test_everything_is_built_once(calls: Callable[[], list[str]], capsys: pytest.CaptureFixture[str]) -> None:
    found = building.build("api")
    assert {path.read_text() for path in found.values()} == {"whole"}
    assert "building kube-apiserver, about 4 minutes the first time" in capsys.readouterr().err
    assert building.build("api") == found
    assert calls() == ALL


def test_an_interrupted_build_resumes_with_what_is_missing(
    calls: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BROKEN", ALL[2])
    with pytest.raises(ClusterError, match=f"go build of {ALL[2]} ended with 1"):
        building.build("api")
    assert calls() == ALL[:2]
    monkeypatch.setenv("BROKEN", "")
    assert {path.read_text() for path in building.build("api").values()} == {"whole"}
    assert calls() == ALL


@pytest.mark.parametrize("changed", ["go.mod", "go.sum", "Go"])
def test_other_sources_or_another_go_are_built_anew(
    calls: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch, changed: str
) -> None:
    before = building.build("api")
    if changed == "Go":
        monkeypatch.setenv("VERSION", "2")
    else:
        with (building.MODULES / "etcd" / changed).open("a") as source:
            source.write("\n")
    after = building.build("api")
    assert after["etcd"] != before["etcd"]
    assert (after["kubectl"] == before["kubectl"]) == (changed != "Go")


def test_two_builders_at_once_build_nothing_twice(calls: Callable[[], list[str]]) -> None:
    builders = [threading.Thread(target=building.build, args=("api",)) for _ in range(2)]
    for builder in builders:
        builder.start()
    for builder in builders:
        builder.join(timeout=30)
    assert calls() == ALL


def test_without_go_the_build_says_so(calls: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(ClusterError, match="need Go"):
        building.build("api")
    assert calls() == []
