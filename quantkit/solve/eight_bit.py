"""Eight bits: FP8 (E4M3) and INT8, symmetric, the largest value of a row, block or tensor to the largest code.

Scales are rounded to the dtype that is stored before any code is computed from them; what then lies beyond the range
clamps to its end. All zeros get scale 1. Shapes: R rows, C columns, B blocks of 128 rows or columns.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

LARGEST = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}
"""Largest finite value of each code; INT8's -128 is left out, so that codes are symmetric."""

SIDE = 128
"""Rows and columns of a block of a weight; columns of a group of an activation."""


def per_row(values_RC: Tensor, codes: torch.dtype, *, dtype: torch.dtype, least: float = 0) -> tuple[Tensor, Tensor]:
    """Codes [R, C] and scales [R, 1] in `dtype`: value = code * scale, scale = absmax / LARGEST, at least `least`."""
    scale_R1 = _stored(values_RC.abs().amax(-1, keepdim=True), codes, dtype).clamp(min=least)
    return nearest(values_RC.float() / scale_R1.float(), codes), scale_R1


def per_block(values_RC: Tensor, codes: torch.dtype, *, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Codes [R, C] and a scale for each 128 x 128 block: [ceil(R / 128), ceil(C / 128)]; the last ones may be cut."""
    rows, columns = values_RC.shape
    padded = functional.pad(values_RC.float(), (0, -columns % SIDE, 0, -rows % SIDE))
    tiles = padded.view(len(padded) // SIDE, SIDE, -1, SIDE)
    scale_BB = _stored(tiles.abs().amax((1, 3)), codes, dtype)
    found = nearest(tiles / scale_BB[:, None, :, None].float(), codes)
    return found.flatten(2).flatten(0, 1)[:rows, :columns].contiguous(), scale_BB


def per_tensor(values_RC: Tensor, codes: torch.dtype, *, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Codes [R, C] and one scale: [1]."""
    scale_1 = _stored(values_RC.abs().amax().reshape(1), codes, dtype)
    return nearest(values_RC.float() / scale_1.float(), codes), scale_1


def calibrated(max_abs_C: Tensor, codes: torch.dtype) -> Tensor:
    """The one scale of an activation whose largest values by column were seen in calibration: float32 [1]."""
    return _stored(max_abs_C.amax().reshape(1), codes, torch.float32)


def decode(codes_RC: Tensor, scale: Tensor) -> Tensor:
    """The values that codes stand for, float32. `scale`: of any of the shapes above."""
    if scale.ndim == 2 and scale.shape != (len(codes_RC), 1):
        rows, columns = codes_RC.shape
        scale = scale.repeat_interleave(SIDE, 0)[:rows].repeat_interleave(SIDE, 1)[:, :columns]
    return codes_RC.float() * scale.float()


def nearest(values: Tensor, codes: torch.dtype) -> Tensor:
    """The nearest code, halves to even; what lies beyond the range clamps to its end."""
    clamped = values.clamp(-LARGEST[codes], LARGEST[codes])
    return (clamped if codes.is_floating_point else clamped.round()).to(codes)


def _stored(absmax: Tensor, codes: torch.dtype, dtype: torch.dtype) -> Tensor:
    scale = (absmax.float() / LARGEST[codes]).to(dtype)
    return torch.where(scale == 0, torch.ones_like(scale), scale)
