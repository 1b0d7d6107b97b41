"""What the operator asks of the local supervisor, over its unix socket: newline-delimited JSON, one
request and one answer per line. It plays the StatefulSet controller and the kubelet of one machine.

The supervisor keeps `replicas` engine processes of each workload running, restarts one that dies, and
writes one EndpointSlice-shaped JSON file per replica. It survives the operator and the other way round.
"""

from typing import Any

import msgspec


class EngineCredentials(msgspec.Struct, kw_only=True, frozen=True):
    """The content of an engine's credentials file (0600): accepted tokens, and its own for fetching."""

    epoch: int
    data: list[str]
    state: list[str]
    admin: list[str]
    fetch: str


class Workload(msgspec.Struct, kw_only=True, frozen=True):
    """One pool's engines. `engine` holds loraplane-engine's long options without dashes ("max-model-len": "1024")."""

    namespace: str
    pool: str
    replicas: int
    engine: dict[str, str]
    credentials: EngineCredentials
    revision: str  # hash of all that makes a restart necessary


class ReplicaStatus(msgspec.Struct, kw_only=True, frozen=True):
    ordinal: int
    pid: int  # 0 while it is not running
    ready: bool
    restarts: int
    revision: str
    data_port: int = 0
    admin_port: int = 0
    metrics_port: int = 0
    message: str = ""  # why it does not run
    address: str = "127.0.0.1"
    terminating: bool = False
    epoch: int = 1  # of the credentials it was started with


class WorkloadStatus(msgspec.Struct, kw_only=True, frozen=True):
    namespace: str
    pool: str
    replicas: list[ReplicaStatus]


class ApplyWorkload(msgspec.Struct, kw_only=True, frozen=True, tag="apply"):
    workload: Workload


class DeleteWorkload(msgspec.Struct, kw_only=True, frozen=True, tag="delete"):
    namespace: str
    pool: str


class RestartReplica(msgspec.Struct, kw_only=True, frozen=True, tag="restart"):
    """Replace one replica's process (OnDelete: the supervisor never does so because of a new revision)."""

    namespace: str
    pool: str
    ordinal: int


class ListWorkloads(msgspec.Struct, kw_only=True, frozen=True, tag="list"):
    pass


SupervisorRequest = ApplyWorkload | DeleteWorkload | RestartReplica | ListWorkloads


class SupervisorAnswer(msgspec.Struct, kw_only=True, frozen=True):
    ok: bool
    error: dict[str, Any] | None = None  # an error object of core.errors
    workloads: list[WorkloadStatus] = []
