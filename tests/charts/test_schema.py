"""values.schema.json and the chart's own checks: good values pass, bad ones are refused with a text that helps."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic_settings import BaseSettings

from loraplane_core.resources.pool import POOL_NAME_MAX
from loraplane_gateway.data.settings import DataSettings
from loraplane_gateway.settings import RegistrySettings
from tests.charts.helm import CHART, SETS, HelmFailed, helm, template

GOOD: list[dict[str, Any]] = [
    {},
    {"gateway.replicas": 0},
    {"gateway.podDisruptionBudget.maxUnavailable": "50%"},
    {"imagePullSecrets": [{"name": "mirror"}, {"name": "backup"}]},
    {"operator.clusterRole.create": False, "tenants.namespaces": ["team-a"]},
    {"loader.enabled": True},
    {"models": {"create": False, "claim": "bases"}},
    {"postgres.accessModes": ["ReadWriteOncePod"], "registry.store.existingClaim": "artifacts"},
    {"pools.objects": [{"name": "smol", "spec": {"replicas": 1}}]},
    {"gateway.service": {"type": "NodePort", "port": 443, "annotations": {"a": "b"}}},
    {"monitoring.from": [{"namespaceSelector": {}}]},
    {"gateway.podDisruptionBudget.maxUnavailable": 2},
    {"pools.namespaces": ["a", "team-b"]},
    {"operator.allowPodTemplate": ["secrets", "privilege"]},
    {"operator.image.digest": "sha256:" + "0" * 64},
    {"image.registry": "registry.example:5000/mirror"},
    {"gateway.resources": {"limits": {"cpu": 2, "memory": "1.5Gi"}}},
    {"gateway.settings": {"max_in_flight": 12, "request_timeout": 1.5}},
    {"valkey.enabled": False},
    {"postgres.enabled": False, "postgres.existingSecret": "mine"},
    {"extraObjects": [{"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "x"}}]},
    {"networkPolicy.apiServer.cidrs": ["10.0.0.1/32", "fd00::/8"]},
]
BAD: list[tuple[dict[str, Any], str]] = [
    ({"gatway": {}}, "'gatway' not allowed"),
    ({"gateway.replica": 2}, "'replica' not allowed"),
    ({"gateway.replicas": "two"}, "at '/gateway/replicas': got string, want integer"),
    ({"gateway.replicas": -1}, "at '/gateway/replicas': minimum: got -1, want 0"),
    ({"gateway.drainSeconds": 0}, "at '/gateway/drainSeconds': minimum: got 0, want 1"),
    ({"gateway.service.port": 70000}, "at '/gateway/service/port': maximum: got 70,000, want 65,535"),
    ({"gateway.service.type": "ExternalName"}, "at '/gateway/service/type': value must be one of 'ClusterIP'"),
    ({"gateway.autoscaling.enabled": "yes"}, "at '/gateway/autoscaling/enabled': got string, want boolean"),
    ({"gateway.autoscaling.targetCPUUtilizationPercentage": 101}, "maximum: got 101, want 100"),
    ({"gateway.podDisruptionBudget.maxUnavailable": "0%"}, "at '/gateway/podDisruptionBudget/maxUnavailable'"),
    ({"gateway.settings": {"database_url": "postgresql://x"}}, "gateway.settings.database_url: the chart sets it"),
    ({"gateway.settings": {"MaxBody": 1}}, "at '/gateway/settings': additional properties 'MaxBody' not allowed"),
    ({"gateway.settings": {"max_inflight": 1}}, "additional properties 'max_inflight' not allowed"),
    ({"gateway.settings": {"linger": 1}}, "additional properties 'linger' not allowed"),
    ({"registry.settings": {"workers": 4}}, "additional properties 'workers' not allowed"),
    ({"gateway.resources": {"limits": {"memory": "1 GB"}}}, "at '/gateway/resources/limits/memory'"),
    ({"gateway.resources": {"limit": {}}}, "'limit' not allowed"),
    ({"image.pullPolicy": "Sometimes"}, "at '/image/pullPolicy': value must be one of 'Always'"),
    ({"image.tag": "a tag"}, "at '/image/tag': 'a tag' does not match pattern"),
    ({"operator.image.digest": "sha256:abc"}, "at '/operator/image/digest': 'sha256:abc' does not match pattern"),
    ({"operator.image.repository": ""}, "at '/operator/image/repository'"),
    ({"operator.allowPodTemplate": ["root"]}, "at '/operator/allowPodTemplate/0': value must be one of"),
    ({"operator.replicas": 2}, "'replicas' not allowed"),
    ({"operator.clusterRole": True}, "at '/operator/clusterRole': got boolean, want object"),
    ({"operator.clusterRole.create": "no"}, "at '/operator/clusterRole/create': got string, want boolean"),
    ({"imagePullSecrets": [{"name": ""}]}, "at '/imagePullSecrets/0/name'"),
    ({"tenants.namespaces": ["-a"]}, "at '/tenants/namespaces/0': '-a' does not match pattern"),
    ({"loader.enabled": "true"}, "at '/loader/enabled': got string, want boolean"),
    ({"gateway.extraEnv": [{"value": "1"}]}, "at '/gateway/extraEnv/0': missing property 'name'"),
    ({"gateway.service.annotations": {"a": 1}}, "at '/gateway/service/annotations/a': got number, want string"),
    ({"commonLabels": ["a"]}, "at '/commonLabels': got array, want object"),
    ({"keys.existingSecret": "My Keys"}, "at '/keys/existingSecret': 'My Keys' does not match pattern"),
    ({"networkPolicy.apiServer.cidrs": ["everywhere"]}, "at '/networkPolicy/apiServer/cidrs/0'"),
    ({"networkPolicy.databases.ports": [0]}, "at '/networkPolicy/databases/ports/0': minimum: got 0, want 1"),
    ({"postgres.createRoles": "yes"}, "at '/postgres/createRoles': got string, want boolean"),
    ({"valkey.resources": {"limits": {"memory": "-1Gi"}}}, "at '/valkey/resources/limits/memory'"),
    ({"imagePullSecrets": ["mirror"]}, "at '/imagePullSecrets/0': got string, want object"),
    ({"pools.namespaces": "team-a"}, "at '/pools/namespaces': got string, want array"),
    ({"pools.namespaces": ["Team_A"]}, "at '/pools/namespaces/0': 'Team_A' does not match pattern"),
    ({"pools.namespaces": ["a", "a"]}, "at '/pools/namespaces': items at 0 and 1 are equal"),
    ({"pools.objects": [{"name": "smol"}]}, "at '/pools/objects/0': missing property 'spec'"),
    (
        {"pools.objects": [{"name": "p" * (POOL_NAME_MAX + 1), "spec": {}}]},
        f"at '/pools/objects/0/name': maxLength: got {POOL_NAME_MAX + 1}, want {POOL_NAME_MAX}",
    ),
    ({"registry.workers": 0}, "at '/registry/workers': minimum: got 0, want 1"),
    ({"models.accessModes": ["ReadWrite"]}, "at '/models/accessModes/0': value must be one of"),
    ({"models.claim": ""}, "at '/models/claim'"),
    ({"models.size": "large"}, "at '/models/size': 'large' does not match pattern"),
    ({"valkey.maxMemory": "256Mi"}, "at '/valkey/maxMemory': '256Mi' does not match pattern"),
    ({"networkPolicy.clients": [{}]}, "at '/networkPolicy/clients/0': minProperties: got 0, want 1"),
    ({"networkPolicy.apiServer.ports": []}, "at '/networkPolicy/apiServer/ports': minItems: got 0, want 1"),
    ({"networkPolicy.dns": []}, "at '/networkPolicy/dns'"),
    ({"monitoring.from": {"namespace": "x"}}, "at '/monitoring/from': got object, want array"),
    ({"uninstall.deadlineSeconds": 5}, "at '/uninstall/deadlineSeconds': minimum: got 5, want 60"),
    ({"extraObjects": [{"kind": "ConfigMap"}]}, "at '/extraObjects/0': missing property 'apiVersion'"),
    ({"fullnameOverride": "Lora_Plane"}, "at '/fullnameOverride': 'Lora_Plane' does not match pattern"),
    # A default that is taken away: a template would find nothing, or render an empty line.
    ({"gateway.drainSeconds": None}, "at '/gateway': missing property 'drainSeconds'"),
    ({"gateway.service": None}, "at '/gateway': missing property 'service'"),
    ({"operator.image.tag": None}, "at '/operator/image': missing property 'tag'"),
    ({"tenants": None}, "at '': missing property 'tenants'"),
    # Settings of the processes.
    ({"gateway.settings": {"max_in_flight": 0}}, "at '/gateway/settings/max_in_flight': minimum: got 0, want 1"),
    ({"registry.settings": {"feed_keep": "all"}}, "at '/registry/settings/feed_keep': got string, want integer"),
    ({"registry.settings": {"drain_timeout": 16}}, "16 s and 15 s more do not fit into registry.terminationGrace"),
    (
        {"gateway.extraEnv": [{"name": "LORAPLANE_DATABASE_URL", "value": "postgresql://u:p@h/d"}]},
        "gateway.extraEnv: LORAPLANE_DATABASE_URL is a setting; set it under gateway.settings",
    ),
    # Labels by which Services and NetworkPolicies go.
    ({"commonLabels": {"app.kubernetes.io/component": "engine"}}, "commonLabels: app.kubernetes.io/component is the"),
    ({"gateway.podLabels": {"loraplane.dev/pool": "smol"}}, "gateway.podLabels: loraplane.dev/pool is the chart's"),
    ({"fullnameOverride": "1st"}, "at '/fullnameOverride': '1st' does not match pattern"),
    ({"models.claim": "one", "adapters.claim": "one"}, "two claims would have one name (one, one, loraplane-store"),
    # What depends on several values is said by the templates.
    ({"postgres.enabled": False}, "needs postgres.existingSecret, a Secret with owner-url, registry-url and data-url"),
    ({"postgres.existingSecret": "mine"}, "existingSecret is for an external database; set postgres.enabled=false"),
    ({"valkey.existingSecret": "mine"}, "existingSecret is for an external server; set valkey.enabled=false"),
    (
        {"gateway.autoscaling": {"enabled": True, "minReplicas": 5, "maxReplicas": 2}},
        "minReplicas (5) is more than maxReplicas (2)",
    ),
    ({"operator.serviceAccount": {"create": False}}, "operator.serviceAccount: with create=false name an existing"),
    (
        {"models.volumeName": "pv", "pools.namespaces": ["a", "b"]},
        "one volume cannot be bound by the claims of 2 namespaces",
    ),
    (
        {"pools.namespaces": ["a"], "pools.objects": [{"name": "smol", "namespace": "b", "spec": {}}]},
        "smol lies in namespace b, which is not in pools.namespaces (a)",
    ),
    (
        {"pools.namespaces": ["a"], "pools.objects": [{"name": "smol", "spec": {}}]},
        "smol needs a namespace out of pools.namespaces (a)",
    ),
]


#: What of a setting the schema says, as pydantic does.
TYPED = ("type", "minimum", "maximum", "exclusiveMinimum")


def settings(wanted: dict[str, Any]) -> dict[str, str]:
    return {name: json.dumps(value) for name, value in wanted.items()}


@pytest.mark.parametrize("values", GOOD, ids=str)
def test_good_values_are_taken(values: dict[str, Any]) -> None:
    assert "kind: Deployment" in template(settings=settings(values))


@pytest.mark.parametrize(("values", "text"), BAD, ids=[str(values) for values, _ in BAD])
def test_bad_values_are_refused_and_the_text_says_where_and_why(values: dict[str, Any], text: str) -> None:
    with pytest.raises(HelmFailed) as refused:
        template(settings=settings(values))
    assert text in str(refused.value)


@pytest.mark.parametrize(("component", "kind"), [("gateway", DataSettings), ("registry", RegistrySettings)])
def test_settings_are_those_that_the_process_has_and_the_chart_does_not_set(
    component: str, kind: type[BaseSettings]
) -> None:
    """The process passes over a variable that it does not know, so that a typo would set nothing."""
    schema = json.loads((CHART / "values.schema.json").read_text())["definitions"][f"{component}Settings"]
    templates = (CHART / "templates" / f"{component}.yaml").read_text()
    own = {name.lower() for name in re.findall(r"LORAPLANE_([A-Z_]+)", templates)}
    (refused,) = schema["patternProperties"]  # by templates/validate.yaml, with its reason
    assert refused in (CHART / "templates" / "validate.yaml").read_text()
    assert set(schema["properties"]) == {
        name for name in kind.model_fields if name not in own and not re.search(refused, name)
    }
    # A value of a wrong type would end the process at its start.
    fields = kind.model_json_schema()["properties"]
    for name, found in schema["properties"].items():
        assert found == {key: fields[name][key] for key in TYPED if key in fields[name]}, name


@pytest.mark.parametrize("name", SETS)
def test_helm_lint_finds_nothing(name: str) -> None:
    told = helm("lint", str(CHART), "--strict", "--values", str(SETS[name]), "--kube-version", "1.36.0")
    assert "1 chart(s) linted, 0 chart(s) failed" in told
    assert "[WARNING]" not in told
    assert "[ERROR]" not in told


def test_every_default_has_its_place_in_the_schema() -> None:
    """So a value that is added to values.yaml alone is noticed, and one that is set to null; needs no helm."""
    schema = json.loads((CHART / "values.schema.json").read_text())
    defaults = yaml.safe_load((CHART / "values.yaml").read_text())

    def missing(values: Any, place: dict[str, Any], path: str) -> list[str]:
        if "$ref" in place:
            place = schema["definitions"][place["$ref"].rpartition("/")[2]]
        if not isinstance(values, dict) or "properties" not in place:
            return []
        found = [f"{path}.{name}" for name in values if name not in place["properties"]]
        if not path.endswith(".resources"):  # whoever sets no limit takes it away
            found += [f"{path}.{name} is not required" for name in values if name not in place.get("required", ())]
        for name in values.keys() & place["properties"].keys():
            found += missing(values[name], place["properties"][name], f"{path}.{name}")
        return found

    assert missing(defaults, schema, "") == []


def test_crds_are_those_of_the_repository() -> None:
    """`make crds` copies them; helm installs what lies in the chart."""
    mine, theirs = ({file.name: file.read_text() for file in folder.glob("*.yaml")} for folder in _CRDS)
    assert mine == theirs


_CRDS: tuple[Path, Path] = (CHART / "crds", CHART.parents[1] / "crds")
