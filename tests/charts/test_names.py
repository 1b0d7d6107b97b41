"""Names and labels that people give, and where they end up."""

import json
from typing import Any

import pytest

from loraplane_operator import uninstall
from tests.charts.helm import HelmFailed, objects, pod_templates, template

COMPONENT = "app.kubernetes.io/component"
#: YAML has these as numbers and booleans; Kubernetes takes them as names.
ODD = {
    "pools.namespaces": ["123", "no"],
    "tenants.namespaces": ["0x10", "on"],
    "pools.objects": [{"name": "1", "namespace": "no", "spec": {"replicas": 1}}],
    "priorityClassName": "1",
    "keys.existingSecret": "12",
    "postgres": {"enabled": False, "existingSecret": "off"},
    "valkey": {"enabled": False, "existingSecret": "1.5"},
    "models.claim": "y",
    "adapters": {"claim": "2", "volumeName": "3"},
    "registry.store.existingClaim": "4",
    "loader.enabled": True,
    "nameOverride": "7",
    "fullnameOverride": "lp",
    **{f"{each}.serviceAccount": {"create": False, "name": "1234"} for each in ("operator", "gateway", "registry")},
    "uninstall.serviceAccount.name": "true",
}
NAMES = {
    *("name", "namespace", "claimName", "secretName", "volumeName", "serviceAccountName", "priorityClassName"),
    *("storage", "app.kubernetes.io/name", "app.kubernetes.io/instance", "kubernetes.io/metadata.name"),
}


def test_names_that_yaml_has_other_uses_for_stay_names() -> None:
    values = {name: json.dumps(value) for name, value in ODD.items()}
    text = template(settings=values, namespace="2024", release="1e3")
    assert [found for each in objects(text) for found in _no_texts(each)] == []
    parsed = uninstall.parse(_pod_of(text, "uninstall")["spec"]["containers"][0]["args"])
    operator = next(
        each
        for each in objects(text)
        if each["kind"] == "Deployment" and each["metadata"]["labels"][COMPONENT] == "operator"
    )
    selector = dict(each.split("=") for each in parsed.operator_selector.split(","))
    assert selector == operator["spec"]["selector"]["matchLabels"]
    assert selector["app.kubernetes.io/instance"] == "1e3"


def _pod_of(text: str, component: str) -> dict[str, Any]:
    return next(
        each for each in pod_templates(objects(text)).values() if each["metadata"]["labels"][COMPONENT] == component
    )


def _no_texts(raw: Any) -> list[tuple[str, Any]]:
    """(name, value) of what is to be a text and is none, anywhere in it."""
    if isinstance(raw, list):
        return [found for each in raw for found in _no_texts(each)]
    if not isinstance(raw, dict):
        return []
    here = [(name, value) for name, value in raw.items() if name in NAMES and not isinstance(value, str)]
    return here + [found for value in raw.values() for found in _no_texts(value)]


def test_labels_of_pods_win_over_common_ones() -> None:
    both = {"commonLabels": json.dumps({"tier": "all"}), "gateway.podLabels": json.dumps({"tier": "edge"})}
    text = template(settings=both)
    assert text.count("tier: edge") == 1
    assert _pod_of(text, "gateway")["metadata"]["labels"]["tier"] == "edge"
    assert _pod_of(text, "registry")["metadata"]["labels"]["tier"] == "all"


def test_the_loader_is_where_a_claim_of_one_node_can_be_mounted() -> None:
    one = template(settings={"loader.enabled": "true"})
    (term,) = _pod_of(one, "loader")["spec"]["affinity"]["podAffinity"][
        "requiredDuringSchedulingIgnoredDuringExecution"
    ]
    assert term["topologyKey"] == "kubernetes.io/hostname"
    assert term["labelSelector"]["matchLabels"].items() <= _pod_of(one, "registry")["metadata"]["labels"].items()
    many = template(settings={"loader.enabled": "true", "adapters.accessModes": '["ReadWriteMany"]'})
    assert "affinity" not in _pod_of(many, "loader")["spec"]


@pytest.mark.parametrize("release", ["1st", "my.release"])
def test_a_release_whose_name_no_service_can_begin_with_is_told_what_to_set(release: str) -> None:
    with pytest.raises(HelmFailed, match="Services begin with a letter and have no dots: set fullnameOverride"):
        template(release=release)
    assert 'name: "lp-gateway"' in template(release=release, settings={"fullnameOverride": '"lp"'})


def test_a_name_that_is_cut_ends_in_no_dash() -> None:
    text = template(
        settings={"fullnameOverride": json.dumps(f"{'a' * 38}--b"), "nameOverride": json.dumps(f"{'c' * 38}--d")}
    )
    assert f'name: "{"a" * 38}-gateway"' in text
    assert f'app.kubernetes.io/name: "{"c" * 38}"' in text
