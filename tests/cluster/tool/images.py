"""Images of one layer, made without a daemon: what a sandbox, a test's pod and the cluster's DNS run."""

import hashlib
import io
import json
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.cluster.tool.node import PAUSE_IMAGE
from tests.cluster.tool.packages import BUSYBOX

BUSYBOX_IMAGE = "localhost/busybox:1"
DNS_IMAGE = "localhost/coredns:1"
_APPLETS = ("sh", "nslookup", "httpd", "sleep", "cat", "ls", "nc", "id", "echo", "wget")


def write_images(folder: Path, coredns: Path) -> list[Path]:
    """Archives that `ctr images import` takes."""
    folder.mkdir()
    pause, busybox, dns = folder / "pause.tar", folder / "busybox.tar", folder / "coredns.tar"
    _write(pause, PAUSE_IMAGE, ["/bin/busybox", "sleep", "2147483647"], {"bin/busybox": BUSYBOX})
    _write(busybox, BUSYBOX_IMAGE, ["/bin/sh"], {"bin/busybox": BUSYBOX}, applets=_APPLETS)
    _write(dns, DNS_IMAGE, ["/coredns"], {"coredns": coredns})
    return [pause, busybox, dns]


def reference_and_digest(archive: Path) -> tuple[str, str] | None:
    """Of the image in an OCI archive; None for another kind of archive."""
    with tarfile.open(archive) as opened:
        if "index.json" not in opened.getnames():
            return None
        index = opened.extractfile("index.json")
        assert index is not None
        (image,) = json.load(index)["manifests"]
    return image["annotations"]["org.opencontainers.image.ref.name"], image["digest"]


def _write(
    target: Path, name: str, command: Sequence[str], files: Mapping[str, Path], applets: Sequence[str] = ()
) -> None:
    layer = _layer(files, applets)
    layer_name = f"{hashlib.sha256(layer).hexdigest()}/layer.tar"
    config = {
        "architecture": "amd64",
        "os": "linux",
        "config": {"Cmd": list(command), "Env": ["PATH=/bin"]},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(layer).hexdigest()}"]},
    }
    encoded = json.dumps(config).encode()
    config_name = f"{hashlib.sha256(encoded).hexdigest()}.json"
    manifest = [{"Config": config_name, "RepoTags": [name], "Layers": [layer_name]}]
    with tarfile.open(target, "w") as archive:
        _add(archive, config_name, encoded)
        _add(archive, layer_name, layer)
        _add(archive, "manifest.json", json.dumps(manifest).encode())


def _layer(files: Mapping[str, Path], applets: Sequence[str]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, mode in (("bin", 0o755), ("etc", 0o755), ("tmp", 0o1777)):
            folder = tarfile.TarInfo(name)
            folder.type, folder.mode = tarfile.DIRTYPE, mode
            archive.addfile(folder)
        for name, source in files.items():
            _add(archive, name, source.read_bytes())
        for applet in applets:
            link = tarfile.TarInfo(f"bin/{applet}")
            link.type, link.linkname = tarfile.SYMTYPE, "busybox"
            archive.addfile(link)
    return buffer.getvalue()


def _add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size, member.mode = len(content), 0o755
    archive.addfile(member, io.BytesIO(content))
