"""Factors of a Gram matrix, and the error that it weighs."""

from __future__ import annotations

import torch
from torch import Tensor

from quantkit.errors import Fault, SolveError

_HIGHEST_DAMPING = 1.0


def ridge(gram_II: Tensor, damping: float) -> float:
    """What damping adds to the diagonal: `damping` times its mean (1 where the Gram is all zero)."""
    mean = float(gram_II.diagonal().mean())
    return damping * (mean if mean > 0 else 1.0)


def inverse_factor(gram_II: Tensor, damping: float, order_I: Tensor | None = None) -> tuple[Tensor, float]:
    """Lower triangular L with LT L = (damped Gram, rows and columns in `order_I`)^-1, and the damping that it took.

    Where the matrix is not positive definite, the damping is raised tenfold up to 1, then the same in float64.
    Memory: two matrices of the Gram's size at most, beside the Gram.

    Raises:  SolveError: no damping up to 1 makes it positive definite, or the Gram is not finite.
    """
    if not bool(torch.isfinite(gram_II.sum(1)).all()):
        raise SolveError(Fault("the Gram matrix is not finite", "calibration", "look for overflow in the source model"))
    order_I = torch.arange(len(gram_II)) if order_I is None else order_I
    for dtype in (torch.float32, torch.float64):
        share = damping
        while share <= max(_HIGHEST_DAMPING, damping):
            work_II = gram_II.to(dtype)[order_I[:, None], order_I]
            work_II.diagonal().add_(ridge(gram_II, share))
            lower_II, info = torch.linalg.cholesky_ex(work_II)
            del work_II
            if info.item() == 0:
                _invert_lower(lower_II)
                if bool(torch.isfinite(lower_II.diagonal()).all()) and bool(torch.isfinite(lower_II[-1]).all()):
                    return lower_II.float(), share
            share *= 10
    what = "the Gram matrix is not positive definite, whatever the damping"
    raise SolveError(Fault(what, "calibration", "use more, and more varied, calibration samples"))


def _invert_lower(lower_II: Tensor) -> None:
    """In place, by halves, so that most of the work is matrix products: a third of solving against the identity."""
    size = len(lower_II)
    if size <= 96:
        eye_II = torch.eye(size, dtype=lower_II.dtype)
        lower_II.copy_(torch.linalg.solve_triangular(lower_II, eye_II, upper=False))
        return
    half = size // 2
    head, tail, side = lower_II[:half, :half], lower_II[half:, half:], lower_II[half:, :half]
    _invert_lower(head)
    _invert_lower(tail)
    side.copy_((tail @ (side @ head)).neg_())


def energy_O(rows_OI: Tensor, gram_II: Tensor) -> Tensor:
    """r H rT of every row: float32 [O]."""
    return torch.einsum("oi,oi->o", rows_OI @ gram_II, rows_OI)
