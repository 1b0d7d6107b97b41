"""From a recipe to an archive in the cache; what is there already is not made again.

An archive is written under another name and renamed, so an interrupted build leaves none that is not whole.
"""

import fcntl
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.cluster.images.buildah import BUILD_SECONDS, Buildah
from tests.cluster.images.debian import BOOTSTRAP_SECONDS, bootstrap
from tests.cluster.images.errors import ImageError
from tests.cluster.images.recipes import DEFAULT, IMAGES, Base, Image, reference, stage
from tests.cluster.tool.errors import ClusterError
from tests.cluster.tool.packages import install

_NEEDS = {"buildah": Path("/usr/bin/buildah"), "mmdebstrap": Path("/usr/bin/mmdebstrap")}
#: Archives of one image that are kept, for other checkouts.
_KEPT = 3
_LOCK_SECONDS = BOOTSTRAP_SECONDS + BUILD_SECONDS


def archive(name: str) -> Path:
    """The OCI archive of that image as the checkout is now. Raises ImageError when it was not built."""
    with tempfile.TemporaryDirectory(prefix="loraplane-image-") as context:
        path = _path(name, stage(_image(name), Path(context)))
    if not path.exists():
        raise ImageError(f"image {name} was not built from these sources; run `make images`")
    path.touch()
    return path


def build(names: Sequence[str] = DEFAULT) -> dict[str, Path]:
    """The OCI archive of each; builds what the cache lacks and says so on stderr.

    Needs root, the package mirror and the package index, so outside of the cluster's namespace. Raises ImageError.
    """
    found: dict[str, Path] = {}
    for name in names:
        image = _image(name)
        with tempfile.TemporaryDirectory(prefix="loraplane-image-") as context:
            key = stage(image, Path(context))
            found[name] = _path(name, key)
            if not found[name].exists():
                with _alone(cache() / "lock"):
                    _build(image, Path(context), found[name])
        found[name].touch()
    return found


def cache() -> Path:
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = base / "loraplane-cluster" / "images"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def _image(name: str) -> Image:
    if name not in IMAGES:
        raise ImageError(f"there is no image {name}; there are {', '.join(IMAGES)}")
    return IMAGES[name]


def _path(name: str, key: str) -> Path:
    return cache() / f"{name}-{key}.tar"


def _build(image: Image, context: Path, target: Path) -> None:
    if target.exists():  # by another process, while this one waited for the lock
        return
    if os.geteuid() != 0:
        raise ImageError("building images without a docker daemon needs root")
    try:
        install(_NEEDS)
    except ClusterError as error:
        raise ImageError(str(error)) from error
    buildah = Buildah(cache() / "buildah")
    base = _base(image.base, buildah)
    started = time.monotonic()
    _say(f"building image {image.name}")
    name = reference(image.name)
    buildah.build(image.dockerfile, context, base=base, reference=name, target=image.target)
    unfinished = target.with_name(f".unfinished-{image.name}.tar")
    unfinished.unlink(missing_ok=True)
    buildah.write(name, unfinished)
    unfinished.replace(target)
    _say(f"built image {image.name}: {target.stat().st_size / 1e6:.0f} MB in {time.monotonic() - started:.0f} s")
    _forget_older(image.name)


def _base(base: Base, buildah: Buildah) -> str:
    name = f"localhost/loraplane-base:{base.key}"
    if buildah.has(name):
        return name
    root = cache() / f"base-{base.key}.tar"
    if not root.exists():
        _say(f"making a Debian {base.suite} to build on, about a minute, once")
        bootstrap(base, root)
    _say(f"importing Debian {base.suite}")
    buildah.import_base(root, name)
    return name


def _forget_older(name: str) -> None:
    key_length = 16
    archives = [path for path in cache().glob(f"{name}-*.tar") if len(path.stem) == len(name) + 1 + key_length]
    for old in sorted(archives, key=lambda path: path.stat().st_mtime, reverse=True)[_KEPT:]:
        old.unlink()


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """One build at a time; another process waits, and then finds what was built."""
    deadline = time.monotonic() + _LOCK_SECONDS
    waits = False
    with lock.open("w") as held:
        while True:
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise ImageError(f"another process has held {lock} for {_LOCK_SECONDS:.0f} s") from None
                if not waits:
                    _say("another process builds images; waiting for it")
                waits = True
                time.sleep(0.2)
        yield
