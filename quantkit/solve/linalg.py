"""Factors of a Gram matrix, and the error that it weighs."""

from __future__ import annotations

import torch
from torch import Tensor

from quantkit.errors import Fault, SolveError

_HIGHEST_DAMPING = 1.0


def damped(gram_II: Tensor, damping: float) -> Tensor:
    """The Gram with `damping` times its mean diagonal added to the diagonal (1 where the Gram is all zero)."""
    mean = gram_II.diagonal().mean()
    return gram_II + torch.diag_embed((damping * torch.where(mean > 0, mean, 1.0)).expand(gram_II.shape[0]))


def inverse_factor(gram_II: Tensor, damping: float) -> tuple[Tensor, float]:
    """Upper triangular U with UT U = (damped Gram)^-1, and the damping that it took.

    Where the matrix is not positive definite, the damping is raised tenfold up to 1, then the same in float64.

    Raises:  SolveError: no damping up to 1 makes it positive definite, or the Gram is not finite.
    """
    if not bool(torch.isfinite(gram_II).all()):
        raise SolveError(Fault("the Gram matrix is not finite", "calibration", "look for overflow in the source model"))
    for dtype in (torch.float32, torch.float64):
        share = damping
        while share <= max(_HIGHEST_DAMPING, damping):
            # The factor of the matrix read backwards, read backwards, is upper: gram = R RT, so U = R^-1.
            lower_II, info = torch.linalg.cholesky_ex(damped(gram_II.to(dtype), share).flip(0, 1))
            if info.item() == 0:
                upper_II = _inverse_of_lower(lower_II).flip(0, 1)
                if bool(torch.isfinite(upper_II).all()):
                    return upper_II.float().contiguous(), share
            share *= 10
    what = "the Gram matrix is not positive definite, whatever the damping"
    raise SolveError(Fault(what, "calibration", "use more, and more varied, calibration samples"))


def _inverse_of_lower(lower_II: Tensor) -> Tensor:
    """By halves, so that most of the work is matrix products: a third of what solving against the identity costs."""
    size = len(lower_II)
    if size <= 96:
        small_II: Tensor = torch.linalg.solve_triangular(lower_II, torch.eye(size, dtype=lower_II.dtype), upper=False)
        return small_II
    half = size // 2
    head, tail = _inverse_of_lower(lower_II[:half, :half]), _inverse_of_lower(lower_II[half:, half:])
    inverse_II = torch.zeros_like(lower_II)
    inverse_II[:half, :half], inverse_II[half:, half:] = head, tail
    inverse_II[half:, :half] = -(tail @ (lower_II[half:, :half] @ head))
    return inverse_II


def energy_O(rows_OI: Tensor, gram_II: Tensor) -> Tensor:
    """r H rT of every row: float32 [O]."""
    return torch.einsum("oi,oi->o", rows_OI @ gram_II, rows_OI)
