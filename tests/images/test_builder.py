"""The builder's bookkeeping, with stand-ins for `buildah` and `mmdebstrap`; `make images` runs the real ones."""

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cluster.images import ImageError, archive, build
from tests.cluster.images.__main__ import main
from tests.cluster.images.buildah import Buildah, _pip_config
from tests.cluster.images.debian import sources

# Each call is a line of CALLS. FAILS: the command that fails; a push writes half of its archive before.
BUILDAH = """#!/bin/sh
echo "buildah $*" >>"$CALLS"
for last; do :; done
case $1 in
    images) grep -qF -- "$(echo "$*" | sed 's/.*reference=//')" "$CALLS.images" 2>/dev/null && echo id ;;
    from) echo container ;;
    commit) echo "$last" >>"$CALLS.images" ;;
    push) file=${last#oci-archive:}; printf half >"${file%%:*}" ;;
esac
[ "$1" != "$FAILS" ] || { echo "no space" >&2; exit 1; }
[ "$1" != push ] || printf whole >"${file%%:*}"
"""
# What contains buildah needs root.
SETPRIV = """#!/bin/sh
while [ "$1" != buildah ]; do shift; done
exec "$@"
"""
MMDEBSTRAP = """#!/bin/sh
echo "mmdebstrap $*" >>"$CALLS"
for word; do case $word in */.unfinished-*) printf root >"$word" ;; esac; done
"""


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[str]]:
    """The calls that begin with these words."""
    folder, log = tmp_path / "bin", tmp_path / "calls"
    folder.mkdir()
    for name, text in {"buildah": BUILDAH, "mmdebstrap": MMDEBSTRAP, "setpriv": SETPRIV}.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    monkeypatch.setattr("tests.cluster.images.builder.install", lambda needs: None)
    monkeypatch.setattr("tests.cluster.images.debian._targets", lambda: ["Debian Debian mirror"])
    monkeypatch.setattr("tests.cluster.images.buildah._pip_config", list)  # the real one takes a second
    monkeypatch.setattr("os.geteuid", lambda: 0)
    for name, value in {"CALLS": str(log), "FAILS": "", "XDG_CACHE_HOME": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")

    def made(words: str) -> list[str]:
        return [line for line in log.read_text().splitlines() if line.startswith(words)] if log.exists() else []

    return made


def test_an_image_and_its_base_are_made_once(
    calls: Callable[[str], list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    found = build(["gateway", "operator"])
    assert {path.read_text() for path in found.values()} == {"whole"}
    said = capsys.readouterr().err
    assert "making a Debian bookworm to build on, about a minute, once" in said
    assert "building image gateway" in said
    assert build(["gateway", "operator"]) == found
    assert len(calls("mmdebstrap")) == len(calls("buildah commit")) == 1
    assert len(calls("buildah build")) == 2
    assert archive("gateway") == found["gateway"]


def test_a_build_that_fails_tells_why_and_leaves_no_archive(
    calls: Callable[[str], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAILS", "push")
    with pytest.raises(ImageError, match="buildah push failed:\nno space"):
        build(["valkey"])
    with pytest.raises(ImageError, match="image valkey was not built from these sources; run `make images`"):
        archive("valkey")
    monkeypatch.setenv("FAILS", "")
    assert build(["valkey"])["valkey"].read_text() == "whole"
    assert len(calls("mmdebstrap")) == 1


def test_two_builders_at_once_build_nothing_twice(calls: Callable[[str], list[str]]) -> None:
    builders = [threading.Thread(target=build, args=(["gateway"],)) for _ in range(2)]
    for builder in builders:
        builder.start()
    for builder in builders:
        builder.join(timeout=30)
    assert len(calls("buildah build")) == 1


def test_only_the_newest_archives_of_an_image_stay(calls: Callable[[str], list[str]], tmp_path: Path) -> None:
    folder = tmp_path / "loraplane-cluster" / "images"
    folder.mkdir(parents=True)
    for age in range(1, 6):
        for name in ("engine", "engine-slim"):
            old = folder / f"{name}-{age:016x}.tar"
            old.write_text("old")
            os.utime(old, (1000 - age, 1000 - age))
    newest = build(["engine"])["engine"]
    assert sorted(folder.glob("engine-????????????????.tar")) == sorted(
        [newest, *(folder / f"engine-{age:016x}.tar" for age in (1, 2))]
    )
    assert len(list(folder.glob("engine-slim-*.tar"))) == 5


def test_the_command_prints_the_archives_and_names_what_there_is(
    calls: Callable[[str], list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["engine-slim"]) == 0
    assert capsys.readouterr().out == f"engine-slim\t{archive('engine-slim')}\n"
    assert "--target slim" in calls("buildah build")[0]
    assert main(["enigne"]) == 1
    assert "there is no image enigne; there are operator, gateway, engine-slim" in capsys.readouterr().err


def test_without_root_the_build_says_so(calls: Callable[[str], list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    with pytest.raises(ImageError, match="needs root"):
        build(["gateway"])
    assert calls("") == []


def test_a_build_is_told_how_to_reach_the_index_and_nothing_else(
    calls: Callable[[str], list[str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Whoever may read an image must not find this machine's settings in it."""
    monkeypatch.setattr("tests.cluster.images.buildah._pip_config", _pip_config)
    certificate = tmp_path / "bundle"
    certificate.write_text("trusted")
    for name, value in {"CERT": str(certificate), "INDEX_URL": "index.example", "FIND_LINKS": "/wheels"}.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    Buildah(tmp_path / "buildah").build(tmp_path, tmp_path, base="base", reference="name", target=None)
    settings = (tmp_path / "buildah" / "pip" / "pip.conf").read_text()
    assert "index-url = index.example\n" in settings
    assert "cert = /mnt/ca.crt\n" in settings
    assert "find-links" not in settings
    assert (tmp_path / "buildah" / "pip" / "ca.crt").read_text() == "trusted"
    (command,) = calls("buildah build")
    assert "index.example" not in command
    assert "--env" not in command


def test_debian_comes_with_its_security_updates_from_this_machines_mirrors() -> None:
    targets = ["Debian Debian m/debian/", "Debian Debian-Security m/security/", "Other Other other/"]
    assert sources("trixie", targets) == [
        "deb m/debian/ trixie main",
        "deb m/debian/ trixie-updates main",
        "deb m/security/ trixie-security main",
    ]
    with pytest.raises(ImageError, match="apt knows no Debian mirror here"):
        sources("trixie", ["Other Other other/"])
