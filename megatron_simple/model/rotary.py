"""Rotary position embedding, half-split as Hugging Face's Llama has it (dim i pairs with i + H / 2)."""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

# Llama 3.1's rule: long wavelengths are slowed by `factor`, short ones kept, between them a smooth blend.
LLAMA31_SCALING = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def inverse_frequencies(head_dim: int, base: float, *, scaling: str | None, dtype: torch.dtype) -> Tensor:
    """[H / 2] radians per position: base^(-2 i / H), scaled by Llama 3.1's rule if `scaling` names it."""
    exponent = torch.arange(0, head_dim, 2, dtype=torch.int64).to(dtype) / head_dim
    frequencies = 1.0 / (base**exponent)
    if scaling is None:
        return frequencies
    rule = LLAMA31_SCALING
    original = rule["original_max_position_embeddings"]
    wavelength = 2 * math.pi / frequencies
    low, high = original / rule["low_freq_factor"], original / rule["high_freq_factor"]
    blend = (original / wavelength - rule["low_freq_factor"]) / (rule["high_freq_factor"] - rule["low_freq_factor"])
    slowed = frequencies / rule["factor"]
    middle = (1 - blend) * slowed + blend * frequencies
    return torch.where(wavelength > low, slowed, torch.where(wavelength < high, frequencies, middle))


@torch.compiler.assume_constant_result  # a compiled block holds the table instead of computing it in every step
def rotary_table(
    length: int, head_dim: int, *, base: float, scaling: str | None, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """cos and sin [S, H] of positions 0..S-1, computed in fp32 (or wider) and rounded to `dtype`."""
    return _table(length, head_dim, base, scaling, dtype, device)


@functools.lru_cache(maxsize=16)
def _table(
    length: int, head_dim: int, base: float, scaling: str | None, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(dtype, torch.float32)
    with torch.no_grad():
        frequencies = inverse_frequencies(head_dim, base, scaling=scaling, dtype=wide)
        angles = torch.outer(torch.arange(length, dtype=wide), frequencies)  # [S, H / 2]
        angles = torch.cat([angles, angles], dim=-1).to(device)
        return angles.cos().to(dtype), angles.sin().to(dtype)


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates x [B, heads, S, H] by the table [S, H]."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin
