"""What there is to build, what goes into it, and the hash of all that. Builds nothing."""

import hashlib
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
#: Changes when the builder makes other images of the same files.
_FORMAT = "1"
_COPY = re.compile(r"^COPY((?: --\S+)*) (.+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Base:
    """A Debian of these packages, unpacked from its archive."""

    suite: str
    packages: tuple[str, ...]

    @property
    def key(self) -> str:
        text = "\n".join((_FORMAT, self.suite, *self.packages))
        return f"{self.suite}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"


#: The Python that .venv's packages were built for, so that they can be mounted in an engine-slim.
PYTHON = Base("bookworm", ("ca-certificates", "python3", "python3-venv"))
#: The first Debian that has Valkey.
DEBIAN = Base("trixie", ("ca-certificates",))


@dataclass(frozen=True, slots=True)
class Image:
    """`target`: the Dockerfile's stage, its last one by default."""

    name: str
    folder: str
    base: Base
    target: str | None = None

    @property
    def dockerfile(self) -> Path:
        return ROOT / "images" / self.folder / "Dockerfile"


IMAGES = {
    image.name: image
    for image in (
        Image("operator", "operator", PYTHON),
        Image("gateway", "gateway", PYTHON),
        Image("engine-slim", "engine", PYTHON, target="slim"),
        Image("engine", "engine", PYTHON),
        Image("postgres", "postgres", DEBIAN),
        Image("valkey", "valkey", DEBIAN),
    )
}
#: What the cluster tests need. The whole engine is about 5 GB.
DEFAULT = tuple(name for name in IMAGES if name != "engine")


def reference(name: str) -> str:
    """Its name on the node. A name without a host would be taken for one of a public registry."""
    return f"localhost/loraplane/{name}:dev"


def copied(image: Image) -> list[Path]:
    """What the Dockerfile copies from the context, relative to the root."""
    instructions = image.dockerfile.read_text().replace("\\\n", " ")
    found: list[Path] = []
    for options, operands in _COPY.findall(instructions):
        if "--from=" not in options:
            found += [Path(source) for source in operands.split()[:-1]]
    return found


def stage(image: Image, target: Path, root: Path = ROOT) -> str:
    """Copies the build context to `target`; returns its key, which covers all that decides about the image.

    Built from the copy, so that an edit meanwhile cannot make an image that its key does not tell.
    """
    digest = hashlib.sha256("\0".join((_FORMAT, image.base.key, image.target or "")).encode())
    digest.update(image.dockerfile.read_bytes())
    for source in sorted(copied(image)):
        for file in _files(root / source):
            relative = file.relative_to(root)
            executable = os.access(file, os.X_OK)
            copy = target / relative
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, copy)
            copy.chmod(0o755 if executable else 0o644)
            digest.update(f"\0{relative}\0{executable}\0".encode())
            digest.update(hashlib.sha256(copy.read_bytes()).digest())
    return digest.hexdigest()[:16]


def _files(path: Path) -> Iterator[Path]:
    """Sorted; without bytecode, which the image makes itself."""
    if path.is_file():
        yield path
        return
    if not path.is_dir():
        raise FileNotFoundError(f"{path} does not exist, and a Dockerfile copies it")
    for entry in sorted(path.iterdir()):
        if entry.name != "__pycache__":
            yield from _files(entry)
