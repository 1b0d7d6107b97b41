"""The generated CRDs: structural, in step with the models, and complete for kubectl."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from loraplane_core.resources import crds

COMMITTED = Path(__file__).parents[2] / "crds"
CRDS = {"LoRAAdapter": crds.adapter_crd(), "BaseModelPool": crds.pool_crd()}


def _schema(kind: str) -> dict[str, Any]:
    found: dict[str, Any] = CRDS[kind]["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    return found


def _nodes(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    yield path, schema
    for name, child in schema.get("properties", {}).items():
        yield from _nodes(child, f"{path}.{name}")
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), dict):
            yield from _nodes(schema[key], f"{path}.{key}")


def test_the_committed_files_are_what_the_models_generate() -> None:
    assert crds.drift(COMMITTED) == ""


def test_drift_is_found_and_written_away(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert crds.main(["--check", str(tmp_path)]) == 1
    assert "+kind: CustomResourceDefinition" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []
    assert crds.main([str(tmp_path)]) == 0
    assert crds.main(["--check", str(tmp_path)]) == 0
    assert capsys.readouterr().out == ""
    file = tmp_path / "loraplane.dev_loraadapters.yaml"
    file.write_text(file.read_text().replace("maxLength: 63", "maxLength: 64", 1))
    assert crds.main(["--check", str(tmp_path)]) == 1
    assert "-" + " " * 16 + "maxLength: 64\n" in capsys.readouterr().out


@pytest.mark.parametrize("kind", CRDS)
def test_yaml_reads_back(kind: str) -> None:
    texts = crds.generate()
    assert set(texts) == {"loraplane.dev_loraadapters.yaml", "loraplane.dev_basemodelpools.yaml"}
    assert CRDS[kind] in [yaml.safe_load(text) for text in texts.values()]


@pytest.mark.parametrize("kind", CRDS)
def test_schemas_are_structural(kind: str) -> None:
    allowed = {
        "description", "type", "enum", "pattern", "minLength", "maxLength", "minimum", "maximum", "minItems",
        "maxItems", "maxProperties", "default", "properties", "required", "items", "additionalProperties", "anyOf",
    }  # fmt: skip
    for path, node in _nodes(_schema(kind)):
        plain = {key for key in node if not key.startswith("x-kubernetes-")}
        assert plain <= allowed, path
        if node.get("x-kubernetes-int-or-string"):
            assert node["anyOf"] == [{"type": "integer"}, {"type": "string"}], path
            assert "type" not in node, path
        else:
            assert isinstance(node["type"], str), path
            assert "anyOf" not in node, path
        assert not ({"minLength", "maxLength", "pattern"} & plain and node.get("type") == "array"), path
        assert not ("properties" in node and "additionalProperties" in node), path
        assert set(node.get("required", [])) <= set(node.get("properties", {})), path
        assert node.get("default", 0) is not None, path
        if node.get("x-kubernetes-list-type") == "map":
            assert set(node["x-kubernetes-list-map-keys"]) <= set(node["items"]["required"]), path


@pytest.mark.parametrize("kind", CRDS)
def test_what_cel_reads_is_bounded_and_described(kind: str) -> None:
    for path, node in _nodes(_schema(kind)):
        if path.startswith((".spec", ".status")) and not path.endswith((".items", ".additionalProperties")):
            assert node.get("description"), path
        if not path.startswith(".spec"):
            continue
        if node.get("type") == "string" and "enum" not in node:
            assert "maxLength" in node, path  # unbounded text exceeds the API server's cost budget
        if node.get("type") == "array":
            assert "maxItems" in node, path
        for rule in node.get("x-kubernetes-validations", []):
            assert set(rule) <= {"rule", "message", "fieldPath", "optionalOldSelf"}, path
            assert rule["message"], path


def test_rules_are_where_they_apply() -> None:
    spec = _schema("LoRAAdapter")["properties"]["spec"]
    rules = [rule["rule"] for rule in spec["x-kubernetes-validations"]]
    assert sum("oldSelf" in rule for rule in rules) == 3
    traffic = spec["properties"]["traffic"]["x-kubernetes-validations"]
    assert [rule["rule"] for rule in traffic] == ["self.map(t, t.weight).sum() == 100"]
    pool = _schema("BaseModelPool")["properties"]["spec"]
    assert any("oldSelf.baseModel" in rule["rule"] for rule in pool["x-kubernetes-validations"])


def test_names_columns_and_subresources() -> None:
    for kind, short in (("LoRAAdapter", "lora"), ("BaseModelPool", "bmp")):
        spec = CRDS[kind]["spec"]
        assert spec["names"]["shortNames"] == [short]
        assert spec["names"]["categories"] == ["loraplane"]
        assert spec["scope"] == "Namespaced"
        assert "status" in spec["versions"][0]["subresources"]
    columns = CRDS["LoRAAdapter"]["spec"]["versions"][0]["additionalPrinterColumns"]
    assert [column["name"].upper() for column in columns if not column.get("priority")] == [
        "TENANT", "BASE", "VERSION", "READY", "RESIDENT", "RANK", "REASON", "AGE",
    ]  # fmt: skip
    assert [column["name"].upper() for column in columns if column.get("priority")] == ["MESSAGE"]  # `-o wide`
    scale = CRDS["BaseModelPool"]["spec"]["versions"][0]["subresources"]["scale"]
    assert scale["specReplicasPath"] == ".spec.replicas"


@pytest.mark.parametrize("kind", CRDS)
def test_columns_and_paths_point_at_fields_that_exist(kind: str) -> None:
    version = CRDS[kind]["spec"]["versions"][0]
    paths = [column["jsonPath"] for column in version["additionalPrinterColumns"]]
    paths += version["subresources"].get("scale", {}).values()
    known = {path for path, _ in _nodes(_schema(kind))}
    for path in paths:
        field = re.sub(r'\[\?\(@\.type=="(Ready|Available|Degraded)"\)\]', ".items", path)
        assert field in known or field == ".metadata.creationTimestamp"


def test_a_status_has_no_defaults_and_a_spec_has_those_of_the_models() -> None:
    for kind in CRDS:
        for path, node in _nodes(_schema(kind)):
            assert not (path.startswith(".status") and "default" in node), path
    spec = _schema("BaseModelPool")["properties"]["spec"]["properties"]
    assert spec["engine"]["default"] == {}
    assert spec["engine"]["properties"]["dtype"]["default"] == "auto"
    assert spec["replicas"]["default"] == 1
