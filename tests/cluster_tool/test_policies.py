"""NetworkPolicies as nftables rules; that the kernel reads them so is tested in tests/cluster/node."""

from typing import Any

import pytest

from tests.cluster.tool.policies import render
from tests.cluster.tool.policies.rules import selects
from tests.cluster_tool.firewall import Firewall, Packet

Object = dict[str, Any]
WEB, CLIENT, OTHER, FAR = "10.244.0.2", "10.244.0.3", "10.244.0.4", "10.244.0.5"
OUTSIDE, NODE = "203.0.113.7", "10.244.255.1"
NAMESPACES = [
    {"metadata": {"name": name, "labels": {"name": name, "tier": tier}}} for name, tier in (("a", "x"), ("b", "y"))
]


def pod(namespace: str, name: str, address: str, *ports: Object, **fields: Any) -> Object:
    container = {"name": "main", "ports": list(ports)}
    return {
        "metadata": {"namespace": namespace, "name": name, "labels": {"app": name}, **fields.pop("metadata", {})},
        "spec": {"containers": [container], **fields.pop("spec", {})},
        "status": {"phase": "Running", "podIP": address, **fields},
    }


HTTP = {"name": "http", "containerPort": 8080, "protocol": "TCP"}
PODS = [pod("a", "web", WEB, HTTP), pod("a", "client", CLIENT), pod("a", "other", OTHER), pod("b", "client", FAR)]


def policy(name: str = "p", namespace: str = "a", **spec: Any) -> Object:
    return {"metadata": {"namespace": namespace, "name": name}, "spec": {"podSelector": {}, **spec}}


def firewall(*policies: Object, pods: list[Object] = PODS) -> Firewall:
    return Firewall(render(policies, pods, NAMESPACES))


def app(name: str) -> Object:
    return {"matchLabels": {"app": name}}


def ingress(*peers: Object, ports: list[Object] | None = None) -> Object:
    rule = {**({"from": list(peers)} if peers else {}), **({"ports": ports} if ports else {})}
    return policy(podSelector=app("web"), policyTypes=["Ingress"], ingress=[rule])


def egress(*peers: Object, ports: list[Object] | None = None) -> Object:
    rule = {**({"to": list(peers)} if peers else {}), **({"ports": ports} if ports else {})}
    return policy(podSelector=app("client"), policyTypes=["Egress"], egress=[rule])


def test_without_a_policy_everything_passes() -> None:
    rules = firewall()
    assert rules.lets(Packet(CLIENT, WEB))
    assert rules.lets(Packet(WEB, NODE), "input")


def test_a_selected_pod_is_shut_in_the_directions_of_its_policy_and_no_other_is() -> None:
    rules = firewall(policy(podSelector=app("web"), policyTypes=["Ingress"]))
    assert not rules.lets(Packet(CLIENT, WEB))
    assert not rules.lets(Packet(OUTSIDE, WEB))
    assert rules.lets(Packet(WEB, CLIENT))
    assert rules.lets(Packet(CLIENT, OTHER))
    rules = firewall(policy(podSelector=app("web"), policyTypes=["Egress"]))
    assert rules.lets(Packet(CLIENT, WEB))
    for target in (CLIENT, FAR, OUTSIDE):
        assert not rules.lets(Packet(WEB, target))
    assert not rules.lets(Packet(WEB, NODE, 6443), "input")
    assert rules.lets(Packet(CLIENT, NODE, 6443), "input")


@pytest.mark.parametrize(
    ("spec", "shut"),
    [({"ingress": []}, [True, False]), ({"ingress": [], "egress": []}, [True, True]), ({}, [True, False])],
)
def test_the_types_of_a_policy_that_names_none_follow_from_its_rules(spec: Object, shut: list[bool]) -> None:
    rules = firewall(policy(podSelector=app("web"), **spec))
    assert [not rules.lets(Packet(CLIENT, WEB)), not rules.lets(Packet(WEB, CLIENT))] == shut


@pytest.mark.parametrize(
    ("peer", "let_in"),
    [
        ({"podSelector": app("client")}, {CLIENT}),
        ({"podSelector": {}}, {CLIENT, OTHER}),
        ({"namespaceSelector": {"matchLabels": {"name": "b"}}}, {FAR}),
        ({"namespaceSelector": {}}, {CLIENT, OTHER, FAR}),
        ({"namespaceSelector": {"matchLabels": {"tier": "x"}}, "podSelector": app("client")}, {CLIENT}),
        ({"namespaceSelector": {"matchLabels": {"tier": "y"}}, "podSelector": app("other")}, set()),
        ({"ipBlock": {"cidr": "203.0.113.0/24"}}, {OUTSIDE}),
        ({"ipBlock": {"cidr": "0.0.0.0/0", "except": ["10.244.0.4/32", "10.244.0.0/30"]}}, {FAR, OUTSIDE}),
        ({"ipBlock": {"cidr": "0.0.0.0/0", "except": ["10.0.0.0/8", "10.244.0.0/16"]}}, {OUTSIDE}),
        ({"ipBlock": {"cidr": "2001:db8::/32"}}, set()),
    ],
)
def test_a_peer_is_who_it_selects(peer: Object, let_in: set[str]) -> None:
    callers = {CLIENT, OTHER, FAR, OUTSIDE}
    rules = firewall(ingress(peer))
    assert {each for each in callers if rules.lets(Packet(each, WEB))} == let_in


def test_any_peer_of_a_rule_and_any_policy_of_a_pod_lets_in() -> None:
    rules = firewall(
        ingress({"podSelector": app("client")}, {"ipBlock": {"cidr": f"{OUTSIDE}/32"}}),
        policy(
            "q", policyTypes=["Ingress"], ingress=[{"from": [{"namespaceSelector": {"matchLabels": {"name": "b"}}}]}]
        ),
    )
    assert [rules.lets(Packet(each, WEB)) for each in (CLIENT, OUTSIDE, FAR, OTHER)] == [True, True, True, False]


def test_a_rule_without_peers_lets_everybody_in_on_its_ports() -> None:
    rules = firewall(ingress(ports=[{"port": 80}, {"port": 82}]))
    assert [rules.lets(Packet(OUTSIDE, WEB, port)) for port in (80, 81, 82)] == [True, False, True]
    assert firewall(ingress()).lets(Packet(OUTSIDE, WEB, 81, "udp"))


@pytest.mark.parametrize(
    ("port", "open_ports"),
    [
        ({"port": 80}, {("tcp", 80)}),
        ({"port": 80, "protocol": "UDP"}, {("udp", 80)}),
        ({"port": 80, "endPort": 8080, "protocol": "TCP"}, {("tcp", 80), ("tcp", 8080)}),
        ({"protocol": "UDP"}, {("udp", 80), ("udp", 8080)}),
        ({"port": "http"}, {("tcp", 8080)}),
        ({"port": "http", "protocol": "UDP"}, set()),
        ({"port": "unknown"}, set()),
    ],
)
def test_a_port_is_a_number_a_range_a_name_or_a_whole_protocol(port: Object, open_ports: set[tuple[str, int]]) -> None:
    asked = {(protocol, number) for protocol in ("tcp", "udp") for number in (80, 8080)}
    for rules, source, target in (
        (firewall(ingress({"podSelector": {}}, ports=[port])), OTHER, WEB),
        (firewall(egress({"podSelector": {}}, ports=[port])), CLIENT, WEB),
    ):
        found = {
            (protocol, number) for protocol, number in asked if rules.lets(Packet(source, target, number, protocol))
        }
        assert found == open_ports


def test_a_name_of_a_port_is_each_called_pods_own() -> None:
    twin = pod("a", "twin", FAR, {**HTTP, "containerPort": 9090})
    for rule in (egress({"podSelector": {}}, ports=[{"port": "http"}]), egress(ports=[{"port": "http"}])):
        rules = firewall(rule, pods=[*PODS[:3], twin])
        assert [rules.lets(Packet(CLIENT, WEB, port)) for port in (8080, 9090)] == [True, False]
        assert [rules.lets(Packet(CLIENT, FAR, port)) for port in (8080, 9090)] == [False, True]
        assert not rules.lets(Packet(CLIENT, OUTSIDE, 8080))


def test_both_sides_must_let_a_packet_pass() -> None:
    out, into = egress({"podSelector": app("web")}), ingress({"podSelector": app("client")})
    assert firewall(out, into).lets(Packet(CLIENT, WEB))
    assert not firewall(out, ingress({"podSelector": app("other")})).lets(Packet(CLIENT, WEB))
    assert not firewall(egress({"podSelector": app("other")}), into).lets(Packet(CLIENT, WEB))


def test_the_node_is_reached_where_egress_names_its_address_and_port() -> None:
    rules = firewall(egress({"ipBlock": {"cidr": f"{NODE}/32"}}, ports=[{"port": 6443}]))
    assert rules.lets(Packet(CLIENT, NODE, 6443), "input")
    assert not rules.lets(Packet(CLIENT, NODE, 10250), "input")


def test_a_pod_reaches_itself() -> None:
    rules = firewall(policy(policyTypes=["Ingress", "Egress"]))
    assert rules.lets(Packet(WEB, WEB))


@pytest.mark.parametrize(
    "changed", [{"phase": "Succeeded"}, {"phase": "Failed"}, {"podIP": ""}, {"spec": {"hostNetwork": True}}]
)
def test_a_pod_without_an_address_of_its_own_neither_is_selected_nor_selects(changed: Object) -> None:
    pods = [*PODS[:1], pod("a", "client", CLIENT, **changed)]
    assert not firewall(ingress({"podSelector": app("client")}), pods=pods).lets(Packet(CLIENT, WEB))
    assert firewall(egress(), policy(policyTypes=["Egress"]), pods=pods).lets(Packet(CLIENT, WEB))


def test_an_address_belongs_to_the_pod_that_stays() -> None:
    gone = pod("a", "client", FAR, metadata={"deletionTimestamp": "2026-01-01T00:00:00Z"})
    for pods in ([*PODS, gone], [gone, *PODS]):
        rules = firewall(ingress({"podSelector": app("client")}), pods=pods)
        assert rules.lets(Packet(CLIENT, WEB))
        assert not rules.lets(Packet(FAR, WEB))


def test_pods_of_a_namespace_that_is_not_known_are_nobodys_peers() -> None:
    rules = Firewall(render([ingress({"namespaceSelector": {}})], PODS, NAMESPACES[:1]))
    assert [rules.lets(Packet(each, WEB)) for each in (CLIENT, FAR)] == [True, False]


@pytest.mark.parametrize(
    ("expression", "selected"),
    [
        ({"key": "app", "operator": "In", "values": ["web"]}, [True, False, False]),
        ({"key": "app", "operator": "NotIn", "values": ["web"]}, [False, True, True]),
        ({"key": "app", "operator": "Exists"}, [True, True, False]),
        ({"key": "app", "operator": "DoesNotExist"}, [False, False, True]),
    ],
)
def test_expressions_of_a_selector(expression: Object, selected: list[bool]) -> None:
    labels: list[dict[str, str]] = [{"app": "web"}, {"app": "other"}, {}]
    assert [selects({"matchExpressions": [expression]}, each) for each in labels] == selected
    also = {"matchLabels": {"app": "web"}, "matchExpressions": [expression]}
    assert [selects(also, each) for each in labels] == [selected[0], False, False]


def test_what_cannot_be_expressed_is_refused() -> None:
    with pytest.raises(ValueError, match="Near"):
        firewall(policy(podSelector={"matchExpressions": [{"key": "app", "operator": "Near"}]}))


def test_the_rules_do_not_depend_on_the_order_of_what_is_listed() -> None:
    policies = [ingress({"namespaceSelector": {}}), policy("q", policyTypes=["Egress"])]
    assert render(policies, PODS, NAMESPACES) == render(policies[::-1], PODS[::-1], NAMESPACES[::-1])
