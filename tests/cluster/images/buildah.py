"""The `buildah` command with a storage of its own; runs no daemon and no container."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.cluster.images.errors import ImageError

BUILD_SECONDS = 1800.0
_STEP_SECONDS = 300.0
#: Time stamp of the image and of all its files.
_EPOCH = "0"
#: Of pip's settings: how an index is reached. Others are about this machine.
_PIP_SETTINGS = ("index-url", "extra-index-url", "trusted-host", "proxy", "timeout")
#: With mounts and processes of its own, which end with this process however that ends.
_CONTAINED = (
    *("setpriv", "--pdeathsig", "KILL"),
    *("unshare", "--mount", "--propagation", "private", "--pid", "--fork", "--kill-child=KILL", "--mount-proc"),
)


class Buildah:
    """Images and their layers lie below `folder`, for the next build. One at a time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        (folder / "storage.conf").write_text(
            f'[storage]\ndriver = "overlay"\ngraphroot = "{folder}/storage"\nrunroot = "{folder}/run"\n'
        )
        (folder / "policy.json").write_text(json.dumps({"default": [{"type": "insecureAcceptAnything"}]}))
        self._policy = ("--signature-policy", str(folder / "policy.json"))
        self._run("rm", "--all")  # what a build that was killed was working on

    def has(self, reference: str) -> bool:
        return self._run("images", "--quiet", "--filter", f"reference={reference}") != ""

    def import_base(self, root: Path, reference: str) -> None:
        """An image of one layer from the archive of a root file system."""
        container = self._run("from", "scratch")
        try:
            self._run("add", "--quiet", container, str(root), "/")
            self._run("config", "--env", "PATH=/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin", container)
            self._run("commit", "--quiet", *self._policy, "--timestamp", _EPOCH, container, reference)
        finally:
            self._run("rm", container)

    def build(self, dockerfile: Path, context: Path, *, base: str, reference: str, target: str | None) -> None:
        """Layers that were made before of the same are taken again. Needs the package indexes."""
        pip = self._pip_settings()
        command = ["build", "--isolation", "chroot", "--pull=never", "--layers", *self._policy]
        command += ["--timestamp", _EPOCH, "--build-arg", f"BASE={base}", "--format", "oci"]
        # Mounted and not passed as variables, which would stay in the image.
        command += ["--volume", f"{pip}:/mnt:ro", "--volume", f"{pip}/pip.conf:/etc/pip.conf:ro"]
        command += ["--tag", reference, "--file", str(dockerfile)]
        if target is not None:
            command += ["--target", target]
        self._run(*command, str(context), seconds=BUILD_SECONDS)

    def write(self, reference: str, archive: Path) -> None:
        """As an OCI archive."""
        self._run(
            *("push", "--quiet", *self._policy, reference, f"oci-archive:{archive}:{reference}"), seconds=BUILD_SECONDS
        )

    def _pip_settings(self) -> Path:
        """A folder for /mnt: how this machine reaches its index, and the certificates that it trusts."""
        folder = self._folder / "pip"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(mode=0o755)
        found = dict(_pip_config())
        lines = ["[global]", *(f"{key} = {found[key]}" for key in _PIP_SETTINGS if key in found)]
        if "cert" in found:
            shutil.copyfile(found["cert"], folder / "ca.crt")
            lines.append("cert = /mnt/ca.crt")
        (folder / "pip.conf").write_text("\n".join(lines) + "\n")
        return folder

    def _run(self, *arguments: str, seconds: float = _STEP_SECONDS) -> str:
        environment = {**os.environ, "CONTAINERS_STORAGE_CONF": str(self._folder / "storage.conf")}
        try:
            done = subprocess.run(
                [*_CONTAINED, "buildah", *arguments],
                env=environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=seconds,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise ImageError(f"buildah {arguments[0]} took longer than {seconds:.0f} s") from None
        if done.returncode != 0:
            raise ImageError(f"buildah {arguments[0]} failed:\n{(done.stdout + done.stderr)[-3000:]}")
        return done.stdout.strip()


def _pip_config() -> list[tuple[str, str]]:
    """(key, value) of `pip config list`, those of the environment last, as pip itself ranks them."""
    command = [sys.executable, "-P", "-m", "pip", "config", "list"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    pairs = [line.partition("=") for line in done.stdout.splitlines()]
    pairs.sort(key=lambda pair: pair[0].startswith(":env:"))
    return [(key.rpartition(".")[2], value.strip().strip("'\"")) for key, _, value in pairs]
