"""EndpointSlices (discovery.k8s.io/v1) as far as routing needs them; locally the same shape lies in files.

Kubernetes: one or more slices per pool's headless Service, the port numbers shared by all endpoints.
Locally: one file per replica, `<namespace>.<pool>-<ordinal>.json`, replaced atomically.
"""

import re
from typing import Any

import msgspec

from loraplane_core.errors import InvalidName
from loraplane_core.identity import PoolRef, ReplicaId, is_name
from loraplane_core.labels import ANNOTATION_EPOCH, LABEL_MANAGED_BY, LABEL_POOL, MANAGED_BY


class Endpoint(msgspec.Struct, kw_only=True, frozen=True):
    """One replica as the cluster sees it. Routable also needs a live /state and the right base digest."""

    replica: ReplicaId
    address: str
    data_port: int
    admin_port: int
    metrics_port: int
    ready: bool
    terminating: bool
    epoch: int


def to_slice(endpoint: Endpoint) -> dict[str, Any]:
    """The EndpointSlice manifest of one replica (local form)."""
    replica = endpoint.replica
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {
            "name": replica.pod,
            "namespace": replica.namespace,
            "labels": {LABEL_POOL: replica.pool, LABEL_MANAGED_BY: MANAGED_BY},
            "annotations": {ANNOTATION_EPOCH: str(endpoint.epoch)},
        },
        "addressType": "IPv4",
        "endpoints": [
            {
                "addresses": [endpoint.address],
                "conditions": {
                    "ready": endpoint.ready,
                    "serving": endpoint.ready,
                    "terminating": endpoint.terminating,
                },
                "hostname": replica.pod,
                "targetRef": {"kind": "Pod", "name": replica.pod, "namespace": replica.namespace},
            }
        ],
        "ports": [
            {"name": "data", "port": endpoint.data_port, "protocol": "TCP"},
            {"name": "admin", "port": endpoint.admin_port, "protocol": "TCP"},
            {"name": "metrics", "port": endpoint.metrics_port, "protocol": "TCP"},
        ],
    }


def from_slice(manifest: dict[str, Any]) -> list[Endpoint]:
    """The replicas in one EndpointSlice; [] for slices that are not a pool's. Raises InvalidName on a malformed one.

    A pod that is none of the pool's is passed over. A Service chooses by labels, which are anybody's to give; one such
    pod must not make the others unreadable.
    """
    try:
        metadata = manifest["metadata"]
        pool = (metadata.get("labels") or {}).get(LABEL_POOL)
        if pool is None:
            return []
        ports = {port["name"]: int(port["port"]) for port in manifest.get("ports") or []}
        told = {**(metadata.get("labels") or {}), **(metadata.get("annotations") or {})}
        epoch = int(told.get(ANNOTATION_EPOCH, "1"))
        owner = PoolRef(metadata["namespace"], pool)
        if not is_name(owner.namespace):
            raise ValueError(f"{owner.namespace!r} is no namespace")
        listed = [(raw, _ordinal(owner, raw)) for raw in manifest.get("endpoints") or []]
        return [_endpoint(ReplicaId(*owner, nth), ports, epoch, raw) for raw, nth in listed if nth is not None]
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise InvalidName(f"malformed EndpointSlice: {error!r}") from error


def _ordinal(owner: PoolRef, raw: dict[str, Any]) -> int | None:
    """Of the pool's replica, None where the endpoint is something else."""
    name, _, ordinal = str((raw.get("targetRef") or {}).get("name", "")).rpartition("-")
    return int(ordinal) if name == owner.name and re.fullmatch("0|[1-9][0-9]{0,5}", ordinal) else None


def _endpoint(replica: ReplicaId, ports: dict[str, int], epoch: int, raw: dict[str, Any]) -> Endpoint:
    conditions = raw.get("conditions") or {}
    return Endpoint(
        replica=replica,
        address=raw["addresses"][0],
        data_port=ports["data"],
        admin_port=ports["admin"],
        metrics_port=ports["metrics"],
        ready=bool(conditions.get("ready")),
        terminating=bool(conditions.get("terminating")),
        epoch=epoch,
    )
