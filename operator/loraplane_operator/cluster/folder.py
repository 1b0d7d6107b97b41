"""A folder of YAML documents as the wished objects, read so that no accident looks like a deletion.

A file that cannot be read or parsed keeps the documents it had; so does a document that does not follow
its schema. A change counts only once the file looks the same in two scans, because editors and copies
truncate, write and rename in several steps. A folder that cannot be listed deletes nothing.
"""

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from loraplane_core.errors import InvalidParameter
from loraplane_core.labels import TENANT_KIND
from loraplane_core.resources.adapter import LoRAAdapter
from loraplane_core.resources.documents import parse_document
from loraplane_core.resources.pool import BaseModelPool
from loraplane_core.resources.yamltext import BYTES_MAX, load_yaml
from loraplane_operator.actions import ObjectRef

_NOBODY = ObjectRef("", "", "")
Signature = tuple[int, int, int]  # mtime in ns, size, inode
_NO_STATUS: Signature = (-1, -1, -1)


@dataclass(frozen=True)
class Problem:
    """Something in the folder that is not in force, for people."""

    path: str
    message: str


@dataclass(frozen=True)
class Document:
    """One valid object. `path` is relative to the folder."""

    path: str
    resource: BaseModelPool | LoRAAdapter

    @property
    def ref(self) -> ObjectRef:
        return ObjectRef(self.resource.kind, self.resource.metadata.namespace, self.resource.metadata.name)


@dataclass(frozen=True)
class Scan:
    """`held` are paths whose current content is unknown: objects that came from them stay as they are."""

    documents: dict[ObjectRef, Document]
    problems: tuple[Problem, ...]
    held: frozenset[str]
    complete: bool  # False: the folder could not be listed, or nothing was confirmed yet; nothing is deleted


@dataclass
class _File:
    signature: Signature | None = None  # of the content that was read
    pending: Signature | None = None  # seen once, to be confirmed by the next scan
    documents: list[Document] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    held: bool = False


class Folder:
    """Remembers files between scans. Blocking; meant for small folders."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._files: dict[str, _File] = {}
        self._scanned = False

    def scan(self) -> Scan:
        try:
            found = dict(_signatures(self._root))
        except OSError as error:
            problem = Problem(str(self._root), f"the folder cannot be read: {error.strerror}; nothing is deleted")
            documents, _ = self._merge()
            return Scan(documents, (problem,), frozenset(self._files), complete=False)
        for path in list(self._files):
            if path not in found:
                self._missing(path)
        for path, signature in found.items():
            self._look(path, signature)
        complete, self._scanned = self._scanned, True
        documents, problems = self._merge()
        held = frozenset(path for path, file in self._files.items() if file.held)
        return Scan(documents, problems, held, complete)

    def _missing(self, path: str) -> None:
        """Gone in two scans in a row is gone."""
        file = self._files[path]
        if file.pending == (0, 0, 0):
            del self._files[path]
        else:
            file.pending = (0, 0, 0)

    def _look(self, path: str, signature: Signature) -> None:
        file = self._files.setdefault(path, _File())
        if signature == file.signature:
            file.pending = None
        elif signature != file.pending:
            file.pending = signature
            file.held |= file.signature is None
        else:
            readable = self._read(path, file)
            file.signature, file.pending = signature if readable else None, None

    def _read(self, path: str, file: _File) -> bool:
        """False when it should be tried again although it looks the same, for example after a chmod."""
        known = {document.ref: document for document in file.documents}
        file.problems, file.held = [], False
        try:
            text = _text(self._root / path)
            if not text.strip():  # a full disk or a writer that died leaves this, too
                raise ValueError("it is empty; remove the file to delete what it held")
            raws = [raw for raw in load_yaml(text) if raw is not None]
        except (OSError, ValueError) as error:
            file.problems = [Problem(path, f"not read, what it held stays in force: {_one_line(error)}")]
            file.held = True
            return not isinstance(error, OSError)
        file.documents = []
        for index, raw in enumerate(raws):
            self._take(path, file, index, raw, known)
        return True

    def _take(self, path: str, file: _File, index: int, raw: object, known: dict[ObjectRef, Document]) -> None:
        if isinstance(raw, dict) and raw.get("kind") == TENANT_KIND:
            return  # the CLI's
        try:
            resource = parse_document(raw, where=f"document {index + 1}")
        except InvalidParameter as error:
            file.problems.append(Problem(path, error.message))
            ref = _named(raw)
            if ref in known:
                file.documents.append(known[ref])
            else:
                file.held = True  # it could be any of those that came from here
            return
        if isinstance(resource, BaseModelPool | LoRAAdapter):
            file.documents.append(Document(path, resource))

    def _merge(self) -> tuple[dict[ObjectRef, Document], tuple[Problem, ...]]:
        """One document per object: the first by path wins."""
        documents: dict[ObjectRef, Document] = {}
        problems: list[Problem] = []
        for path in sorted(self._files):
            file = self._files[path]
            problems += file.problems
            for document in file.documents:
                first = documents.setdefault(document.ref, document)
                if first is not document:
                    problems.append(Problem(path, f"{document.ref} is also defined in {first.path}, which wins"))
        return documents, tuple(problems)


def _signatures(root: Path) -> Iterator[tuple[str, Signature]]:
    """Every plain *.yaml and *.yml below `root`, hidden names excepted. Raises OSError when one cannot be listed."""

    def refuse(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError) or error.filename == str(root):
            raise error

    for folder, folders, names in os.walk(root, onerror=refuse):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            if name.startswith(".") or not name.endswith((".yaml", ".yml")):
                continue
            full = Path(folder, name)
            path = str(full.relative_to(root))
            try:
                found = full.stat()
            except FileNotFoundError:
                continue
            except OSError:  # a link to itself; reading it tells the reason, and the other files go on
                yield path, _NO_STATUS
                continue
            if stat.S_ISREG(found.st_mode):  # opening a FIFO would wait for its writer
                yield path, (found.st_mtime_ns, found.st_size, found.st_ino)


def _text(path: Path) -> str:
    with path.open("rb") as file:
        raw = file.read(BYTES_MAX + 1)
    if len(raw) > BYTES_MAX:
        raise ValueError(f"larger than {BYTES_MAX} bytes")
    return raw.decode()


def _named(raw: object) -> ObjectRef:
    """Which object a document is about, as far as it says so although it is not valid."""
    metadata: Any = raw.get("metadata") if isinstance(raw, dict) else None
    if not isinstance(raw, dict) or not isinstance(metadata, dict):
        return _NOBODY
    kind, name, namespace = raw.get("kind"), metadata.get("name"), metadata.get("namespace", "default")
    if not (isinstance(kind, str) and isinstance(name, str) and isinstance(namespace, str)):
        return _NOBODY
    return ObjectRef(kind, namespace, name)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
