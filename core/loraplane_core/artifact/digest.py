"""Digests of adapter artifacts and of base models (design §1).

Both are sha256 over the lines `<hex sha256>  <file name>\\n`, sorted by name. An artifact is exactly two
files; a base is config.json and every *.safetensors file.
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
ARTIFACT_FILES = (CONFIG_FILE, WEIGHTS_FILE)
BASE_CACHE_FILE = ".loraplane-digest.json"
_CHUNK = 1 << 20


def sha256_file(path: Path) -> str:
    found = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            found.update(chunk)
    return found.hexdigest()


def digest_of(sums: Mapping[str, str]) -> str:
    """The digest of files given as {name: hex sha256}."""
    lines = "".join(f"{sums[name]}  {name}\n" for name in sorted(sums))
    return hashlib.sha256(lines.encode()).hexdigest()


def artifact_digest(folder: Path) -> str:
    """The digest of the artifact in `folder`; raises FileNotFoundError when one of its two files is missing."""
    return digest_of({name: sha256_file(folder / name) for name in ARTIFACT_FILES})


def base_digest(folder: Path) -> str:
    """The digest of a base model, computed once and cached beside the weights.

    The cache is keyed by each file's name, size and modification time, and is only a help: an unwritable
    folder (a read-only mount) costs the computation, nothing else.
    """
    files = sorted([folder / "config.json", *folder.glob("*.safetensors")])
    stamp = [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in files]
    cache = folder / BASE_CACHE_FILE
    try:
        known = json.loads(cache.read_text())
        if known["stamp"] == stamp:
            return str(known["digest"])
    except (OSError, ValueError, KeyError, TypeError):
        pass
    digest = digest_of({file.name: sha256_file(file) for file in files})
    temporary = cache.with_name(f"{cache.name}.{os.getpid()}")
    try:
        temporary.write_text(json.dumps({"stamp": stamp, "digest": digest}))
        temporary.replace(cache)
    except OSError:
        with contextlib.suppress(OSError):  # a read-only mount also refuses to remove what is not there
            temporary.unlink()
    return digest
