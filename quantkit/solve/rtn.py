"""Plain rounding: the min-max grid, the nearest code. What every other method is measured against."""

from __future__ import annotations

import torch
from torch import Tensor

from quantkit.solve.grids import Grid, encode, minmax


def rtn(
    weight_OI: Tensor, group_size: int, *, symmetric: bool, dtype: torch.dtype, bits: int = 4
) -> tuple[Tensor, Grid]:
    """Codes (uint8 [O, I]) and grid of a float32 weight; `dtype` is what scales are stored in."""
    grid = minmax(weight_OI, group_size, symmetric=symmetric, dtype=dtype, bits=bits)
    return encode(weight_OI, grid), grid
