"""What the server process hands the core process when it starts it (JSON on the command line)."""

from typing import Literal

import msgspec

Dtype = Literal["auto", "float32", "bfloat16", "float16"]


class CoreOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sizes are bytes. None means: derive it (the derivation is documented per field)."""

    model: str  # folder with config.json and *.safetensors
    dtype: Dtype = "auto"  # auto = bfloat16 on a GPU, float32 on a CPU
    # None = the base's own limit, at most 4096 and at most what device_memory has room for; one given that has no
    # room stops the start.
    max_model_len: int | None = None
    max_batch_tokens: int = 512  # positions computed in one step
    max_sequences: int = 64  # requests running at once; never a count of adapters
    # The arena; None = 768 MiB for the KV cache, or less when every sequence at full length needs less, beside
    # what adapters may take.
    device_memory: int | None = None
    adapter_memory: int | None = None  # the most of the arena that adapters may take; None = a quarter of it
    host_cache: int = 256 << 20  # engine images kept in host memory
    slots: int | None = None  # caps adapters on the device at once; None = only bytes decide
    max_rank: int = 256
    threads: int | None = None  # None = the CPUs this process may use
