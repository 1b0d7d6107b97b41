"""kopf's part: it watches and wakes. The only module that imports kopf.

Only raw events are handled, no create/update/delete handlers: those would make kopf keep a finalizer
and annotations of its own in every object, next to the ones the reconciler owns. The first listing
arrives as events too, so resuming after a restart needs nothing more.
"""

import asyncio
from collections.abc import Iterable
from typing import Any

import kopf

from loraplane_core.labels import GROUP, LABEL_POOL, VERSION
from loraplane_operator.cluster.kubernetes import ADAPTER, POD, POOL, STATEFUL_SET, KubernetesCluster


def register(registry: kopf.OperatorRegistry, cluster: KubernetesCluster) -> None:
    """Add the handlers of one operator; several may live in one process, each with its registry."""

    @kopf.on.event(GROUP, VERSION, POOL.plural, registry=registry)
    async def pool_changed(type: str | None, body: kopf.Body, **_: Any) -> None:
        cluster.seen(POOL.name, dict(body), deleted=type == "DELETED")

    @kopf.on.event(GROUP, VERSION, ADAPTER.plural, registry=registry)
    async def adapter_changed(type: str | None, body: kopf.Body, **_: Any) -> None:
        cluster.seen(ADAPTER.name, dict(body), deleted=type == "DELETED")

    @kopf.on.event("apps", "v1", STATEFUL_SET.plural, labels={LABEL_POOL: kopf.PRESENT}, registry=registry)
    async def workload_changed(type: str | None, body: kopf.Body, **_: Any) -> None:
        cluster.seen(STATEFUL_SET.name, dict(body), deleted=type == "DELETED")

    @kopf.on.event("v1", POD.plural, labels={LABEL_POOL: kopf.PRESENT}, registry=registry)
    async def pod_changed(type: str | None, body: kopf.Body, **_: Any) -> None:
        cluster.seen(POD.name, dict(body), deleted=type == "DELETED")


async def watch(cluster: KubernetesCluster, namespaces: Iterable[str], stop: asyncio.Event) -> None:
    """Run kopf until `stop` is set. One operator per release runs; two at once do no harm (design §8)."""
    registry = kopf.get_default_registry()  # knows how to log in by service account or kubeconfig
    register(registry, cluster)
    await kopf.operator(
        registry=registry, settings=settings(), standalone=True, namespaces=list(namespaces), stop_flag=stop
    )


def settings() -> kopf.OperatorSettings:
    made = kopf.OperatorSettings()
    made.posting.enabled = False  # Events are the reconciler's
    made.scanning.disabled = True  # namespaces are named, CRDs are installed: no cluster-wide rights needed
    made.queueing.idle_timeout = made.queueing.exit_timeout = 0.5  # handlers return at once: stop at once
    return made
