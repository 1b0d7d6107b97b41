"""From options to a loaded model, its arena and the sizes that follow. Bad options stop the start."""

import logging
import os
from dataclasses import dataclass
from pathlib import Path

import torch

from loraplane_engine.adapters.image import VERSION, Layout
from loraplane_engine.adapters.sites import SITES_PER_LAYER
from loraplane_engine.adapters.table import DeviceTable
from loraplane_engine.adapters.words import Limits
from loraplane_engine.core.runner import Runner
from loraplane_engine.kernels import registry as kernels
from loraplane_engine.kernels.contract import GroupedLora, SiteGroup
from loraplane_engine.memory.arena import BLOCK, Arena, blocks_for, page_bytes_of
from loraplane_engine.models import registry as models
from loraplane_engine.models.config import BaseConfig, end_tokens, read_config
from loraplane_engine.models.loader import Weights
from loraplane_engine.options import CoreOptions

log = logging.getLogger(__name__)

DEFAULT_MODEL_LEN = 4096
DEFAULT_KV_MEMORY = 768 << 20
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class Base:
    """Everything that stays the same while the core runs."""

    config: BaseConfig
    end_tokens: frozenset[int]
    max_model_len: int
    layout: Layout
    arena: Arena
    table: DeviceTable
    lora: GroupedLora
    runner: Runner
    groups: list[SiteGroup]
    limits: Limits


def load(options: CoreOptions, arena_type: type[Arena] = Arena) -> Base:
    """Raises ValueError or OSError with a message for the person who starts the engine."""
    folder = Path(options.model)
    config = read_config(folder)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype_name = options.dtype
    if dtype_name == "auto":
        dtype_name = "bfloat16" if device.type == "cuda" else "float32"
    dtype = _DTYPES[dtype_name]
    _check(options, config)
    shape = {"layers": config.num_hidden_layers, "kv_heads": config.kv_heads, "head_dim": config.head_width}
    page_bytes = page_bytes_of(**shape, dtype=dtype)
    pages, budget = _sizes(options, page_bytes, _model_len(options, config))
    max_model_len = _fitting_len(options, _model_len(options, config), pages - budget)
    arena = arena_type(pages, **shape, dtype=dtype, device=device)
    table = DeviceTable(config.num_hidden_layers * SITES_PER_LAYER, device)
    lora = kernels.create("torch", arena.elements, table)
    model = models.create(config, Weights(folder, dtype, device), arena, lora, max_model_len)
    return Base(
        config=config,
        end_tokens=end_tokens(folder, config),
        max_model_len=max_model_len,
        layout=Layout(VERSION, dtype_name, page_bytes),
        arena=arena,
        table=table,
        lora=lora,
        runner=Runner(model, arena, lora),
        groups=model.site_groups,
        limits=Limits(budget, options.host_cache, options.slots, options.max_rank),
    )


def _model_len(options: CoreOptions, config: BaseConfig) -> int:
    return options.max_model_len or min(config.max_position_embeddings, DEFAULT_MODEL_LEN)


def _fitting_len(options: CoreOptions, wished: int, kv_pages: int) -> int:
    """The longest context that one request can always get: a chat without max_tokens asks for all of it."""
    most = kv_pages * BLOCK
    if wished <= most:
        return wished
    if options.max_model_len is not None:
        raise ValueError(
            f"max_model_len {wished} needs {blocks_for(wished)} pages of KV cache; the device memory leaves {kv_pages} "
            f"({most} tokens) beside what adapters may take: give device_memory more, adapter_memory or max_model_len "
            f"less"
        )
    log.warning("max_model_len is %d, not %d: the device memory has no room for more beside adapters", most, wished)
    return most


def _check(options: CoreOptions, config: BaseConfig) -> None:
    max_model_len = _model_len(options, config)
    if max_model_len > config.max_position_embeddings:
        raise ValueError(
            f"max_model_len {max_model_len} is over the base's own limit, {config.max_position_embeddings}"
        )
    if options.max_sequences < 1 or options.max_batch_tokens < options.max_sequences:
        raise ValueError(
            f"max_batch_tokens ({options.max_batch_tokens}) must be at least max_sequences ({options.max_sequences}), "
            "so that every running request gets its token"
        )
    if options.slots is not None and options.slots < 1:
        raise ValueError("slots must be at least 1, or unset")


def _sizes(options: CoreOptions, page_bytes: int, max_model_len: int) -> tuple[int, int]:
    """(pages of the arena, pages that adapters may take)."""
    one, asked = blocks_for(max_model_len), options.adapter_memory
    if options.device_memory is None:
        kv = max(one, min(DEFAULT_KV_MEMORY // page_bytes, options.max_sequences * one))
        budget = -(-kv // 3) if asked is None else asked // page_bytes
        return kv + budget, budget
    pages = options.device_memory // page_bytes
    if asked is not None:
        budget = asked // page_bytes
    elif options.max_model_len is None:
        budget = pages // 4  # the context is cut to what is left
    else:
        budget = min(pages // 4, max(0, pages - one))
    if pages - budget < 1 or budget < 0:
        raise ValueError(
            f"device_memory {options.device_memory} leaves no page of {page_bytes} bytes for the KV cache "
            f"beside adapter_memory {asked}"
        )
    return pages, budget


def available_cpus() -> int:
    """CPUs this process may use: its affinity, and the quota of its control group (v2)."""
    cpus = len(os.sched_getaffinity(0))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return max(1, min(cpus, round(int(quota) / int(period))))
    except (OSError, ValueError):  # no control group, or no quota ("max")
        return cpus
