"""kopf's part: it watches and delivers. The only module that imports kopf.

Only raw events are handled, no create/update/delete handlers: those would make kopf keep a finalizer
and annotations of its own in every object, next to the ones the reconciler owns. The first listing
arrives as events too, so resuming after a restart needs nothing more.
"""

import asyncio
import itertools
import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import kopf

from loraplane_operator.backoff import Backoff
from loraplane_operator.cluster.kinds import KINDS, Kind
from loraplane_operator.cluster.kubernetes import KubernetesCluster

log = logging.getLogger(__name__)

Deliver = Callable[[str, dict[str, Any], bool, bool], None]  # kind, object, deleted, listed

_RESTART = Backoff(first=0.5, cap=5.0)
_CONNECT_SECONDS = 5.0
#: A watch asks again after this; a silent one is given up a little later than the server's bookmarks come.
_WATCH_SECONDS = 600  # whole: it is sent to the API server as it is
_SILENT_SECONDS = 70.0
_STOP_POLL_SECONDS = 0.2
#: A TLS connection that was closed is gone a few turns of the loop later, and this loop ends with kopf.
_TLS_CLOSE_SECONDS = 0.1


class _Retries:
    """How long kopf waits between tries of a request: without end, so that an API server that is away, or has
    not yet read its own rules when it comes back, ends no watch.
    """

    _backoff = Backoff(first=0.2, cap=2.0)

    def __iter__(self) -> Iterator[float]:
        return (self._backoff.delay(attempt) for attempt in itertools.count(1))


def register(registry: kopf.OperatorRegistry, deliver: Deliver) -> None:
    """Add the handlers of one operator; several may live in one process, each with its registry."""
    for kind in KINDS.values():
        _register(registry, kind, deliver)


def _register(registry: kopf.OperatorRegistry, kind: Kind, deliver: Deliver) -> None:
    @kopf.on.event(kind.group, kind.version, kind.plural, id=f"{kind.plural}_changed", registry=registry)
    async def changed(type: str | None, body: kopf.Body, **_: Any) -> None:
        deliver(kind.name, dict(body), type == "DELETED", type is None)


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

    def deliver(kind: str, raw: dict[str, Any], deleted: bool, listed: bool) -> None:
        loop.call_soon_threadsafe(cluster.seen, kind, raw, deleted, listed)

    register(chosen, deliver)
    logging.getLogger("kopf.objects").setLevel(logging.WARNING)  # else a line, and a long one, for every event
    await asyncio.to_thread(_run, chosen, tuple(namespaces), stop)


def _run(registry: kopf.OperatorRegistry, namespaces: tuple[str, ...], stop: threading.Event) -> None:
    """kopf gives up on some errors of a watch that pass by themselves; then it begins anew, with a list."""
    for attempt in itertools.count(1):
        try:
            asyncio.run(_kopf(registry, namespaces, stop))
        except Exception:
            log.exception("watching broke; starting it again")
        if stop.wait(_RESTART.delay(attempt)):
            return


async def _kopf(registry: kopf.OperatorRegistry, namespaces: tuple[str, ...], stop: threading.Event) -> None:
    """Not given `stop` itself: kopf would wait for it in a thread, and not end before it, whatever happened."""
    flag = asyncio.Event()

    async def follow() -> None:
        while not stop.is_set():  # noqa: ASYNC110 - set by another thread
            await asyncio.sleep(_STOP_POLL_SECONDS)
        flag.set()

    following = asyncio.create_task(follow())
    try:
        await kopf.operator(
            registry=registry, settings=_settings(), standalone=True, namespaces=namespaces, stop_flag=flag
        )
    finally:
        following.cancel()
        await asyncio.sleep(_TLS_CLOSE_SECONDS)


def _settings() -> kopf.OperatorSettings:
    settings = kopf.OperatorSettings()
    settings.posting.enabled = False  # Events are the reconciler's
    settings.scanning.disabled = True  # namespaces are named, CRDs are installed: no cluster-wide rights needed
    settings.networking.connect_timeout = _CONNECT_SECONDS
    settings.networking.error_backoffs = _Retries()
    settings.watching.connect_timeout = _CONNECT_SECONDS
    settings.watching.server_timeout = _WATCH_SECONDS
    settings.watching.inactivity_timeout = _SILENT_SECONDS
    for kind in KINDS.values():
        if kind.selector:  # by the server: nobody else's pods are sent, and one that loses its label is told as gone
            settings.watching.label_selectors[kind.group, kind.version, kind.plural] = kind.selector
    return settings
