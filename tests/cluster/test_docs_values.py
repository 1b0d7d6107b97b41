"""The values and objects that docs/install.md shows, on the real API server: for GPUs, for databases of one's own."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.charts.helm import objects, pod_templates, template
from tests.cluster.install import restricted_namespaces
from tests.cluster.kube import Kube, Refused
from tests.cluster.services import ROOT
from tests.cluster.system import ClusterAccess
from tests.cluster.test_chart import DRY, path_of, pod
from tests.docs.blocks import Block, read

BLOCKS = [block for block in read(ROOT / "docs" / "install.md") if block.language == "yaml"]
VALUES = [block for block in BLOCKS if block.marker == "values"]
OBJECTS = [block for block in BLOCKS if block.marker == "object"]
#: Not the one of test_chart.py, which may still be going.
NAMESPACE = "lp-docs"


def namespaces_of(values: dict[str, Any]) -> set[str]:
    named = [(values.get(part) or {}).get("namespaces") or [] for part in ("pools", "tenants")]
    return {NAMESPACE, "loraplane"} | {name for names in named for name in names}


@pytest.fixture(scope="module")
def kube(cluster: ClusterAccess) -> Iterator[Kube]:
    names = set().union(*(namespaces_of(yaml.safe_load(block.text)) for block in VALUES))
    with restricted_namespaces(cluster.kubeconfig, names) as made:
        yield made


def tried(kube: Kube, raw: dict[str, Any]) -> str:
    """Empty, or why the API server would not take it."""
    try:
        kube.call("PATCH", path_of(raw) + DRY, raw, kind="application/apply-patch+yaml")
    except Refused as error:
        return "" if "error looking up service account" in str(error) else str(error)
    return ""


@pytest.mark.parametrize("block", VALUES, ids=str)
def test_values_that_are_shown_are_rendered_and_taken(kube: Kube, tmp_path: Path, block: Block) -> None:
    file = tmp_path / "values.yaml"
    file.write_text(block.text)
    rendered = objects(template(file, namespace=NAMESPACE))
    refused = {f"{raw['kind']}/{raw['metadata']['name']}": tried(kube, raw) for raw in rendered}
    assert {name: why for name, why in refused.items() if why} == {}
    for where, made in pod_templates(rendered).items():
        kube.call("POST", f"/api/v1/namespaces/{NAMESPACE}/pods?dryRun=All&fieldValidation=Strict", pod(made, where))


@pytest.mark.parametrize("block", OBJECTS, ids=str)
def test_objects_that_are_shown_are_taken(kube: Kube, block: Block) -> None:
    for raw in yaml.safe_load_all(block.text):
        assert tried(kube, raw) == ""


def test_there_are_some() -> None:
    """The page may be written anew; that it shows nothing must be noticed."""
    assert VALUES and OBJECTS
