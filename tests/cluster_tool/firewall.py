"""Reads the rules that tests.cluster.tool.policies makes, and judges a first packet by them, as the kernel would."""

import ipaddress
import re
from dataclasses import dataclass, field

from tests.cluster.tool.policies import TABLE

_PROTOCOLS = ("tcp", "udp", "sctp")


@dataclass(frozen=True)
class Packet:
    source: str
    target: str
    port: int = 80
    protocol: str = "tcp"


@dataclass
class Firewall:
    """Raises ValueError for words that it does not know, so that no rule is taken for another."""

    text: str
    chains: dict[str, list[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        head = f"table inet {TABLE}\ndelete table inet {TABLE}\n"
        assert self.text.startswith(head)
        for name, body in re.findall(r"^  chain (\S+) \{\n(.*?)^  \}\n", self.text, re.MULTILINE | re.DOTALL):
            self.chains[name] = [line.strip() for line in body.splitlines() if not line.strip().startswith("#")]

    def lets(self, packet: Packet, hook: str = "forward") -> bool:
        first, *rules = self.chains[hook]
        assert first == f"type filter hook {hook} priority filter; policy accept;"
        return self._verdict(rules, packet) != "drop"

    def _verdict(self, rules: list[str], packet: Packet) -> str:
        for rule in rules:
            words = re.sub(r' comment "[^"]*"', "", rule).replace("counter ", "")
            if words == "ct state established,related accept" or "nfproto ipv6" in words:
                continue  # no first packet, and none of IPv4
            lookup = re.fullmatch(r"ip (saddr|daddr) vmap \{ (.*) \}", words)
            if lookup:
                targets = dict(entry.split(" : jump ") for entry in lookup[2].split(", "))
                chain = targets.get(_address(packet, lookup[1]))
                if chain is not None and self._verdict(self.chains[chain], packet) == "drop":
                    return "drop"
                continue
            match, _, verdict = words.rpartition(" ")
            if verdict not in ("return", "drop"):
                raise ValueError(rule)
            if _matches(match, packet):
                return verdict
        return "return"


def _matches(match: str, packet: Packet) -> bool:
    while match:
        found = re.match(r"ip (saddr|daddr) (!= )?(?:\{ ([^}]*) \}|(\S+)) ?", match)
        if found:
            networks = [ipaddress.ip_network(each) for each in (found[3] or found[4]).split(", ")]
            inside = any(ipaddress.ip_address(_address(packet, found[1])) in network for network in networks)
            holds = inside != bool(found[2])
        elif found := re.match(rf"({'|'.join(_PROTOCOLS)}) dport (\d+)(?:-(\d+))? ?", match):
            in_range = int(found[2]) <= packet.port <= int(found[3] or found[2])
            holds = packet.protocol == found[1] and in_range
        elif found := re.match(rf"meta l4proto ({'|'.join(_PROTOCOLS)}) ?", match):
            holds = packet.protocol == found[1]
        else:
            raise ValueError(match)
        if not holds:
            return False
        match = match[found.end() :]
    return True


def _address(packet: Packet, side: str) -> str:
    return packet.source if side == "saddr" else packet.target
