"""NetworkPolicies as one nftables table. Pure: objects of the API server in, the text for `nft -f -` out.

networking.k8s.io/v1 as its reference describes it, for IPv4, one node and routed pods. A packet to a pod is judged in
`forward`, after kube-proxy has put a pod's address in place of a Service's; one to the node itself in `input`, where it
can only be some pod's egress. What the node sends, the kubelet's probes among it, passes neither. Only the first packet
of a connection is judged, and what no rule lets through is dropped: the caller waits until its own deadline.
"""

import ipaddress
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

Object = dict[str, Any]
TABLE = "loraplane-policies"
_ENDED = ("Succeeded", "Failed")
_COMMENT_LENGTH = 120  # nft takes 128
#: Of IPv6 pods have link-local addresses alone, which no policy can name: a way to the node past all of them.
_ALWAYS = ("ct state established,related accept", 'iifname != "lo" meta nfproto ipv6 drop')


class _Direction(NamedTuple):
    type: str  # in policyTypes
    rules: str  # the field of the spec
    peers: str  # the field of a rule
    peer_address: str  # the other side's, in a packet


_INGRESS = _Direction("Ingress", "ingress", "from", "saddr")
_EGRESS = _Direction("Egress", "egress", "to", "daddr")


@dataclass(frozen=True)
class _Pod:
    """One with an address of its own that still runs."""

    namespace: str
    name: str
    address: str
    labels: Mapping[str, str]
    ports: Mapping[tuple[str, str], int]  # (name, protocol)


@dataclass(frozen=True)
class _World:
    pods: Sequence[_Pod]
    namespaces: Mapping[str, Mapping[str, str]]  # their labels


def render(policies: Iterable[Object], pods: Iterable[Object], namespaces: Iterable[Object]) -> str:
    """Applied in one transaction; replaces what an earlier text made. Raises ValueError for what it cannot express."""
    world = _World(_running(pods), {each["metadata"]["name"]: _labels(each) for each in namespaces})
    ordered = sorted(policies, key=lambda policy: (policy["metadata"]["namespace"], policy["metadata"]["name"]))
    chains: list[str] = []
    jumps: dict[_Direction, list[str]] = {_INGRESS: [], _EGRESS: []}
    for pod in world.pods:
        for direction in (_INGRESS, _EGRESS):
            applied = [policy for policy in ordered if _applies(policy, pod, direction)]
            if applied:
                name = f"{direction.rules}-{pod.address}"
                jumps[direction].append(f"{pod.address} : jump {name}")
                chains.append(_chain(name, [f"# {pod.namespace}/{pod.name}", *_judged(applied, pod, direction, world)]))
    leaving = [f"ip saddr vmap {{ {', '.join(jumps[_EGRESS])} }}"] if jumps[_EGRESS] else []
    entering = [f"ip daddr vmap {{ {', '.join(jumps[_INGRESS])} }}"] if jumps[_INGRESS] else []
    chains.append(_chain("forward", [_hook("forward"), *_ALWAYS, *leaving, *entering]))
    chains.append(_chain("input", [_hook("input"), *_ALWAYS, *leaving]))
    # A table that is not there cannot be deleted, and a second one of that name only adds to the first.
    table = f"table inet {TABLE}"
    return f"{table}\ndelete {table}\n{table} {{\n{''.join(chains)}}}\n"


def selects(selector: Object, labels: Mapping[str, str]) -> bool:
    """A label selector; an empty one selects everything. Raises ValueError for an unknown operator."""
    wanted = selector.get("matchLabels") or {}
    return all(labels.get(key) == value for key, value in wanted.items()) and all(
        _holds(each, labels) for each in selector.get("matchExpressions") or []
    )


def _holds(expression: Object, labels: Mapping[str, str]) -> bool:
    value, values = labels.get(expression["key"]), expression.get("values") or []
    match expression["operator"]:
        case "In":
            return value in values
        case "NotIn":
            return value not in values
        case "Exists":
            return value is not None
        case "DoesNotExist":
            return value is None
        case other:
            raise ValueError(f"no operator of a label selector: {other}")


def _running(pods: Iterable[Object]) -> list[_Pod]:
    """In a fixed order. An address can be a new pod's while the one that had it is still being deleted."""
    found: dict[str, _Pod] = {}
    for raw in sorted(pods, key=_age):
        status = raw.get("status") or {}
        address = status.get("podIP") or ""
        if address and status.get("phase") not in _ENDED and not raw["spec"].get("hostNetwork"):
            metadata = raw["metadata"]
            found[address] = _Pod(metadata["namespace"], metadata["name"], address, _labels(raw), _ports(raw["spec"]))
    return sorted(found.values(), key=lambda pod: (pod.namespace, pod.name))


def _age(raw: Object) -> tuple[bool, str, str]:
    metadata = raw["metadata"]
    return "deletionTimestamp" not in metadata, metadata.get("creationTimestamp") or "", metadata["name"]


def _labels(raw: Object) -> dict[str, str]:
    return dict(raw["metadata"].get("labels") or {})


def _ports(spec: Object) -> dict[tuple[str, str], int]:
    containers = [*(spec.get("initContainers") or []), *(spec.get("containers") or [])]
    ports = [port for container in containers for port in container.get("ports") or [] if port.get("name")]
    return {(port["name"], port.get("protocol") or "TCP"): int(port["containerPort"]) for port in ports}


def _applies(policy: Object, pod: _Pod, direction: _Direction) -> bool:
    spec = policy["spec"]
    types = spec.get("policyTypes") or ["Ingress", *(["Egress"] if "egress" in spec else [])]
    in_its_namespace = policy["metadata"]["namespace"] == pod.namespace
    return in_its_namespace and direction.type in types and selects(spec.get("podSelector") or {}, pod.labels)


def _judged(policies: Iterable[Object], pod: _Pod, direction: _Direction, world: _World) -> Iterator[str]:
    """What one of the policies lets through goes on; a pod always reaches itself."""
    yield f"ip {direction.peer_address} {pod.address} return"
    for policy in policies:
        name = f"{policy['metadata']['namespace']}/{policy['metadata']['name']}"[:_COMMENT_LENGTH]
        for rule in policy["spec"].get(direction.rules) or []:
            for match in _matches(rule, pod, direction, world):
                yield f'{match} return comment "{name}"'.strip()
    yield "counter drop"


def _matches(rule: Object, pod: _Pod, direction: _Direction, world: _World) -> Iterator[str]:
    """Any of these is let through. Without peers it is everybody, without ports every one of every protocol."""
    peers = rule.get(direction.peers) or []
    chosen = [each for each in world.pods if any(_is_peer(peer, pod.namespace, each, world) for peer in peers)]
    for port in rule.get("ports") or [{}]:
        if not isinstance(port.get("port"), str):
            for where in _where(peers, chosen, direction):
                yield f"{where} {_port(port)}".strip()
        elif direction is _INGRESS:  # a name is one of the pod's that is called
            number = pod.ports.get((port["port"], port.get("protocol") or "TCP"))
            for where in _where(peers, chosen, direction) if number is not None else ():
                yield f"{where} {_port({**port, 'port': number})}".strip()
        else:
            yield from _named(port, chosen if peers else world.pods, direction)


def _named(port: Object, called: Iterable[_Pod], direction: _Direction) -> Iterator[str]:
    by_number: dict[int, list[_Pod]] = defaultdict(list)
    for pod in called:
        number = pod.ports.get((port["port"], port.get("protocol") or "TCP"))
        if number is not None:
            by_number[number].append(pod)
    for number, pods in sorted(by_number.items()):
        yield f"{_addresses(pods, direction)} {_port({**port, 'port': number})}"


def _is_peer(peer: Object, own_namespace: str, pod: _Pod, world: _World) -> bool:
    """Both selectors: pods so labelled in namespaces so labelled. One that is not known is in no selection."""
    if "ipBlock" in peer:
        return False
    if "namespaceSelector" in peer:
        labels = world.namespaces.get(pod.namespace)
        there = labels is not None and selects(peer["namespaceSelector"] or {}, labels)
    else:
        there = pod.namespace == own_namespace
    return there and selects(peer.get("podSelector") or {}, pod.labels)


def _where(peers: Sequence[Object], chosen: Sequence[_Pod], direction: _Direction) -> Iterator[str]:
    if not peers:
        yield ""
    if chosen:
        yield _addresses(chosen, direction)
    for block in (peer["ipBlock"] for peer in peers if "ipBlock" in peer):
        network = ipaddress.ip_network(block["cidr"], strict=False)
        if network.version == 4:
            yield f"ip {direction.peer_address} {network}{_except(block.get('except') or [], direction)}"


def _except(cidrs: Iterable[str], direction: _Direction) -> str:
    """Without overlaps, which nft refuses."""
    networks = [ipaddress.IPv4Network(cidr, strict=False) for cidr in cidrs]
    left_out = ", ".join(str(each) for each in ipaddress.collapse_addresses(networks))
    return f" ip {direction.peer_address} != {{ {left_out} }}" if left_out else ""


def _addresses(pods: Iterable[_Pod], direction: _Direction) -> str:
    return f"ip {direction.peer_address} {{ {', '.join(pod.address for pod in pods)} }}"


def _port(port: Object) -> str:
    if not port:
        return ""
    protocol = (port.get("protocol") or "TCP").lower()
    if port.get("port") is None:
        return f"meta l4proto {protocol}"
    last = port.get("endPort")
    return f"{protocol} dport {port['port']}{f'-{last}' if last else ''}"


def _hook(name: str) -> str:
    return f"type filter hook {name} priority filter; policy accept;"


def _chain(name: str, lines: Iterable[str]) -> str:
    body = "".join(f"    {line}\n" for line in lines)
    return f"  chain {name} {{\n{body}  }}\n"
