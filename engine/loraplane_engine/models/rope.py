"""Rotary position embedding, the half-split form of the Hugging Face checkpoints."""

import math
from collections.abc import Mapping
from typing import Any

import torch


class Rope:
    """Tables of cos and sin for every position, [positions, head_dim]; sin carries the sign of the rotation."""

    def __init__(self, inverse_frequencies: torch.Tensor, positions: int, dtype: torch.dtype) -> None:
        angles = torch.outer(torch.arange(positions, dtype=torch.float32), inverse_frequencies)
        cos, sin = angles.cos(), angles.sin()
        self._cos = torch.cat([cos, cos], dim=1).to(dtype)
        self._sin = torch.cat([-sin, sin], dim=1).to(dtype)

    def at(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin of the batch's positions, [rows, 1, head_dim]."""
        return self._cos[positions].unsqueeze(1), self._sin[positions].unsqueeze(1)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [rows, heads, head_dim]."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


def inverse_frequencies(head_dim: int, theta: float, scaling: Mapping[str, Any]) -> torch.Tensor:
    """[head_dim / 2]. `scaling` is the config's rope_scaling or rope_parameters; raises ValueError if unknown.

    The llama3 rule (Llama 3.1 model card): long wavelengths are divided by `factor`, short ones kept, and
    those between are interpolated.
    """
    inverse = 1.0 / (theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim))
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return inverse
    factor = float(scaling["factor"])
    if kind == "linear":
        return inverse / factor
    if kind != "llama3":
        raise ValueError(f"rope scaling {kind!r} is not supported (default, linear, llama3 are)")
    low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    original = float(scaling["original_max_position_embeddings"])
    wavelength = 2 * math.pi / inverse
    smooth = ((original / wavelength - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - smooth) * inverse / factor + smooth * inverse
