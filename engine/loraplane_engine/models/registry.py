"""Model families by the checkpoint's architecture name, imported only when asked for."""

import importlib
from typing import Protocol

import torch

from loraplane_engine.kernels.contract import GroupedLora, SiteGroup
from loraplane_engine.memory.arena import Arena
from loraplane_engine.models.batch import ForwardBatch
from loraplane_engine.models.config import BaseConfig
from loraplane_engine.models.loader import Weights

FAMILIES: dict[str, str] = {"LlamaForCausalLM": "loraplane_engine.models.llama:Llama"}


class Model(Protocol):
    @property
    def site_groups(self) -> list[SiteGroup]: ...

    def forward(self, batch: ForwardBatch) -> torch.Tensor: ...


def create(config: BaseConfig, weights: Weights, arena: Arena, lora: GroupedLora, max_len: int) -> Model:
    """Raises ValueError when no family serves the architecture."""
    for architecture in config.architectures:
        if architecture in FAMILIES:
            module, _, attribute = FAMILIES[architecture].partition(":")
            model: Model = getattr(importlib.import_module(module), attribute)(config, weights, arena, lora, max_len)
            return model
    raise ValueError(f"no model family serves {', '.join(config.architectures)}; known: {', '.join(FAMILIES)}")
