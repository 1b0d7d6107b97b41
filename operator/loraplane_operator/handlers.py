"""kopf's part: it watches and delivers. The only module that imports kopf.

Only raw events are handled, no create/update/delete handlers: those would make kopf keep a finalizer
and annotations of its own in every object, next to the ones the reconciler owns. The first listing
arrives as events too, so resuming after a restart needs nothing more.
"""

import asyncio
import threading
from collections.abc import Callable, Iterable
from typing import Any

import kopf

from loraplane_core.labels import GROUP, LABEL_POOL, VERSION
from loraplane_operator.cluster.kubernetes import ADAPTER, POD, POOL, STATEFUL_SET, KubernetesCluster

Deliver = Callable[[str, dict[str, Any], bool], None]  # kind, object, deleted


def register(registry: kopf.OperatorRegistry, deliver: Deliver) -> None:
    """Add the handlers of one operator; several may live in one process, each with its registry."""

    @kopf.on.event(GROUP, VERSION, POOL.plural, registry=registry)
    async def pool_changed(type: str | None, body: kopf.Body, **_: Any) -> None:
        deliver(POOL.name, dict(body), type == "DELETED")

    @kopf.on.event(GROUP, VERSION, ADAPTER.plural, registry=registry)
    async def adapter_changed(type: str | None, body: kopf.Body, **_: Any) -> None:
        deliver(ADAPTER.name, dict(body), type == "DELETED")

    @kopf.on.event("apps", "v1", STATEFUL_SET.plural, labels={LABEL_POOL: kopf.PRESENT}, registry=registry)
    async def workload_changed(type: str | None, body: kopf.Body, **_: Any) -> None:
        deliver(STATEFUL_SET.name, dict(body), type == "DELETED")

    @kopf.on.event("v1", POD.plural, labels={LABEL_POOL: kopf.PRESENT}, registry=registry)
    async def pod_changed(type: str | None, body: kopf.Body, **_: Any) -> None:
        deliver(POD.name, dict(body), type == "DELETED")


async def watch(
    cluster: KubernetesCluster,
    namespaces: Iterable[str],
    stop: threading.Event,
    registry: kopf.OperatorRegistry | None = None,
) -> None:
    """Run kopf until `stop` is set; events reach `cluster` in the caller's loop.

    kopf gets a thread and a loop of its own: in ours it would take over the signals, and on its way out
    wait for every task that it does not know, and cancel it. The default registry knows how to log in by
    service account or kubeconfig.
    """
    loop = asyncio.get_running_loop()
    chosen = registry or kopf.get_default_registry()

    def deliver(kind: str, raw: dict[str, Any], deleted: bool) -> None:
        loop.call_soon_threadsafe(cluster.seen, kind, raw, deleted)

    register(chosen, deliver)
    await asyncio.to_thread(_run, chosen, tuple(namespaces), stop)


def _run(registry: kopf.OperatorRegistry, namespaces: tuple[str, ...], stop: threading.Event) -> None:
    settings = kopf.OperatorSettings()
    settings.posting.enabled = False  # Events are the reconciler's
    settings.scanning.disabled = True  # namespaces are named, CRDs are installed: no cluster-wide rights needed
    asyncio.run(
        kopf.operator(registry=registry, settings=settings, standalone=True, namespaces=namespaces, stop_flag=stop)
    )
