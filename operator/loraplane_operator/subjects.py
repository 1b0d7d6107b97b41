"""Which object an action is about, as log fields. Actions name what they act on: a uid, a tenant's adapter, a
pool, a replica; a person looks for the object.
"""

from collections.abc import Iterable
from dataclasses import fields

from loraplane_core.identity import AdapterId, PoolRef
from loraplane_core.labels import POOL_KIND
from loraplane_operator.actions import Action, ApplyWorkload, ConfirmWarm, ObjectRef, RestartReplica
from loraplane_operator.words import AdapterKey, AdapterObject, PoolObject

_TOLD = {"ref": "object", "uid": "uid", "tenant": "tenant", "pool": "pool", "replica": "replica", "id": "adapter"}


class Subjects:
    """Knows the objects of the last pass; an action whose object is gone is told without one."""

    def __init__(self) -> None:
        self._by_uid: dict[str, ObjectRef] = {}
        self._by_key: dict[AdapterKey, ObjectRef] = {}

    def learn(self, pools: Iterable[PoolObject], adapters: Iterable[AdapterObject]) -> None:
        """The oldest of several objects for one adapter is the one that has it."""
        oldest_last = sorted(adapters, key=lambda each: each.meta.created_at, reverse=True)
        self._by_key = {each.key: each.meta.ref for each in oldest_last}
        metas = [each.meta for each in oldest_last] + [each.meta for each in pools]
        self._by_uid = {meta.uid: meta.ref for meta in metas}

    def of(self, action: Action) -> dict[str, str]:
        """With `object` (KIND/NAMESPACE/NAME) where it is known."""
        named = {each.name: getattr(action, each.name) for each in fields(action) if each.name in _TOLD}
        if isinstance(action, ApplyWorkload | RestartReplica):
            named["pool"] = action.spec.pool
        if "ref" not in named and (ref := self._object(action, named)) is not None:
            named["ref"] = ref
        return {_TOLD[name]: str(value) for name, value in named.items()}

    def _object(self, action: Action, named: dict[str, object]) -> ObjectRef | None:
        match named:
            case {"uid": str(uid)}:
                return self._by_uid.get(uid)
            case {"id": AdapterId(tenant=tenant, adapter=adapter)}:
                return self._by_key.get((tenant, adapter))
            case {"pool": PoolRef(namespace=namespace, name=name)}:
                return ObjectRef(POOL_KIND, namespace, name)
        return self._by_key.get((action.tenant, action.adapter)) if isinstance(action, ConfirmWarm) else None
