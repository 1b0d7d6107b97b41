"""What the reconciler needs from the cluster it runs in: Kubernetes, or the supervisor of one machine.

Every method has a deadline of its own and raises a LoraplaneError when the cluster does not answer.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from loraplane_core.identity import PoolRef
from loraplane_core.wire.supervisor import EngineCredentials
from loraplane_operator.actions import Note, ObjectRef, WorkloadSpec
from loraplane_operator.words import AdapterObject, BaseLocation, PoolObject, Replica


@dataclass(frozen=True)
class Observation:
    """A complete view: an object that is not in it does not exist. `workloads` is None while unknown."""

    pools: Mapping[PoolRef, PoolObject]
    adapters: tuple[AdapterObject, ...]
    bases: Mapping[PoolRef, BaseLocation]
    workloads: Mapping[PoolRef, tuple[Replica, ...]] | None
    namespaces: frozenset[str] | None = None  # None = all
    #: Objects that exist, by uid, and cannot be read: nothing of theirs may be taken for an orphan.
    unreadable: Mapping[ObjectRef, str] = field(default_factory=dict)
    pool_namespaces: frozenset[str] | None = None  # those of them where pools are honoured; None = all
    suspects: frozenset[PoolRef] = frozenset()  # pools of whose workload somebody else may have changed a part


class Cluster(Protocol):
    def subscribe(self, wake: Callable[[], None], returned: Callable[[], None] = lambda: None) -> None:
        """`wake` is called whenever observe() would return something else, `returned` when the cluster answers
        again after it did not."""

    async def run(self) -> None:
        """Watch until cancelled. The view may be observed before and while it runs."""

    async def observe(self) -> Observation | None:
        """None until the first complete view."""

    async def apply(self, spec: WorkloadSpec, credentials: EngineCredentials) -> None:
        """Create or change a pool's engines; never restarts a running one."""

    async def restart(self, pool: PoolRef, ordinal: int) -> None:
        """Replace one engine by one of the applied revision; one that has been replaced already stays."""

    async def delete(self, pool: PoolRef) -> None:
        """Stop a pool's engines for good; one that does not exist is deleted."""

    async def patch_status(self, ref: ObjectRef, uid: str, status: Mapping[str, Any]) -> None:
        """Replace the status; nothing happens when the object is gone or is another one of that name."""

    async def set_finalizer(self, ref: ObjectRef, uid: str, present: bool) -> None: ...

    async def emit(self, note: Note) -> None:
        """An Event. Never raises: an Event that cannot be written is logged."""
