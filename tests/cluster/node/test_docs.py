"""docs/install.md, typed in order on a cluster of one node, with the images that ship; it shows what is printed.

Two things are the test's own, and nothing else: `my-values.yaml` names the images on the node, and the volumes that the
test made, since there is no StorageClass; the pool takes the engine's packages from a claim, which spares an image of
5 GB, and little of the machine.
"""

import contextlib
import itertools
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from loraplane_core.labels import FINALIZER
from tests.charts.helm import binary
from tests.cluster.kube import Kube
from tests.cluster.node.installation import SITE, load_images
from tests.cluster.node.restricted import USER, local_volume, told
from tests.cluster.services import ROOT, until
from tests.cluster.tool import Cluster
from tests.cluster.tool.controlplane import NODE_NAME
from tests.docs.blocks import Block, read
from tests.docs.outputs import missing
from tests.docs.shell import Failed, checkout, run

INSTALL = ROOT / "docs" / "install.md"
BLOCKS = read(INSTALL)
TYPED = [block for block in BLOCKS if block.place == "cluster"]
SECONDS = 300.0
VOLUMES = ("models", "adapters", "store", "postgres")
NAMESPACE = "loraplane"


def values() -> dict[str, Any]:
    def claim(name: str) -> dict[str, Any]:
        return {"size": "1Gi", "storageClassName": "none", "volumeName": f"docs-{name}"}

    site = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": "site", "namespace": NAMESPACE},
        "spec": {
            "accessModes": ["ReadOnlyMany"],
            "storageClassName": "none",
            "volumeName": "docs-site",
            "resources": {"requests": {"storage": "1Gi"}},
        },
    }
    small = {"resources": {"requests": {"cpu": "10m", "memory": "64Mi"}, "limits": {"memory": "768Mi"}}}
    return {
        "image": {"registry": "localhost", "tag": "dev", "pullPolicy": "Never"},
        "engine": {"image": {"repository": "loraplane/engine-slim"}},
        "operator": small,
        "gateway": {"replicas": 1, "drainSeconds": 5, "lingerSeconds": 1, **small},
        "registry": {"store": claim("store"), **small},
        "postgres": {**claim("postgres"), **small},
        "valkey": small,
        "models": claim("models"),
        "adapters": claim("adapters"),
        "loader": {"enabled": True},
        "extraObjects": [site],
    }


def small_pool(document: dict[str, Any]) -> dict[str, Any]:
    """The example's pool, for two cores; its packages come from the claim `site`."""
    volume = {"name": "site", "persistentVolumeClaim": {"claimName": "site", "readOnly": True}}
    mount = {"name": "site", "mountPath": "/opt/loraplane/site", "readOnly": True}
    patch = {"spec": {"volumes": [volume], "containers": [{"name": "engine", "volumeMounts": [mount]}]}}
    document["spec"] |= {"replicas": 1, "podTemplate": patch}
    document["spec"]["engine"] |= {"maxModelLen": 256, "maxBatchTokens": 64, "maxSequences": 4, "threads": 1}
    return document


@pytest.fixture
def folder(cluster: Cluster, tmp_path: Path) -> Iterator[Path]:
    """The copy of the checkout in which it is all typed; images and volumes are there."""
    load_images(cluster)
    made = checkout(tmp_path / "checkout", small_pool)
    (made / "my-values.yaml").write_text(yaml.safe_dump(values()))
    with contextlib.ExitStack() as stack:
        kube = stack.enter_context(contextlib.closing(Kube(cluster.kubeconfig)))
        stack.callback(_clean, kube)
        for name in VOLUMES:
            (tmp_path / name).mkdir()
            os.chown(tmp_path / name, USER, USER)  # as the page says of `local` volumes
            local_volume(kube, f"docs-{name}", tmp_path / name, NODE_NAME)
        local_volume(kube, "docs-site", SITE, NODE_NAME, "ReadOnlyMany")
        yield made


def _clean(kube: Kube) -> None:
    kube.delete(f"/api/v1/namespaces/{NAMESPACE}")
    for name in (*VOLUMES, "site"):
        kube.delete(f"/api/v1/persistentvolumes/docs-{name}")


def environment(cluster: Cluster, tmp_path: Path) -> dict[str, str]:
    """helm, kubectl and loraplane on the PATH, as the page says."""
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "helm").symlink_to(binary())
    path = [str(tools), str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]
    homes = {f"HELM_{name}_HOME": str(tmp_path / "helm" / name.lower()) for name in ("CACHE", "CONFIG", "DATA")}
    return {"KUBECONFIG": str(cluster.kubeconfig), "PATH": ":".join(path), **homes}


def shown() -> Iterator[tuple[Block, Block]]:
    """(block, its output) of what the page shows."""
    for before, block in itertools.pairwise(BLOCKS):
        if block.marker == "output":
            yield before, block


def typed(blocks: list[Block], cluster: Cluster, folder: Path, tmp_path: Path) -> dict[Block, str]:
    try:
        return run(blocks, folder, tmp_path / "out", environment(cluster, tmp_path), SECONDS, {})
    except Failed as error:
        raise AssertionError(f"{error}\n{_told(cluster)}") from error


@pytest.mark.timeout(SECONDS + 60)
def test_the_page_from_an_empty_namespace_to_nothing_left(cluster: Cluster, folder: Path, tmp_path: Path) -> None:
    printed = typed(TYPED, cluster, folder, tmp_path)
    differing = {str(output): missing(output.text, printed[block]) for block, output in shown()}
    assert {name: lines for name, lines in differing.items() if lines} == {}
    with contextlib.closing(Kube(cluster.kubeconfig)) as kube:
        assert kube.get(f"/api/v1/namespaces/{NAMESPACE}") is None
        crds = {
            raw["metadata"]["name"] for raw in kube.items("/apis/apiextensions.k8s.io/v1/customresourcedefinitions")
        }
        assert not {name for name in crds if name.endswith("loraplane.dev")}
        until(lambda: not any(map(_bound, kube.items("/api/v1/persistentvolumes"))), 30, "claims went")


@pytest.mark.timeout(SECONDS + 60)
def test_the_release_may_be_deleted_with_its_namespace(cluster: Cluster, folder: Path, tmp_path: Path) -> None:
    """As the page says, though nothing was uninstalled: adapters are Ready, and carry finalizers."""
    ready = next(number for number, block in enumerate(TYPED) if "condition=Ready lora --all" in block.text)
    held = f"kubectl get lora,bmp -n {NAMESPACE} -o jsonpath='{{.items[*].metadata.finalizers}}'"
    gone = Block(INSTALL, 0, "sh", f"{held}\nkubectl delete namespace {NAMESPACE} --timeout=120s\n")
    printed = typed([*TYPED[: ready + 1], gone], cluster, folder, tmp_path)
    assert printed[gone].count(FINALIZER) == 4, printed[gone]
    assert f'namespace "{NAMESPACE}" deleted' in printed[gone]


def _bound(volume: dict[str, Any]) -> bool:
    return bool(volume["metadata"]["name"].startswith("docs-") and volume["status"]["phase"] == "Bound")


def _told(cluster: Cluster) -> str:
    """What a person would look at next."""
    pods = f"/api/v1/namespaces/{NAMESPACE}/pods"
    with contextlib.closing(Kube(cluster.kubeconfig)) as kube:
        names = [raw["metadata"]["name"] for raw in kube.items(pods)]
        return "\n".join(f"{name}: {told(kube, f'{pods}/{name}')}" for name in names)
