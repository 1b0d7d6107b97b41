"""The engine's admin port: `/state` messages, adapter operations, model config.

/state is newline-delimited JSON over one long GET (credential `state` or `admin`): Hello, Snapshot,
then Delta as things change (coalesced to 100 ms) and Heartbeat every 500 ms. `seq` grows by one per
message after Hello; a reader that sees a gap, or nothing for a second, drops the stream and its view.

  PUT    /adapters/{tenant}/{adapter}/{version}        PutAdapter  -> Residence   (admin; idempotent; answers when warm)
  DELETE /adapters/{tenant}/{adapter}/{version}        ?drain_s=   -> Residence   (admin; tombstone, drain, free)
  POST   /adapters/{tenant}/{adapter}/{version}/pin    Pin         -> Residence   (admin)
  GET    /adapters                                     -> Adapters                (admin | state)
  GET    /state                                        -> stream                  (admin | state)
  GET    /model                                        -> ModelInfo               (admin | state)
The digest travels in the body (PUT) or in the header X-Loraplane-Digest (DELETE, pin).
"""

from typing import Any, Literal

import msgspec

from loraplane_core.wire import PROTOCOL

ResidencyClass = Literal["device", "host", "disk", "loading", "absent"]
#: At these an adapter answers without a cold load; below them a warm adapter has drifted.
WARM: frozenset[ResidencyClass] = frozenset({"device", "host"})


class Residence(msgspec.Struct, kw_only=True, frozen=True):
    """Where one version is on one engine. `bytes` is what it takes in memory (device layout), known from `disk` on."""

    ref: str  # tenant/adapter@version
    digest: str  # full
    residency: ResidencyClass
    bytes: int = 0
    rank: int = 0  # largest rank in use
    pinned: bool = False
    warm_wanted: bool = False  # put by the operator, not merely cached for a request
    in_use: int = 0  # requests that hold it
    since: float = 0.0  # Unix seconds of the last change of class
    message: str = ""  # why a load failed


class Capacity(msgspec.Struct, kw_only=True, frozen=True):
    """Bytes and tokens of one engine; `slots` is what people read: adapters of median size that fit."""

    slots: int
    adapter_bytes: int  # budget on the device
    used_bytes: int
    host_bytes: int
    host_used_bytes: int = 0
    reserved_bytes: int = 0  # of adapter_bytes, by pinned adapters
    host_reserved_bytes: int = 0  # of host_bytes, by warm and pinned adapters
    kv_tokens: int  # that would fit with no adapter resident
    kv_tokens_displaced: int  # taken by adapters now
    max_rank: int = 0
    max_model_len: int = 0


class Load(msgspec.Struct, kw_only=True, frozen=True):
    running: int = 0
    waiting: int = 0
    kv_tokens_free: int = 0


class Hello(msgspec.Struct, kw_only=True, frozen=True, tag="hello"):
    protocol: int = PROTOCOL
    replica: str  # namespace/pool/ordinal
    boot: str
    base: str  # the base's name
    base_digest: str
    capacity: Capacity


class Snapshot(msgspec.Struct, kw_only=True, frozen=True, tag="snapshot"):
    seq: int
    adapters: list[Residence]
    capacity: Capacity
    load: Load


class Delta(msgspec.Struct, kw_only=True, frozen=True, tag="delta"):
    """Changed residences only; one with residency `absent` has left. None = unchanged."""

    seq: int
    adapters: list[Residence] = []
    capacity: Capacity | None = None
    load: Load | None = None


class Heartbeat(msgspec.Struct, kw_only=True, frozen=True, tag="heartbeat"):
    seq: int


StateMessage = Hello | Snapshot | Delta | Heartbeat

DELTA_SECONDS = 0.1
HEARTBEAT_SECONDS = 0.5
#: A reader takes the engine out after this long without a message (design §3, routable).
STATE_TIMEOUT_SECONDS = 1.0


class PutAdapter(msgspec.Struct, kw_only=True, frozen=True):
    digest: str
    bytes: int  # of the artifact, a bound for the fetch
    rank: int
    pinned: bool = False
    deadline_s: float = 30.0


class Pin(msgspec.Struct, kw_only=True, frozen=True):
    """The operator's marks on a resident version. `warm` False: no longer wished, from now on only cache."""

    pinned: bool
    warm: bool | None = None  # None leaves the mark as it is


class Adapters(msgspec.Struct, kw_only=True, frozen=True):
    protocol: int = PROTOCOL
    boot: str
    adapters: list[Residence]
    capacity: Capacity


class ModelInfo(msgspec.Struct, kw_only=True, frozen=True):
    """What the pool report tells the registry, so that preflight can check shapes."""

    protocol: int = PROTOCOL
    base: str
    base_digest: str
    config: dict[str, Any]  # the model's config.json
    dtype: str
    max_model_len: int
    max_rank: int
