"""Replicas as StatefulSets and their pods tell them. Pure functions over manifests."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from loraplane_core.identity import PoolRef, ReplicaId
from loraplane_core.labels import ANNOTATION_EPOCH, LABEL_POOL
from loraplane_operator.cluster import manifests
from loraplane_operator.words import Replica

#: A container that waits for these is simply starting.
_USUAL = frozenset({"ContainerCreating", "PodInitializing"})
LAST_LINE_MAX = 300


@dataclass(frozen=True, slots=True)
class SetView:
    pool: PoolRef
    uid: str
    replicas: int
    epoch: int = 1  # of the credentials that its pods start with


@dataclass(frozen=True, slots=True)
class PodView:
    set_uid: str  # of the StatefulSet that controls it, "" where none does
    replica: Replica


def set_view(raw: Mapping[str, Any]) -> SetView | None:
    """None for one that is not a pool's: a label and a name are anybody's to give, an owner is not by accident."""
    metadata = raw["metadata"]
    pool = PoolRef(metadata["namespace"], metadata["name"])
    if (metadata.get("labels") or {}).get(LABEL_POOL) != pool.name:
        return None
    if not manifests.is_pools(metadata, pool.name):
        return None
    spec = raw.get("spec") or {}
    template = (spec.get("template") or {}).get("metadata") or {}
    return SetView(pool, metadata.get("uid", ""), int(spec.get("replicas", 1)), _epoch(template))


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
    return PodView(
        set_uid=_controller(metadata),
        replica=Replica(
            id=ReplicaId(metadata["namespace"], pool, int(ordinal)),
            ready=conditions.get("Ready", {}).get("status") == "True" and not terminating,
            running=status.get("phase") == "Running",
            terminating=terminating,
            epoch=_epoch(metadata),
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
        yield found.get((owner.uid, id_)) or Replica(id_, ready=False, running=False, revision="", epoch=owner.epoch)


def _epoch(metadata: Mapping[str, Any]) -> int:
    """Of a pod, or of a template for pods. Anybody may have written it: not every text of digits is a number."""
    text = (metadata.get("annotations") or {}).get(ANNOTATION_EPOCH, "")
    return int(text) if re.fullmatch("[1-9][0-9]{0,8}", text) else 1


def _controller(metadata: Mapping[str, Any]) -> str:
    for owner in metadata.get("ownerReferences") or []:
        if owner.get("controller") and owner.get("kind") == "StatefulSet":
            return str(owner.get("uid", ""))
    return ""


def _trouble(conditions: Mapping[str, Mapping[str, Any]], containers: Iterable[Mapping[str, Any]]) -> str:
    """Why a pod does not run, when that is not simply its start."""
    started_again = ""
    for each in containers:
        state = each.get("state") or {}
        waiting = state.get("waiting") or {}
        if waiting.get("reason", "ContainerCreating") not in _USUAL:
            return _told(waiting["reason"], waiting.get("message", ""), each.get("lastState") or {})
        ended = state.get("terminated") or {}
        if ended.get("exitCode"):
            return f"{ended.get('reason') or 'Error'}: {_ending(ended)}"
        before = (each.get("lastState") or {}).get("terminated") or {}
        if before.get("exitCode") and not each.get("ready"):  # between two crashes it is no healthy one
            started_again = f"started again after {before.get('reason') or 'Error'}: {_ending(before)}"
    scheduled = conditions.get("PodScheduled", {})
    if scheduled.get("status") == "False":
        return f"{scheduled.get('reason') or 'Unschedulable'}: {scheduled.get('message', '')}"
    return started_again


def _told(reason: str, message: str, last: Mapping[str, Any]) -> str:
    """A crash loop alone says nothing: how the container ended before does."""
    ended = last.get("terminated") or {}
    told = f"{reason}: {message}" if message else reason
    if ended:
        told += f" (last: {ended.get('reason') or 'Error'}, {_ending(ended)})"
    return told


def _ending(ended: Mapping[str, Any]) -> str:
    """With the last line of what it wrote, by which an engine says what it lacks."""
    lines = str(ended.get("message") or "").strip().splitlines()
    return f"exit code {ended.get('exitCode', '?')}" + (f", {lines[-1][:LAST_LINE_MAX]}" if lines else "")
