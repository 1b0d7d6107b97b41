"""The folder of YAML documents: finding them, reading them, checking them before anybody acts on them."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loraplane_cli.errors import BadDocument
from loraplane_core.errors import InvalidParameter
from loraplane_core.labels import API_VERSION
from loraplane_core.resources.documents import Resource, parse_document
from loraplane_core.resources.tenant import Tenant
from loraplane_core.resources.yamltext import BYTES_MAX, load_yaml

SUFFIXES = (".yaml", ".yml")


@dataclass(frozen=True)
class Document:
    """One document of a file: `index` counts from 0 within it."""

    path: Path
    index: int
    resource: Resource
    raw: dict[str, Any]

    @property
    def key(self) -> tuple[str, str, str]:
        """Kind, namespace (none for tenants) and name: what makes two documents the same object."""
        meta = self.resource.metadata
        namespace = "" if isinstance(self.resource, Tenant) else meta.namespace
        return (self.resource.kind, namespace, meta.name)


def yaml_files(folder: Path) -> Iterator[Path]:
    """YAML files below `folder`, sorted; hidden files and folders are passed over."""
    for path in sorted(folder.rglob("*")):
        hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        if path.suffix in SUFFIXES and not hidden and path.is_file():
            yield path


def load_raw(path: Path) -> list[Any]:
    """All documents of a file. Raises BadDocument."""
    try:
        with path.open("rb") as file:
            raw = file.read(BYTES_MAX + 1)  # one more tells load_yaml that it is too large
        return load_yaml(raw.decode())
    except (OSError, ValueError) as error:
        raise BadDocument(f"{path}: {error}") from error


def load_file(path: Path) -> list[Document]:
    """The Loraplane documents of a file. Raises BadDocument naming the file, the document and the field."""
    found = []
    for index, raw in enumerate(load_raw(path)):
        if raw is None:
            continue
        try:
            found.append(Document(path, index, parse_document(raw, where=f"{path}, document {index}"), raw))
        except InvalidParameter as error:
            raise BadDocument(error.message, param=error.param) from error
    return found


def is_ours(raw: object) -> bool:
    return isinstance(raw, dict) and raw.get("apiVersion") == API_VERSION


def load(source: Path) -> list[Document]:
    """The documents of a file or of a folder. Raises BadDocument, also for one object given twice."""
    if not source.exists():
        raise BadDocument(f"{source} does not exist")
    files = list(yaml_files(source)) if source.is_dir() else [source]
    found: dict[tuple[str, str, str], Document] = {}
    for document in (document for path in files for document in load_file(path)):
        first = found.setdefault(document.key, document)
        if first is not document:
            raise BadDocument(f"{'/'.join(filter(None, document.key))} is in {first.path} and in {document.path}")
    return list(found.values())
