"""A namespace of its own for a module's tests, with the CRDs installed and kubectl at hand."""

import contextlib
import os
import secrets
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from loraplane_core.labels import ADAPTER_KIND, POOL_KIND
from tests.cluster.install import install_crds
from tests.cluster.kube import ADAPTERS, POOLS, Kube
from tests.cluster.services import until

KUBECTL_SECONDS = 20
GONE_SECONDS = 10
_PATHS = {ADAPTER_KIND: ADAPTERS, POOL_KIND: POOLS}


class Desk:
    def __init__(self, kubeconfig: Path, home: Path) -> None:
        self.kubeconfig = kubeconfig
        self.home = home
        self.kube = Kube(kubeconfig)
        self.namespace = f"crds-{secrets.token_hex(3)}"

    def here(self, document: dict[str, Any], **metadata: Any) -> dict[str, Any]:
        return {**document, "metadata": {**document["metadata"], "namespace": self.namespace, **metadata}}

    def list_path(self, document: dict[str, Any]) -> str:
        return _PATHS[document["kind"]].format(namespace=self.namespace)

    def path(self, document: dict[str, Any]) -> str:
        return f"{self.list_path(document)}/{document['metadata']['name']}"

    def create(self, document: dict[str, Any]) -> dict[str, Any]:
        return self.kube.call("POST", self.list_path(document), self.here(document))

    def stored(self, document: dict[str, Any]) -> dict[str, Any]:
        return self.kube.call("GET", self.path(document))

    @contextlib.contextmanager
    def with_object(self, document: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The object as it was stored; gone afterwards."""
        try:
            yield self.create(document)
        finally:
            self.kube.delete(self.path(document))
            until(lambda: self.kube.get(self.path(document)) is None, GONE_SECONDS)

    def kubectl(self, *arguments: str) -> str:
        command = ["kubectl", "--kubeconfig", str(self.kubeconfig), "-n", self.namespace, *arguments]
        env = {"PATH": os.environ.get("PATH", os.defpath), "HOME": str(self.home)}
        done = subprocess.run(command, capture_output=True, text=True, timeout=KUBECTL_SECONDS, env=env, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout


@contextlib.contextmanager
def open_desk(kubeconfig: Path, home: Path) -> Iterator[Desk]:
    desk = Desk(kubeconfig, home)
    try:
        install_crds(desk.kube)
        desk.kube.call("POST", "/api/v1/namespaces", {"metadata": {"name": desk.namespace}})
        yield desk
        desk.kube.delete(f"/api/v1/namespaces/{desk.namespace}")
    finally:
        desk.kube.close()
