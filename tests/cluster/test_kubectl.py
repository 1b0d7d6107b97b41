"""What a person sees of the objects through kubectl, against the real API server and without an operator."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from loraplane_core.labels import ADAPTER_KIND, POOL_KIND
from tests.cluster.desk import Desk, open_desk
from tests.cluster.kube import Refused
from tests.cluster.services import until
from tests.cluster.tool import Cluster
from tests.core.resource_table import adapter, pool

ROOT = Path(__file__).parents[2]
SCHEMAS = "/openapi/v3/apis/loraplane.dev/v1alpha1"


@pytest.fixture(scope="module")
def desk(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Desk]:
    with open_desk(cluster.kubeconfig, tmp_path_factory.mktemp("home")) as found:
        # What explains a CRD is published a moment after it is established.
        until(lambda: _published(found), 20, "the schemas of both kinds", every=0.2)
        yield found


def _published(desk: Desk) -> bool:
    schemas = ((desk.kube.get(SCHEMAS) or {}).get("components") or {}).get("schemas") or {}
    return all(f"dev.loraplane.v1alpha1.{kind}" in schemas for kind in (ADAPTER_KIND, POOL_KIND))


def _undescribed(schema: dict[str, Any], path: str) -> Iterator[str]:
    for name, child in schema.get("properties", {}).items():
        where = f"{path}.{name}"
        if not child.get("description"):
            yield where
        yield from _undescribed(child.get("items") or child, where)


@pytest.mark.parametrize("kind", [ADAPTER_KIND, POOL_KIND])
def test_every_field_is_described_where_kubectl_explain_looks(kind: str, desk: Desk) -> None:
    schemas = desk.kube.call("GET", SCHEMAS)["components"]["schemas"]
    found = schemas[f"dev.loraplane.v1alpha1.{kind}"]
    assert found["description"]
    assert list(_undescribed(found, kind)) == []


def test_explain_reads_well(desk: Desk) -> None:
    text = desk.kubectl("explain", "lora.spec.source")
    for words in ("LoRAAdapter", "uri", "-required-", "file:PATH", "registry's adapter root", "Not honoured yet"):
        assert words in text
    recursive = desk.kubectl("explain", "bmp", "--recursive")
    assert all(field in recursive for field in ("adapterMemory", "kvTokensDisplaced", "allowedTenants"))


def test_scale(desk: Desk) -> None:
    document = pool(name="scaled")
    path = desk.path(document)
    with desk.with_object(document):
        desk.kubectl("scale", "bmp", "scaled", "--replicas=3")
        assert desk.stored(document)["spec"]["replicas"] == 3
        status = {"replicas": 2, "selector": "loraplane.dev/pool=scaled"}
        desk.kube.merge(f"{path}/status", {"status": status})
        assert desk.kube.call("GET", f"{path}/scale")["status"] == status
        for wrong in (-1, 65):
            with pytest.raises(Refused, match="replicas"):
                desk.kube.merge(f"{path}/scale", {"spec": {"replicas": wrong}})


def _row(text: str) -> dict[str, str]:
    """One object's cells by column."""
    head, line = text.splitlines()
    starts = [(head.index(word), word) for word in head.split()]
    ends = [start for start, _ in starts[1:]] + [len(line)]
    return {word: line[start:end].strip() for (start, word), end in zip(starts, ends, strict=True)}


def _condition(kind: str, status: str, reason: str) -> dict[str, Any]:
    return {"type": kind, "status": status, "reason": reason}


def test_columns_of_an_adapter(desk: Desk) -> None:
    document = adapter(name="shown")
    status = {
        "conditions": [_condition("Placed", "True", "Placed"), _condition("Ready", "False", "NotWarm")],
        "baseModel": "smollm2",
        "activeVersion": 3,
        "resident": "1/2",
        "rank": 8,
    }
    with desk.with_object(document):
        shown = _row(desk.kubectl("get", "lora"))
        assert (shown["TENANT"], shown["VERSION"], shown["READY"]) == ("acme", "", "")
        desk.kube.merge(f"{desk.path(document)}/status", {"status": status})
        shown = _row(desk.kubectl("get", "lora"))
        assert "loraadapter.loraplane.dev/shown" in desk.kubectl("get", "loraplane", "-o", "name")
    assert shown.pop("AGE")
    assert shown == {
        "NAME": "shown",
        "TENANT": "acme",
        "BASE": "smollm2",
        "VERSION": "3",
        "READY": "False",
        "RESIDENT": "1/2",
        "RANK": "8",
        "REASON": "NotWarm",
    }


def test_columns_of_a_pool(desk: Desk) -> None:
    document = pool(name="shown")
    status = {
        "conditions": [_condition("Available", "True", "Available")],
        "readyReplicas": 0,
        "capacity": {"slots": 4},
        "adapters": {"registered": 5, "resident": 2},
    }
    with desk.with_object(document):
        desk.kube.merge(f"{desk.path(document)}/status", {"status": status})
        shown = _row(desk.kubectl("get", "bmp"))
        assert "basemodelpool.loraplane.dev/shown" in desk.kubectl("get", "loraplane", "-o", "name")
    assert shown.pop("AGE")
    assert shown == {
        "NAME": "shown",
        "BASE": "smollm2",
        "REPLICAS": "1",
        "READY": "0",
        "SLOTS": "4",
        "ADAPTERS": "5",
        "RESIDENT": "2",
        "AVAILABLE": "True",
        "REASON": "Available",
    }


def test_the_examples_can_be_applied_and_applied_again(desk: Desk, tmp_path: Path) -> None:
    files = [*(ROOT / "examples" / "pools").glob("*.yaml"), *(ROOT / "examples" / "lora").glob("*.yaml")]
    assert len(files) >= 4
    for file in files:
        here = [desk.here(raw) for raw in yaml.safe_load_all(file.read_text())]
        (tmp_path / file.name).write_text(yaml.safe_dump_all(here))
    folder = str(tmp_path)
    assert desk.kubectl("apply", "-f", folder).count(" created") == len(files)
    assert desk.kubectl("apply", "-f", folder).count(" unchanged") == len(files)
    applied = desk.kubectl("apply", "--server-side", "--force-conflicts", "-f", folder)
    assert applied.count("serverside-applied") == len(files)
    desk.kubectl("delete", "-f", folder)
