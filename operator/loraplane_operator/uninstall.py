"""What must happen before a release goes: `python -m loraplane_operator.uninstall`, the chart's pre-delete hook, and
the last that an operator does whose own namespace is being deleted.

The operator is stopped first, for it would put its finalizer back. Then engines end, pools and adapters, which stay,
say that nobody serves them any more, and finalizers come off, so that they can be deleted with nobody there to let them
go. Claims that they hold are released by the next installation, which finds that their objects are gone.
"""

import argparse
import asyncio
import logging
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from loraplane_core.errors import Conflict, Forbidden, InvalidRequest, LoraplaneError, NotFound, Unavailable
from loraplane_core.labels import API_VERSION, FINALIZER, LABEL_POOL
from loraplane_operator import logs
from loraplane_operator.cluster.kinds import ADAPTER, POOL, STATEFUL_SET, Kind
from loraplane_operator.cluster.manifests import may_take, secret_name
from loraplane_operator.cluster.ownership import owned_status
from loraplane_operator.plan.last_words import last_words

log = logging.getLogger(__name__)
POLL_SECONDS = 0.5
#: Within the pod's grace period, of which the reconciler's own end takes some.
LEAVE_SECONDS = 10.0
#: Taken off again at once, or by the next pass; more passes than this, and somebody else puts it there.
_PASSES = 20
#: A namespace that is refused for so long is gone, or going, with its Role.
REFUSED_SECONDS = 5.0
#: Phases of pods that have ended, such as one that was evicted: it stays as long as its Deployment does.
_ENDED = ("Succeeded", "Failed")


class Api(Protocol):
    """What of the Kubernetes API is used here; KubeApi has it."""

    async def get(self, path: str) -> dict[str, Any]: ...

    async def list_items(self, path: str, **query: str) -> tuple[list[dict[str, Any]], str]: ...

    async def merge(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]: ...

    async def change(self, path: str, *operations: Mapping[str, Any]) -> dict[str, Any]: ...

    async def apply(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]: ...

    async def delete(self, path: str, uid: str = "") -> None: ...


@dataclass(frozen=True)
class Options:
    namespaces: tuple[str, ...]  # where adapters and pools may be
    pool_namespaces: tuple[str, ...]  # where engines may be, some of these
    operator: str  # NAMESPACE/NAME of its Deployment
    operator_selector: str  # of its pods
    deadline: float  # seconds, for all of it


def parse(arguments: Sequence[str]) -> Options:
    parser = argparse.ArgumentParser(prog="python -m loraplane_operator.uninstall", description=__doc__)
    parser.add_argument("--namespace", action="append", required=True, dest="namespaces", help="may be repeated")
    parser.add_argument("--pool-namespace", action="append", default=[], dest="pool_namespaces", help="default: all")
    parser.add_argument("--operator", required=True, help="NAMESPACE/NAME of its Deployment")
    parser.add_argument("--operator-selector", required=True, help="label selector of its pods")
    parser.add_argument("--deadline", type=float, default=120.0, help="seconds")
    values = vars(parser.parse_args(arguments))
    if values["operator"].count("/") != 1:
        parser.error("--operator reads NAMESPACE/NAME")
    values["namespaces"] = tuple(values["namespaces"])
    values["pool_namespaces"] = tuple(values["pool_namespaces"]) or values["namespaces"]
    return Options(**values)


async def uninstall(api: Api, options: Options) -> None:
    """Raises TimeoutError past the deadline, LoraplaneError when the API server refuses for good."""
    async with asyncio.timeout(options.deadline):
        await _stop_operator(api, options)
        await _free_all(api, options)


async def _stop_operator(api: Api, options: Options) -> None:
    namespace, _, name = options.operator.partition("/")
    deployment = f"/apis/apps/v1/namespaces/{namespace}/deployments/{name}"
    try:
        await api.merge(deployment, {"spec": {"replicas": 0}})
    except NotFound:
        log.info("there is no operator", extra={"operator": options.operator})
    told: list[str] = []
    while running := await _pods(api, namespace, options.operator_selector):
        if running != told:
            log.info("waiting for the operator's pods to end", extra={"namespace": namespace, "pods": running})
            told = running
        await asyncio.sleep(POLL_SECONDS)
    log.info("the operator has stopped", extra={"operator": options.operator})


async def _pods(api: Api, namespace: str, selector: str) -> list[str]:
    """Those that have not ended, by name."""
    pods, _ = await api.list_items(f"/api/v1/namespaces/{namespace}/pods", labelSelector=selector)
    return [raw["metadata"]["name"] for raw in pods if (raw.get("status") or {}).get("phase") not in _ENDED]


async def _free_all(api: Api, options: Options) -> None:
    """One namespace that may not be read any more holds up nothing, but the release's own does."""
    home, until = options.operator.partition("/")[0], time.monotonic() + REFUSED_SECONDS
    left = list(options.namespaces)
    while left:
        refused = dict[str, Forbidden]()
        for namespace in left:
            try:
                await _free(api, options, namespace)
            except Forbidden as error:
                refused[namespace] = error
        left = list(refused)
        if left and time.monotonic() > until:
            if home in refused:
                raise refused[home]
            log.warning("passed over, for they may not be read: they are gone, or going", extra={"namespaces": left})
            return
        if left:
            await asyncio.sleep(POLL_SECONDS)


async def _free(api: Api, options: Options, namespace: str) -> None:
    if namespace in options.pool_namespaces:
        await _stop_engines(api, namespace)
    for kind in (ADAPTER, POOL):
        await _release(api, kind, namespace, last=True)


async def _stop_engines(api: Api, namespace: str) -> None:
    """Of every pool that is there, and of every one that has left a StatefulSet."""
    sets, _ = await api.list_items(STATEFUL_SET.path(namespace), labelSelector=STATEFUL_SET.selector)
    labels = [raw["metadata"].get("labels") or {} for raw in sets]
    pools = {raw["metadata"]["name"] for raw in await _items(api, POOL, namespace)}
    for pool in sorted(pools | {found[LABEL_POOL] for found in labels if LABEL_POOL in found}):
        ended = [path for path in _workload(namespace, pool) if await _end(api, path, pool)]
        if ended:
            log.info("engines end", extra={"pool": f"{namespace}/{pool}"})


def _workload(namespace: str, pool: str) -> Iterator[str]:
    yield f"/api/v1/namespaces/{namespace}/services/{pool}"
    yield f"/apis/policy/v1/namespaces/{namespace}/poddisruptionbudgets/{pool}"
    yield f"/api/v1/namespaces/{namespace}/secrets/{secret_name(pool)}"
    yield STATEFUL_SET.path(namespace, pool)  # the last: by it what is left is found after an interruption


async def _end(api: Api, path: str, pool: str) -> bool:
    """Delete what is the pool's. What only has the name that the pool's would have is somebody else's and stays."""
    try:
        metadata = (await api.get(path))["metadata"]
        if not may_take(metadata, pool):
            log.info("not the pool's, and left alone", extra={"path": path})
            return False
        await api.delete(path, uid=metadata["uid"])
    except (Conflict, NotFound):  # gone, or another by now
        return False
    return True


async def _items(api: Api, kind: Kind, namespace: str) -> list[dict[str, Any]]:
    """Without the CRD there are none."""
    try:
        return (await api.list_items(kind.path(namespace)))[0]
    except NotFound:
        return []


async def _release(api: Api, kind: Kind, namespace: str, *, last: bool = False) -> None:
    """Take our finalizer off every object of the kind; `last`: after its status says that nobody serves it."""
    for _ in range(_PASSES):
        items = await _items(api, kind, namespace)
        held = [raw for raw in items if FINALIZER in (raw["metadata"].get("finalizers") or ())]
        if not held:
            return
        for raw in held:
            path = kind.path(namespace, raw["metadata"]["name"])
            if last and not raw["metadata"].get("deletionTimestamp"):
                await _say_last(api, kind, path, raw)
            await _take_off(api, path, raw["metadata"]["finalizers"])
        log.info("finalizers are off", extra={"kind": kind.name, "namespace": namespace, "objects": len(held)})
    raise Unavailable(f"{kind.name} in {namespace}: the finalizer comes back; does another operator run?")


async def _say_last(api: Api, kind: Kind, path: str, raw: Mapping[str, Any]) -> None:
    """As the operator wrote it: applied, so that conditions of others stay. Less than a finalizer, so it may fail."""
    metadata = {name: raw["metadata"][name] for name in ("name", "namespace", "uid")}
    status = last_words(kind.name, owned_status(raw), raw["metadata"].get("generation", 0), time.time())
    body = {"apiVersion": API_VERSION, "kind": kind.name, "metadata": metadata, "status": status}
    try:
        await api.apply(f"{path}/status", body)
    except (Conflict, Forbidden, InvalidRequest, NotFound) as error:
        log.warning("its status stays as it was", extra={"path": path, "error": error.message})


async def _take_off(api: Api, path: str, finalizers: Sequence[str]) -> None:
    """A compare-and-set: finalizers of others are never lost. What changed meanwhile is left to the next pass."""
    rest = [name for name in finalizers if name != FINALIZER]
    try:
        await api.change(
            path,
            {"op": "test", "path": "/metadata/finalizers", "value": list(finalizers)},
            {"op": "replace", "path": "/metadata/finalizers", "value": rest},
        )
    except (Conflict, NotFound):
        log.info("changed meanwhile", extra={"path": path})


async def leave(api: Api, home: str, namespaces: Sequence[str]) -> None:
    """What an operator does last: where its own namespace is being deleted, nobody comes after it, and finalizers
    come off now. A namespace's pods go before its Roles do, so that this one still may. Never raises.
    """
    try:
        async with asyncio.timeout(LEAVE_SECONDS):
            if not (await api.get(f"/api/v1/namespaces/{home}"))["metadata"].get("deletionTimestamp"):
                return
            log.warning("its namespace is being deleted: finalizers come off", extra={"namespace": home})
            for namespace in namespaces:
                await _leave(api, namespace)
    except (LoraplaneError, TimeoutError) as error:
        told = getattr(error, "message", "past the deadline")
        log.warning("finalizers may have stayed", extra={"namespace": home, "error": told})


async def _leave(api: Api, namespace: str) -> None:
    """What cannot be read holds up no other namespace."""
    try:
        for kind in (ADAPTER, POOL):
            await _release(api, kind, namespace)
    except LoraplaneError as error:
        log.warning("finalizers may have stayed", extra={"namespace": namespace, "error": error.message})


async def run(api: Api, options: Options) -> int:
    """As `uninstall`, again while the API server is away or, just started, has not yet read its Roles."""
    until = time.monotonic() + options.deadline
    while True:
        try:
            await uninstall(api, options)
        except (Unavailable, Forbidden) as error:
            if time.monotonic() + POLL_SECONDS > until:
                log.critical("not finished", extra={"error": error.message})
                return 1
            log.warning("trying again", extra={"error": error.message})
            await asyncio.sleep(POLL_SECONDS)
        except (LoraplaneError, TimeoutError) as error:
            log.critical("not finished", extra={"error": getattr(error, "message", "past the deadline")})
            return 1
        else:
            log.info("pools and adapters stay, and can be deleted at any time")
            return 0


async def _main(options: Options) -> int:
    from loraplane_operator.cluster.kube_api import KubeApi

    api = await KubeApi.connect()
    try:
        return await run(api, options)
    finally:
        await api.close()


def main(arguments: Sequence[str] | None = None) -> int:
    """0 when nothing can hang any more, 1 when something still may."""
    options = parse(sys.argv[1:] if arguments is None else arguments)
    logs.configure()
    return asyncio.run(_main(options))


if __name__ == "__main__":
    sys.exit(main())
