"""Eight bits with one scale a row (or a token): FP8 (E4M3) and INT8, symmetric, absmax to the largest code."""

from __future__ import annotations

import torch
from torch import Tensor

LARGEST = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}
"""Largest finite value of each code; INT8's -128 is left out, so that codes are symmetric."""


def per_row(values_RC: Tensor, codes: torch.dtype, *, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Codes [R, C] and scales [R, 1] in `dtype`: value = code * scale, scale = absmax / LARGEST.

    A row of zeros gets scale 1. The scale is rounded to `dtype` first; what then lies beyond the range clamps to it.
    """
    scale_R1 = (values_RC.float().abs().amax(-1, keepdim=True) / LARGEST[codes]).to(dtype)
    scale_R1 = torch.where(scale_R1 == 0, torch.ones_like(scale_R1), scale_R1)
    return nearest(values_RC.float() / scale_R1.float(), codes), scale_R1


def nearest(values: Tensor, codes: torch.dtype) -> Tensor:
    """The nearest code, halves to even; what lies beyond the range clamps to its end."""
    clamped = values.clamp(-LARGEST[codes], LARGEST[codes])
    return (clamped if codes.is_floating_point else clamped.round()).to(codes)
