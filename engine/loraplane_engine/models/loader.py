"""Base weights from *.safetensors, tensor by tensor; every tensor asked for must exist with its shape."""

from pathlib import Path

import torch
from safetensors import safe_open


class Weights:
    """All shards of a folder. Tensors come as `dtype` on `device`; `unused()` names those never taken."""

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype, self._device = dtype, device
        self._where: dict[str, Path] = {}
        for path in sorted(folder.glob("*.safetensors")):
            with safe_open(path, framework="pt") as shard:
                self._where.update(dict.fromkeys(shard.keys(), path))
        if not self._where:
            raise ValueError(f"{folder} holds no *.safetensors")
        self._taken: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return name in self._where

    def take(self, name: str, *shape: int) -> torch.Tensor:
        """Raises ValueError when the tensor is missing or has another shape."""
        if name not in self._where:
            raise ValueError(f"the base model lacks the tensor {name}")
        with safe_open(self._where[name], framework="pt") as shard:
            tensor: torch.Tensor = shard.get_tensor(name)
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{name} has the shape {list(tensor.shape)}; the config says {list(shape)}")
        self._taken.add(name)
        return tensor.to(device=self._device, dtype=self._dtype)

    def unused(self) -> list[str]:
        return sorted(set(self._where) - self._taken)
