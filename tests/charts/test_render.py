"""What every rendering of the chart keeps to."""

import base64
from pathlib import Path
from typing import Any

import pytest
import yaml

from loraplane_gateway.__main__ import _parser
from loraplane_gateway.data.settings import DataSettings
from loraplane_gateway.settings import RegistrySettings
from loraplane_operator import settings, uninstall
from loraplane_operator.__main__ import parse
from tests.charts.helm import CHART, GOLDEN, NAMESPACE, RELEASE, SETS, masked, objects, pod_templates, template
from tests.cluster.install import manifests
from tests.cluster.leaks import Hunt, without_secrets

COMPONENT = "app.kubernetes.io/component"
#: Not served by anybody: no probe would tell anything.
SHORT_LIVED = ("uninstall", "test", "loader")
#: The sets that honour objects outside of the release's namespace.
REACHING_OUT = ("namespaces",)
_RENDERED: dict[str, str] = {}


def rendered(name: str) -> str:
    if name not in _RENDERED:
        _RENDERED[name] = template(SETS[name])
    return _RENDERED[name]


every_set = pytest.mark.parametrize("name", SETS)


def of(name: str, kind: str, component: str = "") -> list[dict[str, Any]]:
    return [
        each
        for each in objects(rendered(name))
        if each["kind"] == kind and component in ("", each["metadata"]["labels"].get(COMPONENT))
    ]


def pod(name: str, component: str) -> dict[str, Any]:
    found = [each for each in pod_templates(objects(rendered(name))).values() if component_of(each) == component]
    assert found, f"{name} has no pod of {component}"
    return found[0]


def component_of(made: dict[str, Any]) -> str:
    return str(made["metadata"]["labels"][COMPONENT])


def containers(made: dict[str, Any]) -> list[dict[str, Any]]:
    return [*made["spec"].get("initContainers", []), *made["spec"]["containers"]]


def environment(made: dict[str, Any]) -> dict[str, str]:
    return {each["name"]: each["value"] for each in made["spec"]["containers"][0]["env"]}


# -- the renderings


@every_set
def test_rendering_is_the_golden_one(name: str) -> None:
    """After a change that is meant: `python -m tests.charts.golden`."""
    assert masked(rendered(name)) == (GOLDEN / f"{name}.yaml").read_text()


def test_golden_renderings_are_of_the_sets_that_there_are() -> None:
    assert {file.stem for file in GOLDEN.glob("*.yaml")} == set(SETS)
    assert len(SETS) >= 8


@every_set
def test_names_are_given_once(name: str) -> None:
    found = [
        (each["kind"], each["metadata"].get("namespace"), each["metadata"]["name"]) for each in objects(rendered(name))
    ]
    assert len(found) == len(set(found))


# -- pods


@every_set
def test_every_pod_keeps_to_the_restricted_standard(name: str) -> None:
    for where, made in pod_templates(objects(rendered(name))).items():
        context = made["spec"]["securityContext"]
        assert context["runAsNonRoot"] is True, where
        assert (context["runAsUser"], context["runAsGroup"], context["fsGroup"]) == (65532,) * 3, where
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}, where
        for container in containers(made):
            own = container["securityContext"]
            assert own["allowPrivilegeEscalation"] is False, where
            assert own["readOnlyRootFilesystem"] is True, where
            assert own["capabilities"] == {"drop": ["ALL"]}, where
        kinds = {kind for volume in made["spec"]["volumes"] for kind in volume if kind != "name"}
        assert kinds <= {"emptyDir", "secret", "projected", "persistentVolumeClaim"}, where


@every_set
def test_every_container_has_resources_and_a_place_for_its_temporary_files(name: str) -> None:
    for where, made in pod_templates(objects(rendered(name))).items():
        for container in containers(made):
            assert {"cpu", "memory"} <= set(container["resources"]["requests"]), where
            assert "memory" in container["resources"]["limits"], where
            assert "/tmp" in {mount["mountPath"] for mount in container["volumeMounts"]}, where


@every_set
def test_every_server_has_all_three_probes(name: str) -> None:
    for where, made in pod_templates(objects(rendered(name))).items():
        if component_of(made) in SHORT_LIVED:
            continue
        for container in made["spec"]["containers"]:
            named = {port["name"] for port in container["ports"]}
            for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
                action = container[probe].get("httpGet") or container[probe].get("tcpSocket")
                assert action is None or action["port"] in named, where
                assert action is not None or container[probe]["exec"]["command"], where


@every_set
def test_only_who_asks_the_api_server_gets_a_token(name: str) -> None:
    for where, made in pod_templates(objects(rendered(name))).items():
        wanted = component_of(made) in ("operator", "gateway", "uninstall")
        assert made["spec"]["automountServiceAccountToken"] is wanted, where


@every_set
def test_a_graceful_stop_has_the_time_that_streams_have(name: str) -> None:
    made = pod(name, "gateway")
    drain = int(environment(made)["LORAPLANE_DRAIN_TIMEOUT"])
    linger = int(environment(made)["LORAPLANE_LINGER"])
    assert made["spec"]["terminationGracePeriodSeconds"] >= drain + linger + 10


# -- secrets


@every_set
def test_secrets_are_in_secret_objects_and_nowhere_else(name: str) -> None:
    hunt = Hunt()
    for each in of(name, "Secret"):
        hunt.add_secret(each)
    text = without_secrets(rendered(name))
    assert hunt.finds(name, text) == []
    assert "secretKeyRef" not in text  # an environment can be read by whoever may look at the process
    assert "envFrom" not in text


@every_set
def test_a_data_gateway_is_not_given_the_master_key(name: str) -> None:
    made = pod(name, "gateway")
    items = {volume["name"]: volume["secret"]["items"] for volume in made["spec"]["volumes"] if "secret" in volume}
    with_master = {volume for volume, listed in items.items() if "master.key" in {item["key"] for item in listed}}
    server = {mount["name"] for mount in made["spec"]["containers"][0]["volumeMounts"]}
    assert with_master == {"master"}
    assert not with_master & server
    assert not {"admin.key"} & {item["key"] for listed in items.values() for item in listed}


@every_set
def test_each_process_sees_only_its_own_secrets(name: str) -> None:
    """(component, container) -> entries of Secrets that it sees."""
    expected = {
        ("operator", "operator"): {"master.key"},
        ("gateway", "role-keys"): {"master.key"},
        ("gateway", "gateway"): {"pepper.key", "data-url", "url", "ca.crt"},
        ("registry", "registry"): {"master.key", "pepper.key", "admin.key", "registry-url", "url", "ca.crt"},
        ("registry", "migrate"): {"owner-url", "registry-password", "data-password", "ca.crt"},
        ("postgres", "postgres"): {"owner-password"},
        ("valkey", "valkey"): {"password"},
    }
    for made in pod_templates(objects(rendered(name))).values():
        held = {volume["name"]: set(_entries(volume)) for volume in made["spec"]["volumes"]}
        for container in containers(made):
            seen = set().union(*(held[mount["name"]] for mount in container["volumeMounts"]))
            assert seen <= expected.get((component_of(made), container["name"]), set())


def _entries(volume: dict[str, Any]) -> list[str]:
    sources = [volume["secret"]] if "secret" in volume else []
    sources += [each["secret"] for each in volume.get("projected", {}).get("sources", [])]
    return [item["key"] for source in sources for item in source["items"]]


# -- the processes' own words


@every_set
def test_whoever_calls_a_database_finds_the_authority_that_its_secret_may_name(name: str) -> None:
    """Optional: without the entry pods start all the same."""
    for component, kinds in (("gateway", ["containers"]), ("registry", ["initContainers", "containers"])):
        spec = pod(name, component)["spec"]
        (volume,) = [each for each in spec["volumes"] if each["name"] == "authorities"]
        sources = {each["secret"]["items"][0]["path"]: each["secret"] for each in volume["projected"]["sources"]}
        assert all(each["optional"] for each in sources.values())
        for container in (spec[kind][0] for kind in kinds):
            (mount,) = [each for each in container["volumeMounts"] if each["name"] == "authorities"]
            variables = {each["name"]: each["value"] for each in container["env"]}
            assert variables["PGSSLROOTCERT"] == f"{mount['mountPath']}/postgres.crt"
            assert "postgres.crt" in sources


@every_set
def test_the_operator_takes_its_arguments(name: str) -> None:
    if not of(name, "Deployment", "operator"):
        assert name == "bare"
        return
    deployment = of(name, "Deployment", "operator")[0]
    assert (deployment["spec"]["replicas"], deployment["spec"]["strategy"]) == (1, {"type": "Recreate"})
    arguments = pod(name, "operator")["spec"]["containers"][0]["args"]
    parsed = parse(arguments)
    assert isinstance(parsed, settings.Kubernetes)
    if name == "namespaces":
        assert parsed.pool_namespaces == ("lp-chart-gpu", "lp-chart-cpu")
        assert parsed.namespaces == ("lp-chart-gpu", "lp-chart-cpu", "lp-chart-acme", "lp-chart-globex")
    service = of(name, "Service", "registry")[0]["metadata"]["name"]
    assert parsed.registry_url == f"http://{service}.{NAMESPACE}.svc:8001"
    assert parsed.artifacts_url == f"http://{service}.{NAMESPACE}.svc:8002"


@every_set
def test_the_hook_takes_its_arguments_and_finds_the_operators_pods(name: str) -> None:
    if not of(name, "Job", "uninstall"):
        assert name == "bare"
        return
    parsed = uninstall.parse(pod(name, "uninstall")["spec"]["containers"][0]["args"])
    operator = of(name, "Deployment", "operator")[0]
    assert parsed.operator == f"{NAMESPACE}/{operator['metadata']['name']}"
    selector = dict(each.split("=") for each in parsed.operator_selector.split(","))
    assert selector == operator["spec"]["selector"]["matchLabels"]
    assert parsed.deadline < of(name, "Job", "uninstall")[0]["spec"]["activeDeadlineSeconds"]


@every_set
def test_migrations_and_role_keys_take_their_arguments(name: str) -> None:
    for component in ("registry", "gateway"):
        container = pod(name, component)["spec"]["initContainers"][0]
        parsed = _parser().parse_args(container["args"])
        mounted = {mount["mountPath"] for mount in container["volumeMounts"]}
        for file in (value for value in vars(parsed).values() if isinstance(value, Path)):
            assert {str(file), str(file.parent)} & mounted


@pytest.mark.parametrize(("component", "kind"), [("registry", RegistrySettings), ("gateway", DataSettings)])
@every_set
def test_every_setting_is_one_that_the_process_knows(
    name: str, component: str, kind: type[RegistrySettings] | type[DataSettings]
) -> None:
    made = pod(name, component)
    known = {f"LORAPLANE_{field.upper()}" for field in kind.model_fields} | {"LORAPLANE_SECRETS_DIR"}
    files = {item["path"] for volume in made["spec"]["volumes"] for item in _projected(volume)}
    files -= {"postgres.crt", "valkey.crt"}  # of authorities, in a folder of their own
    given = {each for each in environment(made) if each.startswith("LORAPLANE_")}
    assert (given | files) - known == set()


def _projected(volume: dict[str, Any]) -> list[dict[str, str]]:
    return [item for each in volume.get("projected", {}).get("sources", []) for item in each["secret"]["items"]]


# -- what belongs together


@every_set
def test_services_policies_and_budgets_select_pods_that_there_are(name: str) -> None:
    made = pod_templates(objects(rendered(name))).values()
    labels = [each["metadata"]["labels"] for each in made]
    for each in objects(rendered(name)):
        selector = None
        if each["kind"] == "Service":
            selector = each["spec"]["selector"]
            ports = {
                port["name"]
                for found in made
                if _matches(selector, found)
                for port in found["spec"]["containers"][0]["ports"]
            }
            assert {port["targetPort"] for port in each["spec"]["ports"]} <= ports
        elif each["kind"] == "NetworkPolicy" and "matchLabels" in each["spec"]["podSelector"]:
            selector = each["spec"]["podSelector"]["matchLabels"]
        elif each["kind"] in ("PodDisruptionBudget", "Deployment", "StatefulSet"):
            selector = each["spec"]["selector"]["matchLabels"]
        if selector is not None:
            assert any(selector.items() <= found.items() for found in labels), each["metadata"]["name"]


def _matches(selector: dict[str, str], made: dict[str, Any]) -> bool:
    return bool(selector.items() <= made["metadata"]["labels"].items())


@every_set
def test_claims_that_pods_use_are_made_or_named_by_the_values(name: str) -> None:
    made = {(each["metadata"]["namespace"], each["metadata"]["name"]) for each in of(name, "PersistentVolumeClaim")}
    used = {
        (NAMESPACE, volume["persistentVolumeClaim"]["claimName"])
        for each in (pod(name, "registry"), *([pod(name, "postgres")] if of(name, "Deployment", "postgres") else []))
        for volume in each["spec"]["volumes"]
        if "persistentVolumeClaim" in volume
    }
    named = {(NAMESPACE, "nfs-store"), (NAMESPACE, "nfs-adapters")} if name == "bare" else set()
    assert used <= made | named


@every_set
def test_rights_are_of_the_shipped_rules_and_cluster_wide_only_where_the_release_reaches_out(name: str) -> None:
    cluster_wide = [each for each in objects(rendered(name)) if each["kind"].startswith("ClusterRole")]
    assert bool(cluster_wide) is (name in REACHING_OUT)
    files = {
        "operator": ("operator-rules", "operator-tenant-rules", "operator-home-rules"),
        "gateway": ("gateway-rules",),
    }
    for role in of(name, "Role"):
        assert not any("*" in [*rule["verbs"], *rule["resources"], *rule["apiGroups"]] for rule in role["rules"])
        component = role["metadata"]["labels"][COMPONENT]
        if component in files:
            shipped = [yaml.safe_load((CHART / "files" / f"{file}.yaml").read_text()) for file in files[component]]
            assert role["rules"] in shipped
    for each in of(name, "ClusterRole"):
        assert each["rules"] == yaml.safe_load((CHART / "files" / "operator-cluster-rules.yaml").read_text())
    accounts = {each["metadata"]["name"] for each in of(name, "ServiceAccount")}
    for binding in (*of(name, "RoleBinding"), *of(name, "ClusterRoleBinding")):
        for subject in binding["subjects"]:
            assert subject["namespace"] == NAMESPACE
            assert subject["name"] in accounts or subject["name"].startswith("existing-")


def test_the_operators_rights_are_those_that_the_cluster_tests_judge() -> None:
    """tests/cluster runs the operator with these, and its audit compares them with what was asked."""
    for judged in manifests(NAMESPACE, NAMESPACE):
        shipped = next(
            each
            for each in of("defaults", judged["kind"], "operator")
            if each["metadata"]["name"] == judged["metadata"]["name"]
        )
        shipped["metadata"] = {key: shipped["metadata"][key] for key in ("name", "namespace")}
        assert shipped == judged


@every_set
def test_hooks_are_made_in_the_releases_namespace_alone(name: str) -> None:
    """A hook that cannot be made ends an uninstall for ever, and another namespace may be gone by then."""
    hooks = [each for each in objects(rendered(name)) if "helm.sh/hook" in each["metadata"].get("annotations", {})]
    assert {each["metadata"]["namespace"] for each in hooks} == {NAMESPACE}


@every_set
def test_pods_that_run_on_are_made_by_controllers(name: str) -> None:
    """Most of a pod cannot be changed: an upgrade that changes such a value would stop half-way."""
    pods = [each for each in objects(rendered(name)) if each["kind"] == "Pod"]
    assert {component_of(each) for each in pods} == {"test"}


@every_set
def test_what_holds_peoples_data_is_kept(name: str) -> None:
    kept = [*of(name, "PersistentVolumeClaim"), *of(name, "Secret", "keys"), *of(name, "Secret", "postgres")]
    for each in kept:
        assert each["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"


# -- single values


def test_images_by_registry_tag_and_digest() -> None:
    found = {
        container["image"]
        for each in pod_templates(objects(rendered("placed"))).values()
        for container in containers(each)
    }
    digest = "sha256:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef"
    assert found == {
        f"registry.example:5000/mirror/loraplane/operator@{digest}",
        "registry.example:5000/mirror/loraplane/gateway:1.2.3",
        "registry.example:5000/mirror/loraplane/postgres:1.2.3",
        "registry.example:5000/mirror/loraplane/valkey:1.2.3",
    }
    assert "--engine-image=other.example/team/engine:gpu" in pod("placed", "operator")["spec"]["containers"][0]["args"]
    assert "--image-pull-secret=mirror" in pod("placed", "operator")["spec"]["containers"][0]["args"]
    for each in pod_templates(objects(rendered("placed"))).values():
        assert each["spec"]["imagePullSecrets"] == [{"name": "mirror"}]
        assert each["spec"]["priorityClassName"] == "system-cluster-critical"
    version = yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"]
    assert pod("defaults", "gateway")["spec"]["containers"][0]["image"] == f"loraplane/gateway:{version}"


def test_gateways_that_are_not_ready_hold_up_no_drain() -> None:
    """All of them are so while Postgres is away for long."""
    (budget,) = of("defaults", "PodDisruptionBudget")
    assert budget["spec"]["unhealthyPodEvictionPolicy"] == "AlwaysAllow"


def test_autoscaling_leaves_the_replicas_to_it() -> None:
    scaler, gateway = of("guarded", "HorizontalPodAutoscaler")[0], of("guarded", "Deployment", "gateway")[0]
    assert scaler["spec"]["scaleTargetRef"]["name"] == gateway["metadata"]["name"]
    assert "replicas" not in gateway["spec"]
    assert of("defaults", "HorizontalPodAutoscaler") == []
    assert of("defaults", "Deployment", "gateway")[0]["spec"]["replicas"] == 2


def test_data_gateways_are_spread_over_nodes_and_zones() -> None:
    found = pod("defaults", "gateway")["spec"]["topologySpreadConstraints"]
    assert [each["topologyKey"] for each in found] == ["kubernetes.io/hostname", "topology.kubernetes.io/zone"]
    for each in found:
        assert each["labelSelector"]["matchLabels"].items() <= pod("defaults", "gateway")["metadata"]["labels"].items()


def test_engines_are_asked_by_gateways_and_operator_and_ask_for_artifacts_and_names_alone_g7() -> None:
    policies = of("namespaces", "NetworkPolicy", "engine")
    assert {each["metadata"]["namespace"] for each in policies} == {"lp-chart-gpu", "lp-chart-cpu"}
    for each in policies:
        inside = {_peers(rule): _ports(rule) for rule in each["spec"]["ingress"]}
        assert inside == {("gateway",): {8000, 8001}, ("operator",): {8001}}
        outside = {_peers(rule): _ports(rule) for rule in each["spec"]["egress"]}
        assert outside == {("registry",): {8002}, ("",): {53}}
        for rule in (*each["spec"]["ingress"], each["spec"]["egress"][0]):
            for peer in rule.get("from") or rule["to"]:
                assert peer["namespaceSelector"] == {"matchLabels": {"kubernetes.io/metadata.name": NAMESPACE}}


def _peers(rule: dict[str, Any]) -> tuple[str, ...]:
    listed = rule.get("from") or rule.get("to") or []
    return tuple(each["podSelector"]["matchLabels"].get(COMPONENT, "") for each in listed)


def _ports(rule: dict[str, Any]) -> set[int]:
    return {port["port"] for port in rule["ports"]}


def test_metrics_are_open_to_those_who_monitor_only() -> None:
    for name, wanted in (("defaults", False), ("guarded", True)):
        rules = [rule for each in of(name, "NetworkPolicy") for rule in each["spec"].get("ingress") or []]
        monitored = {
            port
            for rule in rules
            for peer in rule.get("from", [])
            if "monitoring" in str(peer.get("namespaceSelector"))
            for port in _ports(rule)
        }
        assert monitored == ({8001, 8002, 8090, 9000} if wanted else set())


def test_a_gpu_pool_asks_for_its_gpu_and_runtime_class() -> None:
    pool = of("gpu", "BaseModelPool")[0]
    assert pool["spec"]["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert pool["spec"]["podTemplate"]["spec"]["runtimeClassName"] == "nvidia"


def test_extra_objects_are_templates() -> None:
    extra = [each for each in objects(rendered("extended")) if each["kind"] == "ConfigMap"]
    assert extra == [
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": f"{RELEASE}-notes"},
            "data": {"gateway": f"{RELEASE}-gateway"},
        }
    ]


def test_numbers_are_written_as_they_were_given() -> None:
    gateway, registry = environment(pod("extended", "gateway")), environment(pod("extended", "registry"))
    assert (gateway["LORAPLANE_MAX_IN_FLIGHT"], gateway["LORAPLANE_REQUEST_TIMEOUT"]) == ("512", "900.5")
    assert registry["LORAPLANE_MAX_ARTIFACT"] == "1073741824"


def test_a_rendering_of_its_own_has_secrets_of_its_own() -> None:
    one, other = (objects(template(SETS["defaults"])) for _ in range(2))
    for mine, theirs in zip(one, other, strict=True):
        if mine["kind"] == "Secret":
            assert not set(mine["data"].values()) & set(theirs["data"].values())
        if mine["kind"] == "Secret" and "master.key" in mine["data"]:
            keys = [base64.b64decode(mine["data"][entry]).decode() for entry in ("master.key", "pepper.key")]
            assert [len(bytes.fromhex(key)) for key in keys] == [32, 32]
            assert keys[0] != keys[1]
