"""Pods under a namespace that enforces the `restricted` Pod Security Standard, from the images that ship."""

import contextlib
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from tests.cluster.kube import Kube, Refused
from tests.cluster.services import until

Object = dict[str, Any]
START_SECONDS = 60.0
ACCOUNT_SECONDS = 20.0
USER = 65532
VOLUME_SIZE = "1Gi"
RESTRICTED = {"pod-security.kubernetes.io/enforce": "restricted"}


@contextlib.contextmanager
def restricted_namespace(kube: Kube, prefix: str = "images") -> Iterator[str]:
    """Yields its name; everything in it goes with it."""
    chosen = f"{prefix}-{secrets.token_hex(3)}"
    kube.call("POST", "/api/v1/namespaces", {"metadata": {"name": chosen, "labels": RESTRICTED}})
    path = f"/api/v1/namespaces/{chosen}"
    until(lambda: kube.get(f"{path}/serviceaccounts/default") is not None, ACCOUNT_SECONDS, "its ServiceAccount")
    try:
        yield chosen
    finally:
        kube.delete(path)


def container(name: str, image: str, **fields: Any) -> Object:
    """With a root file system that may not be written, and /tmp that may."""
    mounts = [{"name": "tmp", "mountPath": "/tmp"}, *fields.pop("volumeMounts", [])]
    security = {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": True,
    }
    own = {"name": name, "image": image, "imagePullPolicy": "Never", "securityContext": security}
    return {**own, "volumeMounts": mounts, **fields}


def pod(name: str, containers: list[Object], **spec: Any) -> Object:
    """The image says as whom it runs; the pod only demands that it is not root."""
    own = {
        "containers": containers,
        "securityContext": {"runAsNonRoot": True, "fsGroup": USER, "seccompProfile": {"type": "RuntimeDefault"}},
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": 20,
        "volumes": [{"name": "tmp", "emptyDir": {}}, *spec.pop("volumes", [])],
    }
    return {"metadata": {"name": name}, "spec": {**own, **spec}}


def mounted_claim(kube: Kube, namespace: str, name: str, folder: Path, node: str) -> Object:
    """A volume of a pod, read-only: a folder of this machine by a claim, since `restricted` forbids host paths.

    Read-only in the pod's volume too: else the kubelet would give what lies there to the pod's group.
    """
    volume = f"{namespace}-{name}"
    size, modes = {"storage": VOLUME_SIZE}, ["ReadOnlyMany"]
    local_volume(kube, volume, folder, node, modes[0])
    asked = {"accessModes": modes, "storageClassName": "none", "volumeName": volume, "resources": {"requests": size}}
    claims = f"/api/v1/namespaces/{namespace}/persistentvolumeclaims"
    kube.call("POST", claims, {"metadata": {"name": name}, "spec": asked})
    return {"name": name, "persistentVolumeClaim": {"claimName": name, "readOnly": True}}


def local_volume(kube: Kube, name: str, folder: Path, node: str, mode: str = "ReadWriteOnce") -> None:
    """A PersistentVolume for a claim that names it, of the storage class `none`."""
    term = {"matchExpressions": [{"key": "kubernetes.io/hostname", "operator": "In", "values": [node]}]}
    spec = {
        "capacity": {"storage": VOLUME_SIZE},
        "accessModes": [mode],
        "storageClassName": "none",
        "persistentVolumeReclaimPolicy": "Retain",
        "local": {"path": str(folder)},
        "nodeAffinity": {"required": {"nodeSelectorTerms": [term]}},
    }
    kube.call("POST", "/api/v1/persistentvolumes", {"metadata": {"name": name}, "spec": spec})


def run(kube: Kube, namespace: str, name: str, image: str, *command: str, **fields: Any) -> tuple[int, str]:
    """Exit status and output of one command in a pod of its own. `command` replaces the entry point."""
    pods = f"/api/v1/namespaces/{namespace}/pods"
    made = pod(name, [container("main", image, command=list(command), **fields)], restartPolicy="Never")
    kube.call("POST", pods, made)
    state = until(lambda: _terminated(kube, f"{pods}/{name}"), START_SECONDS, lambda: told(kube, f"{pods}/{name}"))
    return int(state["exitCode"]), log(kube, f"{pods}/{name}")


def until_ready(kube: Kube, path: str, seconds: float = START_SECONDS) -> Object:
    """The pod; a failure tells its status and what its containers wrote."""
    until(lambda: is_ready(kube, path), seconds, lambda: told(kube, path), every=0.1)
    return kube.call("GET", path)


def is_ready(kube: Kube, path: str) -> bool:
    conditions = kube.call("GET", path).get("status", {}).get("conditions", [])
    return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)


def log(kube: Kube, path: str, name: str = "") -> str:
    with contextlib.suppress(Refused, httpx.TransportError):  # a container that has not started has none
        return str(kube.call("GET", f"{path}/log{f'?container={name}' if name else ''}")["message"])
    return ""


def told(kube: Kube, path: str) -> str:
    found = kube.call("GET", path)
    names = [each["name"] for kind in ("initContainers", "containers") for each in found["spec"].get(kind, [])]
    return f"{found.get('status')}\n" + "\n".join(f"--- {name}\n{log(kube, path, name)}" for name in names)


def _terminated(kube: Kube, path: str) -> Object:
    """Empty until it has ended."""
    statuses = kube.call("GET", path).get("status", {}).get("containerStatuses", [])
    return dict(statuses[0]["state"].get("terminated") or {}) if statuses else {}
