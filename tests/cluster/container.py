"""What the kubelet stand-in makes of a pod's container: a process on this machine instead of one in an image."""

import base64
import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: A container whose image is named like this runs the engine without a model; every other one the real engine.
FAKE_IMAGE = "localhost/fake-engine:1"
REAL_IMAGE = "localhost/loraplane-engine:1"
ROOT = Path(__file__).parents[2]
_VARIABLE = re.compile(r"\$\(([A-Z_][A-Z0-9_]*)\)")
_INHERITED = ("PATH", "HOME", "LC_ALL", "LANG", "TORCHINDUCTOR_CACHE_DIR")


@dataclass(frozen=True)
class Command:
    argv: list[str]
    env: dict[str, str]


def materialize(
    pod: Mapping[str, Any],
    folder: Path,
    claims: Mapping[str, Path],
    secret: Callable[[str], Mapping[str, Any] | None],
) -> dict[str, Path]:
    """Volume name -> path here. Raises LookupError for a claim or Secret that is not there."""
    found: dict[str, Path] = {}
    for volume in pod["spec"].get("volumes") or []:
        name = volume["name"]
        if "persistentVolumeClaim" in volume:
            found[name] = claims[volume["persistentVolumeClaim"]["claimName"]]
            continue
        found[name] = folder / name
        found[name].mkdir(parents=True, exist_ok=True)
        if "secret" in volume:
            raw = secret(volume["secret"]["secretName"])
            if raw is None:
                raise LookupError(f'secret "{volume["secret"]["secretName"]}" not found')
            _write(found[name], raw.get("data") or {}, volume["secret"].get("defaultMode", 0o440))
    return found


def _write(folder: Path, data: Mapping[str, str], mode: int) -> None:
    for name, value in data.items():
        file = folder / name
        file.unlink(missing_ok=True)
        file.touch(0o600)
        file.write_bytes(base64.b64decode(value))
        file.chmod(mode)


def command(pod: Mapping[str, Any], volumes: Mapping[str, Path], address: str) -> Command:
    """The process in the container's place; paths and the wildcard address are turned into this machine's."""
    container = pod["spec"]["containers"][0]
    env = {each["name"]: _value(each, pod, address) for each in container.get("env") or []}
    mounts = sorted(
        ((each["mountPath"].rstrip("/"), volumes[each["name"]]) for each in container.get("volumeMounts") or []),
        key=lambda mount: -len(mount[0]),
    )

    def here(text: str) -> str:
        expanded = _VARIABLE.sub(lambda match: env.get(match[1], match[0]), text)
        option, equals, value = expanded.partition("=")
        return f"{option}{equals}{_path(value, mounts, address)}" if equals else _path(expanded, mounts, address)

    module = "tests.cluster.fake_engine" if container["image"] == FAKE_IMAGE else "loraplane_engine"
    inherited = {name: os.environ[name] for name in _INHERITED if name in os.environ}
    return Command(
        argv=[sys.executable, "-m", module, *(here(each) for each in container.get("args") or [])],
        env={**inherited, "OMP_NUM_THREADS": "1", **{name: here(value) for name, value in env.items()}},
    )


def _path(value: str, mounts: list[tuple[str, Path]], address: str) -> str:
    if value == "0.0.0.0":
        return address
    for mount, path in mounts:
        if value == mount or value.startswith(f"{mount}/"):
            return f"{path}{value.removeprefix(mount)}"
    return value


def _value(each: Mapping[str, Any], pod: Mapping[str, Any], address: str) -> str:
    if "value" in each:
        return str(each["value"])
    field = str(each.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath", ""))
    metadata = pod["metadata"]
    match = re.fullmatch(r"metadata\.(labels|annotations)\['(.+)'\]", field)
    if match:
        return str(metadata.get(match[1], {}).get(match[2], ""))
    known = {"metadata.name": metadata["name"], "metadata.namespace": metadata["namespace"], "status.podIP": address}
    return str(known[field])


def probe_of(container: Mapping[str, Any], name: str) -> tuple[str, float, int] | None:
    """(path with port, seconds between, failures allowed); only httpGet, the one kind that our pods use."""
    raw = container.get(name)
    if raw is None:
        return None
    port = raw["httpGet"]["port"]
    ports = {each["name"]: each["containerPort"] for each in container.get("ports") or []}
    number = port if isinstance(port, int) else ports[port]
    return f":{number}{raw['httpGet']['path']}", raw.get("periodSeconds", 10), raw.get("failureThreshold", 3)
