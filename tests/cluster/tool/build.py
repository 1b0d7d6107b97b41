"""Builds the control plane, and helm, from the checked-in Go modules into a cache outside the checkout.

One folder per module, named by the hash of its sources and the Go version. Each binary is built under another
name and renamed, so an interrupted build resumes with the binaries that are missing.
"""

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.cluster.tool.errors import ClusterError

MODULES = Path(__file__).parents[1] / "go"
BUILD_SECONDS = 1800.0
_SOURCES = ("go.mod", "go.sum", "main.go")


@dataclass(frozen=True, slots=True)
class Binary:
    """`minutes`: what the first build takes on two cores, with nothing cached."""

    name: str
    module: str
    package: str
    minutes: int


def _kubernetes(name: str, minutes: int) -> Binary:
    return Binary(name, "kubernetes", f"k8s.io/kubernetes/cmd/{name}", minutes)


API_LEVEL = (
    Binary("etcd", "etcd", "go.etcd.io/etcd/server/v3", 1),
    _kubernetes("kube-apiserver", 4),
    _kubernetes("kube-controller-manager", 1),
    _kubernetes("kubectl", 1),
    Binary("helm", "helm", "helm.sh/helm/v3/cmd/helm", 2),
)
NODE_LEVEL = (
    *API_LEVEL,
    _kubernetes("kube-scheduler", 1),
    _kubernetes("kubelet", 3),
    _kubernetes("kube-proxy", 1),
    Binary("coredns", "coredns", ".", 1),
)
_LEVELS = {"api": API_LEVEL, "node": NODE_LEVEL}


def build(level: str) -> dict[str, Path]:
    """Every binary of that level by name; builds what the cache lacks and says so on stderr."""
    binaries = _LEVELS[level]
    folders = {module: _folder(module) for module in {binary.module for binary in binaries}}
    found = {binary.name: folders[binary.module] / binary.name for binary in binaries}
    if all(path.exists() for path in found.values()):
        return found
    with _alone(_cache() / "lock"):
        for binary in binaries:
            if not found[binary.name].exists():
                _go_build(binary, found[binary.name])
    return found


def cached(name: str) -> Path | None:
    """A binary that was built before; None when there is none, or no Go to tell which one it would be."""
    binary = next(each for each in NODE_LEVEL if each.name == name)
    try:
        path = _folder(binary.module) / name
    except (ClusterError, OSError, subprocess.SubprocessError):
        return None
    return path if path.exists() else None


def _cache() -> Path:
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = base / "loraplane-cluster"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _folder(module: str) -> Path:
    digest = hashlib.sha256(_go("env", "GOVERSION").encode())
    for name in _SOURCES:
        source = MODULES / module / name
        if source.exists():
            digest.update(source.read_bytes())
    digest.update("\0".join(_arguments(module)).encode())
    folder = _cache() / f"{module}-{digest.hexdigest()[:16]}"
    folder.mkdir(exist_ok=True)
    return folder


def _arguments(module: str) -> list[str]:
    """Flags of `go build`. Without the stamp Kubernetes has no version: kubectl and helm refuse that."""
    link = "-s -w"
    if module == "kubernetes":
        match = re.search(r"k8s\.io/kubernetes (v(\d+)\.(\d+)\.\S+)", (MODULES / module / "go.mod").read_text())
        if match is None:
            raise ClusterError(f"{MODULES / module / 'go.mod'} does not require k8s.io/kubernetes")
        version, major, minor = match.groups()
        stamps = {"gitVersion": version, "gitMajor": major, "gitMinor": minor}
        link += "".join(f" -X k8s.io/component-base/version.{key}={value}" for key, value in stamps.items())
    return ["-mod=readonly", "-trimpath", "-ldflags", link]


def _go(*arguments: str) -> str:
    go = shutil.which("go")
    if go is None:
        raise ClusterError("the cluster tests need Go to build the control plane; put `go` on the PATH")
    done = subprocess.run([go, *arguments], cwd=MODULES, capture_output=True, text=True, timeout=60, check=True)
    return done.stdout.strip()


def _go_build(binary: Binary, target: Path) -> None:
    unit = "minute" if binary.minutes == 1 else "minutes"
    print(f"building {binary.name}, about {binary.minutes} {unit} the first time", file=sys.stderr, flush=True)
    unfinished = target.with_name(f".{binary.name}.unfinished")
    command = ["go", "build", *_arguments(binary.module), "-o", str(unfinished), binary.package]
    environment = {**os.environ, "CGO_ENABLED": "0"}
    done = subprocess.run(command, cwd=MODULES / binary.module, env=environment, timeout=BUILD_SECONDS, check=False)
    if done.returncode != 0:
        raise ClusterError(f"go build of {binary.package} ended with {done.returncode}; its output is above")
    unfinished.replace(target)


@contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """One builder at a time; another one waits, and then finds the binaries."""
    with lock.open("w") as held:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("another process builds the control plane; waiting for it", file=sys.stderr, flush=True)
            fcntl.flock(held, fcntl.LOCK_EX)
        yield
