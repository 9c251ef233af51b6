"""FP8 (E4M3) with one scale a row."""

from __future__ import annotations

import torch
from torch import Tensor

LARGEST = 448.0
"""Largest finite E4M3 value."""


def fp8(weight_OI: Tensor, *, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Values [O, I] in float8_e4m3fn and scales [O, 1] in `dtype`: w = value * scale, scale = absmax / 448.

    A row of zeros gets scale 1. The scale is rounded to `dtype` first; values are clamped to the range.
    """
    scale_O1 = (weight_OI.abs().amax(1, keepdim=True) / LARGEST).to(dtype)
    scale_O1 = torch.where(scale_O1 == 0, torch.ones_like(scale_O1), scale_O1)
    return to_fp8(weight_OI / scale_O1.float()), scale_O1


def to_fp8(values: Tensor) -> Tensor:
    """Nearest E4M3; what lies beyond the range clamps to its end."""
    return values.clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
