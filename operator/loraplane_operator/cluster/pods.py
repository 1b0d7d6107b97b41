"""Replicas as StatefulSets and their pods tell them. Pure functions over manifests."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from loraplane_core.identity import PoolRef, ReplicaId
from loraplane_core.labels import ANNOTATION_EPOCH, LABEL_POOL
from loraplane_operator.cluster import manifests
from loraplane_operator.words import Replica

#: A container that waits for these is simply starting.
_USUAL = frozenset({"ContainerCreating", "PodInitializing"})


@dataclass(frozen=True, slots=True)
class SetView:
    pool: PoolRef
    uid: str
    replicas: int


@dataclass(frozen=True, slots=True)
class PodView:
    set_uid: str  # of the StatefulSet that controls it, "" where none does
    replica: Replica


def set_view(raw: Mapping[str, Any]) -> SetView | None:
    """None for one that is not a pool's."""
    metadata = raw["metadata"]
    pool = PoolRef(metadata["namespace"], metadata["name"])
    if (metadata.get("labels") or {}).get(LABEL_POOL) != pool.name:
        return None
    return SetView(pool, metadata.get("uid", ""), int((raw.get("spec") or {}).get("replicas", 1)))


def pod_view(raw: Mapping[str, Any], site_revision: str) -> PodView | None:
    metadata, status = raw["metadata"], raw.get("status") or {}
    pool = (metadata.get("labels") or {}).get(LABEL_POOL, "")
    ordinal = metadata["name"].removeprefix(f"{pool}-")
    if not pool or not ordinal.isdecimal():
        return None
    conditions = {each["type"]: each for each in status.get("conditions") or []}
    terminating = "deletionTimestamp" in metadata
    containers = status.get("containerStatuses") or []
    annotations = metadata.get("annotations") or {}
    epoch = annotations.get(ANNOTATION_EPOCH, "1")
    return PodView(
        set_uid=_controller(metadata),
        replica=Replica(
            id=ReplicaId(metadata["namespace"], pool, int(ordinal)),
            ready=conditions.get("Ready", {}).get("status") == "True" and not terminating,
            running=status.get("phase") == "Running",
            terminating=terminating,
            epoch=int(epoch) if epoch.isdecimal() else 1,
            revision=manifests.wished_revision(annotations.get(manifests.ANNOTATION_REVISION, ""), site_revision),
            address=status.get("podIP") or "",
            admin_port=manifests.PORTS["admin"],
            restarts=sum(each.get("restartCount", 0) for each in containers),
            message=_trouble(conditions, [*(status.get("initContainerStatuses") or []), *containers]),
        ),
    )


def workloads(sets: Iterable[SetView], pods: Iterable[PodView]) -> dict[PoolRef, tuple[Replica, ...]]:
    """One replica per wished ordinal, also where the pod is still to come; what is scaled away is none any more.

    Only pods that their own StatefulSet controls count: a label and a name are anybody's to give.
    """
    found = {(pod.set_uid, pod.replica.id): pod.replica for pod in pods}
    return {each.pool: tuple(_replicas(each, found)) for each in sets}


def _replicas(owner: SetView, found: Mapping[tuple[str, ReplicaId], Replica]) -> Iterable[Replica]:
    for ordinal in range(owner.replicas):
        id_ = ReplicaId(*owner.pool, ordinal)
        yield found.get((owner.uid, id_)) or Replica(id_, ready=False, running=False, revision="")


def _controller(metadata: Mapping[str, Any]) -> str:
    for owner in metadata.get("ownerReferences") or []:
        if owner.get("controller") and owner.get("kind") == "StatefulSet":
            return str(owner.get("uid", ""))
    return ""


def _trouble(conditions: Mapping[str, Mapping[str, Any]], containers: Iterable[Mapping[str, Any]]) -> str:
    """Why a pod does not run, when that is not simply its start."""
    for each in containers:
        state = each.get("state") or {}
        waiting = state.get("waiting") or {}
        if waiting.get("reason", "ContainerCreating") not in _USUAL:
            return _told(waiting["reason"], waiting.get("message", ""), each.get("lastState") or {})
        ended = state.get("terminated") or {}
        if ended.get("exitCode"):
            return f"{ended.get('reason') or 'Error'}: exit code {ended['exitCode']}"
    scheduled = conditions.get("PodScheduled", {})
    if scheduled.get("status") == "False":
        return f"{scheduled.get('reason') or 'Unschedulable'}: {scheduled.get('message', '')}"
    return ""


def _told(reason: str, message: str, last: Mapping[str, Any]) -> str:
    """A crash loop alone says nothing: how the container ended before does."""
    ended = last.get("terminated") or {}
    told = f"{reason}: {message}" if message else reason
    if ended:
        told += f" (last: {ended.get('reason') or 'Error'}, exit code {ended.get('exitCode', '?')})"
    return told
