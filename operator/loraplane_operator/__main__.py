"""`loraplane-operator local|kubernetes`: the composition root of the operator."""

import argparse
import asyncio
import logging
import os
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from loraplane_core import credentials
from loraplane_core.version import VERSION
from loraplane_operator import faults, health, logs, settings
from loraplane_operator.cluster.local import LocalCluster
from loraplane_operator.cluster.pod_template import ALLOWANCES
from loraplane_operator.cluster.port import Cluster
from loraplane_operator.faults import Fault
from loraplane_operator.reconcile import Reconciler

log = logging.getLogger("loraplane_operator")
_STOPS = (signal.SIGTERM, signal.SIGINT)


def parse(arguments: Sequence[str]) -> settings.Local | settings.Kubernetes:
    parser = argparse.ArgumentParser(prog="loraplane-operator", description="Reconciles pools and adapters.")
    parser.add_argument("--version", action="version", version=f"%(prog)s {VERSION}")
    modes = parser.add_subparsers(dest="mode", required=True)
    local = modes.add_parser("local", help="over a folder of YAML and the local supervisor")
    kubernetes = modes.add_parser("kubernetes", help="over the Kubernetes API")
    for mode in (local, kubernetes):
        mode.add_argument("--registry-url", required=True, help="admin listener of the registry")
        mode.add_argument("--artifacts-url", required=True, help="artifact listener, as engines reach it")
        mode.add_argument("--master-key-file", type=Path, required=True, help="hexadecimal master key, mode 0600")
        mode.add_argument("--host", default="127.0.0.1", help="of the health and metrics port")
        mode.add_argument("--port", type=int, default=0, help="of the health and metrics port; 0 takes a free one")
    local.add_argument("--folder", type=Path, required=True, help="YAML documents, read recursively")
    local.add_argument("--state-dir", type=Path, default=Path(".loraplane"))
    local.add_argument("--supervisor-socket", type=Path, required=True)
    local.add_argument("--model-root", type=Path, required=True, help="file: bases lie below it")
    kubernetes.add_argument("--namespace", action="append", required=True, dest="namespaces", help="may be repeated")
    kubernetes.add_argument(
        "--pool-namespace",
        action="append",
        default=[],
        dest="pool_namespaces",
        help="where pools are honoured; may be repeated; without it, in every --namespace",
    )
    kubernetes.add_argument(
        "--home", default="", help="the namespace it runs in: when that is deleted, it leaves no finalizer behind"
    )
    kubernetes.add_argument("--engine-image", required=True)
    kubernetes.add_argument("--model-claim", required=True, help="claim mounted as the model root")
    kubernetes.add_argument(
        "--image-pull-secret",
        action="append",
        default=[],
        dest="image_pull_secrets",
        help="a Secret in the pool's namespace with which engines' images are pulled; may be repeated",
    )
    kubernetes.add_argument(
        "--allow-pod-template",
        action="append",
        default=[],
        choices=ALLOWANCES,
        dest="pod_template_allowed",
        help="what a pool's podTemplate may ask for beyond the restricted rules; may be repeated",
    )
    values = vars(parser.parse_args(arguments))
    kind = settings.Local if values.pop("mode") == "local" else settings.Kubernetes
    if "namespaces" in values:
        values["namespaces"] = tuple(values["namespaces"])
        values["pool_namespaces"] = tuple(values["pool_namespaces"])
        values["pod_template_allowed"] = frozenset(values["pod_template_allowed"])
        values["image_pull_secrets"] = tuple(values["image_pull_secrets"])
    try:
        return kind(**values)
    except ValueError as error:
        parser.error(str(error))


async def run_local(options: settings.Local, master: bytes, fault: Fault) -> None:
    cluster = LocalCluster(
        folder=options.folder,
        state_dir=options.state_dir,
        supervisor_socket=options.supervisor_socket,
        model_root=options.model_root,
    )
    await _until_stopped(_reconciler(cluster, options, master, fault), options)


async def run_kubernetes(options: settings.Kubernetes, master: bytes, fault: Fault) -> None:
    # Imported here: a local operator needs neither.
    from loraplane_operator import handlers, uninstall
    from loraplane_operator.cluster.kube_api import KubeApi
    from loraplane_operator.cluster.kubernetes import KubernetesCluster
    from loraplane_operator.cluster.manifests import Site

    api = await KubeApi.connect()
    site = Site(options.engine_image, options.model_claim, options.pod_template_allowed, options.image_pull_secrets)
    cluster = KubernetesCluster(
        api, namespaces=options.namespaces, pool_namespaces=options.pool_namespaces or None, site=site
    )
    reconciler = _reconciler(cluster, options, master, fault)
    stop = threading.Event()
    watching = asyncio.create_task(handlers.watch(cluster, options.namespaces, stop), name="kopf")
    watching.add_done_callback(reconciler.watcher_ended)  # without a watch it would be deaf
    try:
        await _until_stopped(reconciler, options)
        if options.home:
            await uninstall.leave(api, options.home, options.namespaces)
    finally:
        watching.remove_done_callback(reconciler.watcher_ended)
        stop.set()
        try:
            await watching
        finally:
            await api.close()


def _reconciler(cluster: Cluster, options: settings.Common, master: bytes, fault: Fault) -> Reconciler:
    return Reconciler(
        cluster,
        registry_url=options.registry_url,
        master=master,
        artifacts_url=options.artifacts_url,
        fault=fault,
    )


async def _until_stopped(reconciler: Reconciler, options: settings.Common) -> None:
    loop = asyncio.get_running_loop()

    def stop() -> None:
        for signum in _STOPS:
            loop.remove_signal_handler(signum)  # the next one ends the process at once
        log.info("stopping", extra={"phase": "stop"})
        reconciler.stop()

    for signum in _STOPS:
        loop.add_signal_handler(signum, stop)
    async with health.serve(
        options.host, options.port, passed_at=lambda: reconciler.passed_at, turned_at=lambda: reconciler.turned_at
    ) as port:
        log.info("operator started", extra={"health_port": port})
        await reconciler.run()
    log.info("operator stopped")


def main(arguments: Sequence[str] | None = None) -> int:
    """0 after a stop that was asked for, 2 when it was not started, 1 when it broke."""
    options = parse(sys.argv[1:] if arguments is None else arguments)
    logs.configure()
    try:
        master = credentials.read_key(options.master_key_file)
        fault = faults.from_environment(os.environ)
    except ValueError as error:
        log.critical("not started: %s", error)
        return 2
    run = (
        run_local(options, master, fault)
        if isinstance(options, settings.Local)
        else run_kubernetes(options, master, fault)
    )
    try:
        asyncio.run(run)
    except Exception:
        log.critical("the operator broke", exc_info=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
