"""A Debian root file system as one archive, from the package mirror that this machine is set up with."""

import os
import subprocess
from collections.abc import Iterable
from pathlib import Path

from tests.cluster.images.errors import ImageError
from tests.cluster.images.recipes import Base

BOOTSTRAP_SECONDS = 900.0
#: What nobody reads in a container; licences stay.
_WITHOUT = ("man", "locale", "info", "doc", "lintian", "bug")
_FORMAT = "$(ORIGIN) $(LABEL) $(REPO_URI)"


def bootstrap(base: Base, target: Path) -> None:
    """The same packages give the same bytes: every time stamp is SOURCE_DATE_EPOCH, every list is sorted."""
    unfinished = target.with_name(f".unfinished-{target.name}")
    unfinished.unlink(missing_ok=True)
    command = ["mmdebstrap", "--quiet", "--variant=minbase", f"--include={','.join(base.packages)}"]
    command += [f"--dpkgopt=path-exclude=/usr/share/{folder}/*" for folder in _WITHOUT]
    command += ["--dpkgopt=path-include=/usr/share/doc/*/copyright", "--aptopt=Acquire::Languages none"]
    # A build mounts its own pip.conf there; a mount point that is missing would stay behind in the image.
    command += ['--customize-hook=: >"$1/etc/pip.conf"; : >"$1/etc/resolv.conf"; echo localhost >"$1/etc/hostname"']
    command += [base.suite, str(unfinished), *sources(base.suite, _targets())]
    environment = {**os.environ, "SOURCE_DATE_EPOCH": "0"}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=BOOTSTRAP_SECONDS, check=False
    )
    if done.returncode != 0:
        raise ImageError(f"mmdebstrap of {base.suite} failed:\n{(done.stdout + done.stderr)[-2000:]}")
    unfinished.replace(target)


def sources(suite: str, targets: Iterable[str]) -> list[str]:
    """Lines of apt's sources for that suite, on the mirrors of `targets` (lines of ORIGIN, LABEL, URI)."""
    mirrors = {label: uri for origin, label, uri in (line.split() for line in targets) if origin == "Debian"}
    if "Debian" not in mirrors:
        raise ImageError("images are made of Debian's packages, and apt knows no Debian mirror here")
    lines = [f"deb {mirrors['Debian']} {name} main" for name in (suite, f"{suite}-updates")]
    if "Debian-Security" in mirrors:
        lines.append(f"deb {mirrors['Debian-Security']} {suite}-security main")
    return lines


def _targets() -> list[str]:
    command = ["apt-get", "indextargets", "--format", _FORMAT, "Created-By: Packages"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    return [line for line in done.stdout.splitlines() if len(line.split()) == 3]
