"""Debian packages that real pods need, installed when they are missing."""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.cluster.tool.errors import ClusterError

CNI = Path("/usr/lib/cni")
BUSYBOX = Path("/bin/busybox")
_APT_SECONDS = 300.0
_NEEDS = {
    "containerd": Path("/usr/bin/containerd"),
    "runc": Path("/usr/sbin/runc"),
    "containernetworking-plugins": CNI / "ptp",
    "nftables": Path("/usr/sbin/nft"),
    "busybox-static": BUSYBOX,
}


def install(needs: Mapping[str, Path] = _NEEDS) -> None:
    """Says what it installs: the packages whose file is missing. Needs the mirror, so outside of the namespace."""
    missing = [package for package, file in needs.items() if not file.exists()]
    if not missing:
        return
    if shutil.which("apt-get") is None:
        raise ClusterError(f"this needs {', '.join(missing)}, and there is no apt-get to install them")
    print(f"installing {', '.join(missing)} with apt-get", file=sys.stderr, flush=True)
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for command in (["update", "-qq"], ["install", "-qq", "-y", "--no-install-recommends", *missing]):
        done = subprocess.run(
            ["apt-get", *command], env=environment, capture_output=True, text=True, timeout=_APT_SECONDS, check=False
        )
        if done.returncode != 0:
            raise ClusterError(f"apt-get {command[0]} failed:\n{(done.stdout + done.stderr)[-2000:]}")
