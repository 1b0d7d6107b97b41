"""Digests of artifacts and bases, against the definition spelled out with hashlib."""

import errno
import hashlib
import os
from pathlib import Path

import pytest

from loraplane_core.artifact import digest
from loraplane_core.artifact.digest import (
    BASE_CACHE_FILE,
    CONFIG_FILE,
    WEIGHTS_FILE,
    artifact_digest,
    base_digest,
    digest_of,
)


def _hex(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def test_an_artifacts_digest_is_the_hash_of_its_sorted_sums(tmp_path: Path) -> None:
    (tmp_path / CONFIG_FILE).write_bytes(b"{}")
    (tmp_path / WEIGHTS_FILE).write_bytes(b"weights" * 500_000)
    (tmp_path / "README.md").write_text("not part of it")
    text = f"{_hex(b'{}')}  {CONFIG_FILE}\n{_hex(b'weights' * 500_000)}  {WEIGHTS_FILE}\n"
    assert artifact_digest(tmp_path) == _hex(text.encode())
    assert digest_of({"b": "2", "a": "1"}) == digest_of({"a": "1", "b": "2"}) == _hex(b"1  a\n2  b\n")


def test_an_artifact_without_one_of_its_files_has_no_digest(tmp_path: Path) -> None:
    (tmp_path / CONFIG_FILE).write_bytes(b"{}")
    with pytest.raises(FileNotFoundError):
        artifact_digest(tmp_path)


def _base(folder: Path) -> Path:
    (folder / "config.json").write_bytes(b"{}")
    (folder / "model.safetensors").write_bytes(b"w")
    return folder


def test_a_bases_digest_is_cached_until_a_file_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = _base(tmp_path)
    first = base_digest(folder)
    assert first == digest_of({"config.json": _hex(b"{}"), "model.safetensors": _hex(b"w")})
    assert (folder / BASE_CACHE_FILE).exists()

    read: list[Path] = []
    original = digest.sha256_file

    def counted(path: Path) -> str:
        read.append(path)
        return original(path)

    monkeypatch.setattr(digest, "sha256_file", counted)
    assert base_digest(folder) == first
    assert read == []

    (folder / "model.safetensors").write_bytes(b"v")
    os.utime(folder / "model.safetensors", ns=(1, 1))  # whatever the file system's resolution
    assert base_digest(folder) != first
    assert len(read) == 2

    (folder / "model-2.safetensors").write_bytes(b"more")
    assert base_digest(folder) != first


@pytest.mark.parametrize("cache", ["", "[]", "{}", '{"stamp": 1}', "not json"])
def test_a_damaged_cache_costs_the_computation_only(cache: str, tmp_path: Path) -> None:
    folder = _base(tmp_path)
    (folder / BASE_CACHE_FILE).write_text(cache)
    assert base_digest(folder) == digest_of({"config.json": _hex(b"{}"), "model.safetensors": _hex(b"w")})


def test_an_unwritable_folder_costs_the_computation_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a read-only mount refuses: also to remove a file that is not there."""
    folder = _base(tmp_path)

    def refuse(*_: object, **__: object) -> int:
        raise OSError(errno.EROFS, "read-only file system")

    for name in ("write_text", "unlink"):
        monkeypatch.setattr(Path, name, refuse)
    assert base_digest(folder) == base_digest(folder)
    assert not (folder / BASE_CACHE_FILE).exists()


def test_a_base_without_a_config_has_no_digest(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        base_digest(tmp_path)
