"""Forms of grouped LoRA by name, imported only when asked for (style.md 19)."""

import importlib

import torch

from loraplane_engine.adapters.table import DeviceTable
from loraplane_engine.kernels.contract import GroupedLora

#: name -> "module:class"; the class takes (arena elements, device table).
FORMS: dict[str, str] = {"torch": "loraplane_engine.kernels.torch_form:TorchLora"}


def create(name: str, elements: torch.Tensor, table: DeviceTable) -> GroupedLora:
    module, _, attribute = FORMS[name].partition(":")
    form: GroupedLora = getattr(importlib.import_module(module), attribute)(elements, table)
    return form
