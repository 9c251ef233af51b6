"""Grids of INT4 and INT8: w = (code - zero) * scale, codes 0..top, a scale and a zero for each row and column group.

Scales are rounded to the dtype that is stored before any code is computed from them. Symmetric grids have the middle
code as zero: 8 of 0..15, 128 of 0..255.
Shapes: O rows, I columns, G groups, C columns of one group.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# Shares of the largest weight that a searched grid may keep; 1 is the plain min-max grid.
_SHRINKS = tuple(1.0 - 0.04 * step for step in range(13))


@dataclass(frozen=True)
class Grid:
    """scale_OG holds only values of the stored dtype, as float32; zero_OG whole numbers 0..top, as float32."""

    scale_OG: Tensor
    zero_OG: Tensor
    top: int = 15
    """The largest code: 2 ** bits - 1."""

    def columns(self, columns: int) -> Grid:
        """The same grid spread over the columns of each group: [O, I] each."""
        width = columns // self.scale_OG.shape[1]
        return Grid(self.scale_OG.repeat_interleave(width, 1), self.zero_OG.repeat_interleave(width, 1), self.top)


def middle(bits: int) -> int:
    """The zero point of a symmetric grid."""
    return int(2 ** (bits - 1))


def width_of(group_size: int, columns: int) -> int:
    """Columns of one group; group size -1 is a whole row."""
    return columns if group_size == -1 else group_size


def minmax(weight_OI: Tensor, group_size: int, *, symmetric: bool, dtype: torch.dtype, bits: int = 4) -> Grid:
    """The plain grid of each group: from its smallest to its largest weight, zero included. A zero group gets scale 1.

    Args:    weight_OI: float32. dtype: what scales are stored in.
    """
    width = width_of(group_size, weight_OI.shape[1])
    low_OG, high_OG = torch.aminmax(weight_OI.reshape(len(weight_OI), -1, width), dim=2)
    return _grid(low_OG.clamp(max=0), high_OG.clamp(min=0), symmetric, dtype, bits)


def _grid(low: Tensor, high: Tensor, symmetric: bool, dtype: torch.dtype, bits: int) -> Grid:
    top = 2**bits - 1
    if symmetric:
        scale = _stored(torch.maximum(-low, high) * (2 / top), dtype)
        return Grid(scale, torch.full_like(scale, middle(bits)), top)
    scale = _stored((high - low) / top, dtype)
    return Grid(scale, torch.round(-low / scale).clamp_(0, top), top)


def _stored(scale: Tensor, dtype: torch.dtype) -> Tensor:
    rounded = scale.to(dtype).float()
    return torch.where(rounded == 0, 1.0, rounded)


def encode(weight_OI: Tensor, grid: Grid) -> Tensor:
    """Nearest code of every weight: uint8 [O, I]."""
    full = grid.columns(weight_OI.shape[1])
    return torch.round(weight_OI / full.scale_OG + full.zero_OG).clamp_(0, grid.top).to(torch.uint8)


def decode(codes_OI: Tensor, grid: Grid) -> Tensor:
    """The weights that codes stand for: float32 [O, I]."""
    full = grid.columns(codes_OI.shape[1])
    return (codes_OI.float() - full.zero_OG) * full.scale_OG


def searched(
    weight_OI: Tensor, gram_II: Tensor, group_size: int, *, symmetric: bool, dtype: torch.dtype, bits: int = 4
) -> Grid:
    """For each row and group, the shrunken min-max grid with the least error under the group's own block of the Gram.

    The best of the shrunken grids has its scale refitted by least squares, which is kept where it lowers the error.

    Args:    weight_OI: float32. gram_II: mean of x xT over tokens. dtype: what scales are stored in.
    """
    width = width_of(group_size, weight_OI.shape[1])
    found = []
    for start in range(0, weight_OI.shape[1], width):
        span = slice(start, start + width)
        found.append(_search_group(weight_OI[:, span].contiguous(), gram_II[span, span], symmetric, dtype, bits))
    scales, zeros = [grid.scale_OG for grid in found], [grid.zero_OG for grid in found]
    return Grid(torch.stack(scales, 1), torch.stack(zeros, 1), found[0].top)


def _search_group(weight_OC: Tensor, gram_CC: Tensor, symmetric: bool, dtype: torch.dtype, bits: int) -> Grid:
    """A grid of one group: [O] each."""
    low_O, high_O = torch.aminmax(weight_OC, dim=1)
    low_O, high_O = low_O.clamp(max=0), high_O.clamp(min=0)
    best = _grid(low_O, high_O, symmetric, dtype, bits)
    best_loss_O = _loss(weight_OC, _steps(weight_OC, best), best, gram_CC)
    for shrink in _SHRINKS[1:]:
        grid = _grid(low_O * shrink, high_O * shrink, symmetric, dtype, bits)
        best, best_loss_O = _better(best, best_loss_O, grid, _loss(weight_OC, _steps(weight_OC, grid), grid, gram_CC))
    for _ in range(2):
        steps_OC = _steps(weight_OC, best)
        pulled_OC = steps_OC @ gram_CC
        fitted_O = (pulled_OC * weight_OC).sum(1) / (pulled_OC * steps_OC).sum(1)
        usable_O = torch.isfinite(fitted_O) & (fitted_O > 0)
        grid = Grid(_stored(torch.where(usable_O, fitted_O, best.scale_OG), dtype), best.zero_OG, best.top)
        best, best_loss_O = _better(best, best_loss_O, grid, _loss(weight_OC, _steps(weight_OC, grid), grid, gram_CC))
    return best


def _steps(weight_OC: Tensor, grid: Grid) -> Tensor:
    """Code minus zero, for a grid of one group ([O] each)."""
    zero = grid.zero_OG[:, None]
    return (weight_OC / grid.scale_OG[:, None]).add_(zero).round_().clamp_(0, grid.top).sub_(zero)


def _loss(weight_OC: Tensor, steps_OC: Tensor, grid: Grid, gram_CC: Tensor) -> Tensor:
    miss_OC = torch.addcmul(weight_OC, steps_OC, grid.scale_OG[:, None], value=-1)
    return torch.einsum("oc,oc->o", miss_OC @ gram_CC, miss_OC)


def _better(best: Grid, best_loss: Tensor, grid: Grid, loss: Tensor) -> tuple[Grid, Tensor]:
    wins = loss < best_loss
    scale, zero = torch.where(wins, grid.scale_OG, best.scale_OG), torch.where(wins, grid.zero_OG, best.zero_OG)
    return Grid(scale, zero, best.top), torch.where(wins, loss, best_loss)
