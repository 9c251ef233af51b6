"""AWQ: scale input channels so that rounding hurts least. The search is algebra on the Gram matrix.

Clipping, the second half of AWQ, is the searched grid of solve/grids.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from quantkit.solve.grids import decode
from quantkit.solve.linalg import energy_O
from quantkit.solve.rtn import rtn

_COARSE = (0.2, 0.4, 0.6, 0.8)
_STEPS = (0.0, 0.1, 0.05)
_ROWS = 256
"""Rows of a linear that the search looks at (all compared on the same ones): enough for a mean over rows."""
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
    rounding relative to the weight's energy, summed over the linears. That is smooth in r with one valley (measured),
    so r is searched coarse to fine, down to steps of 0.05. Identity is a candidate, and a candidate that makes any
    linear worse than identity does is out; so the result is never worse than plain rounding of the rows looked at.

    Args:    weights: float32 [O, I] each. gram_II: mean of x xT. channel_I: the channel that feeds each column
             (grouped queries feed one channel to several columns).
    Returns: float32 [channels].
    Source:  Lin et al. 2023, arXiv:2306.00978, section 3.2.
    """
    sampled = [weight[:: max(1, len(weight) // _ROWS)] for weight in weights]
    energies = [energy_O(weight, gram_II).sum().clamp(min=1e-30) for weight in sampled]
    # Candidates are compared in bfloat16: plain rounding's errors do not cancel under the Gram, so a mean over rows
    # of such products is good to three digits, and it costs half.
    rough_II = gram_II.bfloat16()
    activity_C, size_C = _by_channel(mean_abs_I, channel_I), _by_channel(_relative_size(weights), channel_I)

    def losses(scale_C: Tensor) -> Tensor:
        scale_I = scale_C[channel_I]
        found = []
        for weight, energy in zip(sampled, energies, strict=True):
            codes, grid = rtn(weight * scale_I, group_size, symmetric=symmetric, dtype=dtype)
            miss_OI = weight - decode(codes, grid) / scale_I
            found.append((miss_OI * (miss_OI.bfloat16() @ rough_II)).sum() / energy)
        return torch.stack(found)

    identity = losses(torch.ones_like(activity_C))
    best = (float(identity.sum()), 0.0, False, torch.ones_like(activity_C))
    for step in _STEPS:
        _, middle, weighed, _ = best
        ratios = _COARSE if step == 0 else (middle - step, middle + step)
        for ratio in ratios:
            for duo in (False, True) if step == 0 else (weighed,):
                scale_C = _candidate(activity_C, size_C, ratio, duo)
                found = losses(scale_C)
                total = float(found.sum())  # not finite: the comparisons below are false
                if bool((found <= identity).all()) and total < best[0]:
                    best = (total, ratio, duo, scale_C)
    return best[3]


def _relative_size(weights: Sequence[Tensor]) -> Tensor:
    """Mean over rows of |w| relative to the largest of its row: [I]."""
    return torch.cat([w.abs() / w.abs().amax(1, keepdim=True).clamp(min=1e-12) for w in weights]).mean(0)


def _by_channel(values_I: Tensor, channel_I: Tensor) -> Tensor:
    """Mean over the columns that a channel feeds: [channels]."""
    count_C = torch.bincount(channel_I)
    return torch.zeros(len(count_C)).index_add_(0, channel_I, values_I) / count_C


def _candidate(activity_C: Tensor, size_C: Tensor, ratio: float, duo: bool) -> Tensor:
    """Geometric mean 1 and a capped range; channels that never fire are left alone."""
    live_C = activity_C > 0
    if not bool(live_C.any()):
        return torch.ones_like(activity_C)
    log_C = ratio * activity_C.clamp(min=1e-12).log()
    if duo:
        log_C = log_C - (1 - ratio) * size_C.clamp(min=1e-4).log()
    log_C = log_C - log_C[live_C].mean()
    half = math.log(_WIDEST) / 2
    return torch.where(live_C, log_C.clamp(-half, half).exp(), 1.0)
