"""GPTQ on fixed grids, and coordinate descent on the same quadratic afterwards.

Works on transposed copies ([I, O]), so that a column of the weight is one run of memory.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quantkit.solve.grids import Grid
from quantkit.solve.linalg import inverse_factor, ridge

_SPAN = 16
"""Columns whose effect on each other is followed one by one; on all others they act together, as a product."""


def gptq(
    weight_OI: Tensor, gram_II: Tensor, grid: Grid, *, damping: float = 0.01, block: int = _SPAN
) -> tuple[Tensor, float]:
    """Codes of `weight_OI` such that the layer's output, not the weight, moves least; and the damping that it took.

    Columns are visited by falling diagonal of the Gram (grids are fixed before, so this leaves no trace).

    Args:    weight_OI: float32. gram_II: mean over tokens of x xT, float32. block: columns per trailing update;
             changes speed, never the answer.
    Returns: uint8 [O, I].
    Raises:  SolveError: the Gram is not positive definite, whatever the damping.
    Source:  Frantar et al. 2022, arXiv:2210.17323, algorithm 1.
    """
    columns = weight_OI.shape[1]
    # The factor is lower triangular, so columns are visited from the last to the first.
    order_I = torch.argsort(gram_II.diagonal(), descending=True, stable=True).flip(0)
    lower_II, used = inverse_factor(gram_II, damping, order_I)
    group_I = (order_I // (columns // grid.scale_OG.shape[1])).tolist()
    scale_GO, zero_GO = grid.scale_OG.T.contiguous(), grid.zero_OG.T.contiguous()
    work_IO = weight_OI.T[order_I].contiguous()
    codes_IO = torch.empty(work_IO.shape, dtype=torch.uint8)
    pivots = lower_II.diagonal().tolist()
    for end in range(columns, 0, -block):
        start = max(0, end - block)
        errors_BO = torch.empty_like(work_IO[start:end])
        for column in reversed(range(start, end)):
            scale_O, zero_O = scale_GO[group_I[column]], zero_GO[group_I[column]]
            wish_O = work_IO[column]
            code_O = torch.div(wish_O, scale_O).add_(zero_O).round_().clamp_(0, grid.top)
            codes_IO[column] = code_O
            error_O = torch.addcmul(wish_O, code_O.sub_(zero_O), scale_O, value=-1, out=errors_BO[column - start])
            error_O.div_(pivots[column])
            work_IO[start:column].addr_(lower_II[column, start:column], error_O, alpha=-1)
        work_IO[:start].addmm_(lower_II[start:end, :start].T, errors_BO, alpha=-1)
    codes_OI = torch.empty(weight_OI.shape, dtype=torch.uint8)
    codes_OI[:, order_I] = codes_IO.T
    return codes_OI, used


def descend(
    weight_OI: Tensor,
    gram_II: Tensor,
    codes_OI: Tensor,
    grid: Grid,
    *,
    damping: float,
    dtype: torch.dtype,
    sweeps: int = 1,
) -> tuple[Tensor, Grid]:
    """Move single codes while that lowers tr((W - Q) H (W - Q)T), and refit the scale of each group by least squares.

    Args:    codes_OI: uint8, where to start. damping: as GPTQ used it. dtype: what scales are stored in.
    Returns: uint8 codes [O, I] and their grid; never a larger error than at the start.
    """
    columns = weight_OI.shape[1]
    width = columns // grid.scale_OG.shape[1]
    shift = ridge(gram_II, damping)
    stiffness = (gram_II.diagonal() + shift).tolist()
    scale_GO, zero_GO = grid.scale_OG.T.contiguous(), grid.zero_OG.T.contiguous()
    steps_IO = codes_OI.T.float() - zero_GO.repeat_interleave(width, 0)
    miss_IO = weight_OI.T - steps_IO * scale_GO.repeat_interleave(width, 0)
    pull_IO = torch.addmm(miss_IO, gram_II, miss_IO, beta=shift)
    del miss_IO
    for _ in range(sweeps):
        for group in range(columns // width):
            start = group * width
            span = slice(start, start + width)
            low_O, high_O = -zero_GO[group], grid.top - zero_GO[group]
            scale_O = scale_GO[group]
            before_CO = steps_IO[span] * scale_O
            gram_CC = gram_II[span, span] + shift * torch.eye(width)
            pull_CO = pull_IO[span].clone()
            for first in range(0, width, _SPAN):
                last = min(first + _SPAN, width)
                moved_BO = torch.empty_like(pull_CO[first:last])
                for row in range(first, last):
                    old_O = steps_IO[start + row]
                    wish_O = torch.addcdiv(old_O, pull_CO[row], scale_O, value=1 / stiffness[start + row]).round_()
                    new_O = torch.minimum(torch.maximum(wish_O, low_O, out=wish_O), high_O, out=wish_O)
                    move_O = torch.sub(new_O, old_O, out=moved_BO[row - first]).mul_(scale_O)
                    pull_CO[row + 1 : last].addr_(gram_CC[row, row + 1 : last], move_O, alpha=-1)
                    steps_IO[start + row] = new_O
                pull_CO[last:].addmm_(gram_CC[last:, first:last], moved_BO, alpha=-1)
            pull_CO = torch.addmm(pull_IO[span], gram_CC, steps_IO[span] * scale_O - before_CO, alpha=-1)
            scale_GO[group] = _refit(steps_IO[span], pull_CO, gram_CC, scale_O, dtype)
            moved_CO = steps_IO[span] * scale_GO[group] - before_CO
            pull_IO.addmm_(gram_II[:, span], moved_CO, alpha=-1)
            pull_IO[span] -= shift * moved_CO
    codes = (steps_IO + zero_GO.repeat_interleave(width, 0)).T.to(torch.uint8).contiguous()
    return codes, Grid(scale_GO.T.contiguous(), grid.zero_OG, grid.top)


def _refit(steps_CO: Tensor, pull_CO: Tensor, gram_CC: Tensor, scale_O: Tensor, dtype: torch.dtype) -> Tensor:
    """The scale that minimises the whole quadratic with the group's codes held, where rounding it still gains."""
    slope_O = (steps_CO * pull_CO).sum(0)
    curve_O = (steps_CO * (gram_CC @ steps_CO)).sum(0)
    fitted_O = (scale_O + slope_O / curve_O).to(dtype).float()
    moved_O = fitted_O - scale_O
    gains_O = 2 * moved_O * slope_O - moved_O.square() * curve_O > 0
    return torch.where(gains_O & torch.isfinite(fitted_O) & (fitted_O > 0), fitted_O, scale_O)
