"""AWQ: scale input channels so that rounding hurts least. The search is algebra on the Gram matrix.

Clipping, the second half of AWQ, is the searched grid of solve/grids.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quantkit.solve.grids import decode
from quantkit.solve.linalg import energy_O
from quantkit.solve.rtn import rtn

_RATIOS = 20
_WIDEST = 1e4
"""Largest ratio between two scales; more would leave the range of the folded norm's dtype."""


def channel_scale(
    weights: Sequence[Tensor],
    gram_II: Tensor,
    mean_abs_I: Tensor,
    channel_I: Tensor,
    *,
    group_size: int,
    symmetric: bool,
    dtype: torch.dtype,
) -> Tensor:
    """One scale per channel before the linears `weights`, whose columns are multiplied by it; geometric mean 1.

    Candidates are mean|x| ** r / mean|w| ** (1 - r) and mean|x| ** r for r in 0 .. 1, scored by the error of plain
    rounding relative to the weight's energy, summed over the linears. Identity is a candidate, and one that makes
    any linear worse than identity does is out; so the result is never worse than plain rounding.

    Args:    weights: float32 [O, I] each. gram_II: mean of x xT. channel_I: the channel that feeds each column
             (grouped queries feed one channel to several columns).
    Returns: float32 [channels].
    Source:  Lin et al. 2023, arXiv:2306.00978, section 3.2.
    """
    channels = int(channel_I.max()) + 1
    count_C = torch.bincount(channel_I, minlength=channels)
    activity_C = torch.zeros(channels).index_add_(0, channel_I, mean_abs_I) / count_C
    relative_I = torch.cat([(w.abs() / w.abs().amax(1, keepdim=True).clamp(min=1e-12)) for w in weights]).mean(0)
    size_C = torch.zeros(channels).index_add_(0, channel_I, relative_I) / count_C
    energies = [energy_O(weight, gram_II).sum().clamp(min=1e-30) for weight in weights]

    def losses(scale_C: Tensor) -> Tensor:
        scale_I = scale_C[channel_I]
        found = []
        for weight, energy in zip(weights, energies, strict=True):
            codes, grid = rtn(weight * scale_I, group_size, symmetric=symmetric, dtype=dtype)
            found.append(energy_O(weight - decode(codes, grid) / scale_I, gram_II).sum() / energy)
        return torch.stack(found)

    best_C = torch.ones(channels)
    identity = losses(best_C)
    best = identity.sum()
    for duo in (False, True):
        for step in range(1, _RATIOS + 1):
            ratio = step / _RATIOS
            scale_C = _normal(activity_C, ratio, size_C if duo else None)
            found = losses(scale_C)
            if bool(torch.isfinite(found).all()) and bool((found <= identity).all()) and found.sum() < best:
                best_C, best = scale_C, found.sum()
    return best_C


def _normal(activity_C: Tensor, ratio: float, size_C: Tensor | None) -> Tensor:
    """Candidate with geometric mean 1 and a capped range; channels that never fire are left alone."""
    live_C = activity_C > 0
    log_C = ratio * activity_C.clamp(min=1e-12).log()
    if size_C is not None:
        log_C = log_C - (1 - ratio) * size_C.clamp(min=1e-4).log()
    if not bool(live_C.any()):
        return torch.ones_like(activity_C)
    log_C = log_C - log_C[live_C].mean()
    half = torch.tensor(_WIDEST).log() / 2
    return torch.where(live_C, log_C.clamp(-half, half).exp(), 1.0)
