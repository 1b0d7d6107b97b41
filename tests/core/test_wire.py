"""What crosses process borders."""

import msgspec
import pytest

from loraplane_core.errors import InvalidRequest, ProtocolMismatch
from loraplane_core.wire import PROTOCOL, check_protocol, decode, encode
from loraplane_core.wire.engine import Capacity, Delta, Heartbeat, Hello, Load, Residence, Snapshot, StateMessage
from loraplane_core.wire.registry import FeedChange, Version
from loraplane_core.wire.supervisor import ListWorkloads, RestartReplica, SupervisorRequest

CAPACITY = Capacity(slots=3, adapter_bytes=10, used_bytes=1, host_bytes=5, kv_tokens=100, kv_tokens_displaced=7)
RESIDENCE = Residence(ref="acme/style@1", digest="0" * 64, residency="host")


@pytest.mark.parametrize(
    "message",
    [
        Hello(replica="default/smol/0", boot="x", base="toy", base_digest="0" * 64, capacity=CAPACITY),
        Snapshot(seq=1, adapters=[RESIDENCE], capacity=CAPACITY, load=Load(running=2)),
        Delta(seq=2, adapters=[RESIDENCE]),
        Heartbeat(seq=3),
    ],
)
def test_state_messages_are_told_apart_by_their_tag(message: StateMessage) -> None:
    assert msgspec.json.decode(encode(message), type=StateMessage) == message


def test_supervisor_requests_are_told_apart_by_their_tag() -> None:
    for request in (ListWorkloads(), RestartReplica(namespace="a", pool="b", ordinal=1)):
        assert msgspec.json.decode(encode(request), type=SupervisorRequest) == request


def test_fields_of_a_later_protocol_are_ignored() -> None:
    found = decode(b'{"cursor": 4, "kind": "tenant", "tenant": "acme", "from_the_future": [1]}', FeedChange)
    assert found == FeedChange(cursor=4, kind="tenant", tenant="acme")


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"{", "unreadable"),
        (b"\xff", "unreadable"),
        (b"{}", "tenant"),
        (b'{"tenant": 1, "adapter": "a", "version": 1, "state": "validated"}', r"\$.tenant"),
        (b'{"tenant": "a", "adapter": "a", "version": 1, "state": "fine"}', r"\$.state"),
    ],
)
def test_an_unreadable_body_is_refused_naming_the_path(body: bytes, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        decode(body, Version)


def test_this_protocol_and_the_one_before_are_spoken() -> None:
    for number in (PROTOCOL, PROTOCOL - 1):
        check_protocol(number, "the engine")
    for number in (PROTOCOL + 1, PROTOCOL - 2):
        with pytest.raises(ProtocolMismatch, match="the engine"):
            check_protocol(number, "the engine")
