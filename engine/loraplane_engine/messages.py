"""What the server process and the core process of one engine say to each other (zmq PAIR, msgpack).

The server owns HTTP, text, fetching and the disk tier. The core owns the model, the arena, the host and
device tiers and the scheduler. They start and end together, so this needs no protocol number.
"""

from typing import Literal

import msgspec

FinishReason = Literal["stop", "length", "abort"]


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Validated by the server. `temperature` 0 is greedy; `top_k` 0 and `top_p` 1 are off."""

    max_tokens: int
    min_tokens: int = 0  # end-of-sequence tokens are masked before this many
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logprobs: int | None = None  # number of alternatives besides the sampled token; None = no logprobs
    prompt_logprobs: bool = False  # echo with logprobs


class AdapterKey(msgspec.Struct, frozen=True, array_like=True):
    """The adapter id inside one engine: `ref` is tenant/adapter@version."""

    ref: str
    digest: str


# server -> core


class Generate(msgspec.Struct, frozen=True, kw_only=True, tag=True, array_like=True):
    request: str
    adapter: AdapterKey | None  # None = the base model
    tenant: str  # for fairness; the adapter's, or the caller's for the base
    prompt: list[int]
    sampling: SamplingParams
    cold: bool = False  # the server had to load the adapter for this request


class Abort(msgspec.Struct, frozen=True, tag=True, array_like=True):
    request: str


class LoadAdapter(msgspec.Struct, frozen=True, kw_only=True, tag=True, array_like=True):
    """Map the engine image at `image` into the host tier. Answered by AdapterState or AdapterFailed.

    `wait_s`: how long it may wait for room that adapters in use will leave.
    """

    key: AdapterKey
    image: str
    warm_wanted: bool = False
    wait_s: float = 0.0


class UnloadAdapter(msgspec.Struct, frozen=True, kw_only=True, tag=True, array_like=True):
    """Refuse new requests at once, drain running ones up to `drain_s`, then abort them and free the pages."""

    key: AdapterKey
    drain_s: float


class MarkAdapter(msgspec.Struct, frozen=True, kw_only=True, tag=True, array_like=True):
    """Change the marks of a loaded adapter; None leaves one as it is.

    Answered by AdapterState; a pin that does not fit by AdapterFailed first, and the other mark stands.
    """

    key: AdapterKey
    pinned: bool | None = None
    warm_wanted: bool | None = None


class Shutdown(msgspec.Struct, frozen=True, tag=True, array_like=True):
    pass


ToCore = Generate | Abort | LoadAdapter | UnloadAdapter | MarkAdapter | Shutdown


# core -> server


class CoreReady(msgspec.Struct, frozen=True, kw_only=True, tag=True, array_like=True):
    """Sent once, when the base is loaded."""

    page_bytes: int
    layout: str  # identifies the engine-image layout this core reads: version, dtype, page size
    max_model_len: int
    vocab_size: int
    lora_form: str  # which grouped-LoRA form is in use: "torch" | "native" | "triton"
    threads: int


class Scheduled(msgspec.Struct, frozen=True, kw_only=True, tag=True, array_like=True):
    """The request's first token is being computed; what the response headers need is known."""

    request: str
    queue_ms: float
    cold: bool  # the adapter was not warm (on the host or the device) when the request came


class TokenLogprob(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    token: int
    logprob: float
    top: list[tuple[int, float]] = []


class Output(msgspec.Struct, frozen=True, kw_only=True, tag=True, array_like=True):
    """New tokens of one request. The stop token itself is not among them (unless ignore_eos)."""

    request: str
    tokens: list[int]
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None  # with the first output only
    finish: FinishReason | None = None
    stop_token: int | None = None  # the token that ended it


class RequestFailed(msgspec.Struct, frozen=True, kw_only=True, tag=True, array_like=True):
    """`code` is a code of loraplane_core.errors."""

    request: str
    status: int
    code: str
    message: str


class AdapterState(msgspec.Struct, frozen=True, kw_only=True, tag=True, array_like=True):
    """An adapter changed class, marks or in-use count. `absent` = its memory is free."""

    key: AdapterKey
    residency: Literal["device", "host", "absent"]
    bytes: int
    rank: int
    pinned: bool
    warm_wanted: bool
    in_use: int


class AdapterFailed(msgspec.Struct, frozen=True, kw_only=True, tag=True, array_like=True):
    key: AdapterKey
    code: str
    message: str


class StepStats(msgspec.Struct, frozen=True, kw_only=True, tag=True, array_like=True):
    """Sent at most every 100 ms while anything changes. Counters are totals since the start."""

    running: int
    waiting: int
    steps: int
    tokens: int  # positions computed (prefill and decode)
    generated: int
    lora_tokens: int  # positions computed with an adapter
    padded_tokens: int  # must stay 0
    adapters_in_step_max: int  # distinct adapters, the largest of any step since the last StepStats
    adapters_in_step_histogram: list[int]  # totals: index = number of distinct adapters in a step (last bin: or more)
    tokens_by_adapter: dict[str, int]  # ref -> positions computed, total
    step_seconds: float  # total
    swaps_in: int  # host -> device, total
    evictions: int
    pages_total: int
    pages_kv: int
    pages_adapters: int
    page_tokens: int
    adapter_budget_bytes: int
    adapter_used_bytes: int
    adapter_reserved_bytes: int  # of the budget, by pinned adapters
    host_budget_bytes: int
    host_used_bytes: int
    host_reserved_bytes: int  # of the budget, by warm and pinned adapters
    kv_tokens_total: int
    kv_tokens_displaced: int
    kv_tokens_free: int


FromCore = CoreReady | Scheduled | Output | RequestFailed | AdapterState | AdapterFailed | StepStats


# A zmq message has one frame per message: what a step produced travels together. The server binds the
# endpoint before it starts the core; the core connects.
encoder = msgspec.msgpack.Encoder()
to_core_decoder: msgspec.msgpack.Decoder[ToCore] = msgspec.msgpack.Decoder(ToCore)
from_core_decoder: msgspec.msgpack.Decoder[FromCore] = msgspec.msgpack.Decoder(FromCore)
