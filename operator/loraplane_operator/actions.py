"""What the operator may do: values that can be compared, so that the executor knows the action that
failed, or is under way, when a later plan holds it again. `why` is for people and never compared.

Actions of one `lane` exclude each other; different lanes run side by side.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from loraplane_core.identity import AdapterId, PoolRef, ReplicaId
from loraplane_core.wire.registry import Activate, ClaimRequest, PoolReport, RegisterSource, SetTraffic, Warmed


@dataclass(frozen=True, slots=True, order=True)
class ObjectRef:
    kind: str
    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.kind}/{self.namespace}/{self.name}"


@dataclass(frozen=True, slots=True)
class WorkloadSpec:
    """A pool's engines as the cluster shall run them; credentials are added when it is executed."""

    pool: PoolRef
    uid: str
    replicas: int
    engine: tuple[tuple[str, str], ...]
    epoch: int  # of credentials: what its engines are started with; they accept the one before, too
    revision: str  # a hash of all above that a running engine would have to be replaced for
    image: str = ""  # "": the site's
    resources: tuple[tuple[str, str, str], ...] = ()  # (limits or requests, resource, quantity)
    pod_template: str = ""  # a merge patch for the pods, as JSON; only Kubernetes knows pods
    accepted_epoch: int = 1  # what all its engines accept now, for who speaks to them; no part of the revision


@dataclass(frozen=True, slots=True)
class ApplyWorkload:
    """`notes` are emitted once it is done."""

    spec: WorkloadSpec
    why: str = field(compare=False)
    notes: tuple["Note", ...] = field(default=(), compare=False)

    @property
    def lane(self) -> str:
        return f"workload/{self.spec.pool}"


@dataclass(frozen=True, slots=True)
class RestartReplica:
    """Bring one replica to the workload's revision. Applies the workload first, so it starts as wished."""

    spec: WorkloadSpec
    ordinal: int
    why: str = field(compare=False)
    notes: tuple["Note", ...] = field(default=(), compare=False)

    @property
    def lane(self) -> str:
        return f"workload/{self.spec.pool}"


@dataclass(frozen=True, slots=True)
class DeleteWorkload:
    pool: PoolRef
    why: str = field(compare=False)

    @property
    def lane(self) -> str:
        return f"workload/{self.pool}"


@dataclass(frozen=True)
class ReportPool:
    pool: PoolRef
    report: PoolReport
    why: str = field(compare=False)

    @property
    def lane(self) -> str:
        return f"report/{self.pool}"

    def __hash__(self) -> int:  # the report holds dicts
        return hash(self.pool)


@dataclass(frozen=True, slots=True)
class RemoveReport:
    pool: PoolRef
    why: str = field(compare=False)

    @property
    def lane(self) -> str:
        return f"report/{self.pool}"


@dataclass(frozen=True, slots=True)
class ClaimAdapter:
    uid: str
    request: ClaimRequest
    why: str = field(compare=False)

    @property
    def lane(self) -> str:
        return f"object/{self.uid}"

    @property
    def tenant(self) -> str:
        return self.request.tenant


@dataclass(frozen=True)
class Register:
    uid: str
    tenant: str
    request: RegisterSource
    why: str = field(compare=False)

    @property
    def lane(self) -> str:
        return f"object/{self.uid}"

    def __hash__(self) -> int:
        return hash((self.uid, self.request.source_hash))


@dataclass(frozen=True, slots=True)
class ActivateVersion:
    uid: str
    tenant: str
    request: Activate
    why: str = field(compare=False)

    @property
    def lane(self) -> str:
        return f"object/{self.uid}"


@dataclass(frozen=True)
class SplitTraffic:
    """Move an adapter's weights, all in one transaction."""

    uid: str
    tenant: str
    request: SetTraffic
    why: str = field(compare=False)

    @property
    def lane(self) -> str:
        return f"object/{self.uid}"

    def __hash__(self) -> int:  # the shares are a list
        return hash((self.uid, *self.request.shares))


@dataclass(frozen=True, slots=True)
class ConfirmWarm:
    """Tell the registry that a version which shall become active once warm is warm."""

    tenant: str
    adapter: str
    request: Warmed
    why: str = field(compare=False)

    @property
    def lane(self) -> str:
        return f"object/{self.tenant}/{self.adapter}"


@dataclass(frozen=True, slots=True)
class ReleaseClaim:
    uid: str
    versions: Literal["retain", "delete"]
    why: str = field(compare=False)

    @property
    def lane(self) -> str:
        return f"object/{self.uid}"


@dataclass(frozen=True, slots=True)
class Warm:
    """PUT: hold this version at host or device, with the operator's mark."""

    replica: ReplicaId
    boot: str
    id: AdapterId
    bytes: int
    rank: int
    pinned: bool
    drift: bool = field(compare=False)  # it was warm before
    why: str = field(compare=False)

    @property
    def lane(self) -> str:
        return f"engine/{self.replica}/{self.boot}/{self.id.ref}"


@dataclass(frozen=True, slots=True)
class Mark:
    """Change the operator's marks on a version that stays where it is."""

    replica: ReplicaId
    boot: str
    id: AdapterId
    pinned: bool
    warm: bool
    why: str = field(compare=False)

    @property
    def lane(self) -> str:
        return f"engine/{self.replica}/{self.boot}/{self.id.ref}"


@dataclass(frozen=True, slots=True)
class Withdraw:
    """DELETE: tombstone, drain at most `drain_s`, free."""

    replica: ReplicaId
    boot: str
    id: AdapterId
    drain_s: float
    why: str = field(compare=False)

    @property
    def lane(self) -> str:
        return f"engine/{self.replica}/{self.boot}/{self.id.ref}"


@dataclass(frozen=True, slots=True)
class Note:
    """An Event on an object."""

    ref: ObjectRef
    uid: str
    kind: Literal["Normal", "Warning"]
    reason: str
    message: str


@dataclass(frozen=True)
class SetStatus:
    """Replace an object's status; the notes tell what changed and are emitted after it was written.
    One that is `passing` is written only if it still holds after a moment."""

    ref: ObjectRef
    uid: str
    status: Mapping[str, Any]
    notes: tuple[Note, ...] = field(default=(), compare=False)
    passing: bool = field(default=False, compare=False)
    why: str = field(default="", compare=False)

    @property
    def lane(self) -> str:
        return f"status/{self.uid}"

    def __hash__(self) -> int:
        return hash((self.ref, self.uid))


@dataclass(frozen=True, slots=True)
class SetFinalizer:
    ref: ObjectRef
    uid: str
    present: bool
    why: str = field(compare=False)
    notes: tuple[Note, ...] = field(default=(), compare=False)

    @property
    def lane(self) -> str:
        return f"object/{self.uid}"


Action = (
    ApplyWorkload
    | RestartReplica
    | DeleteWorkload
    | ReportPool
    | RemoveReport
    | ClaimAdapter
    | Register
    | ActivateVersion
    | SplitTraffic
    | ConfirmWarm
    | ReleaseClaim
    | Warm
    | Mark
    | Withdraw
    | SetStatus
    | SetFinalizer
)
