"""Laws of the AWQ scale search."""

from __future__ import annotations

import torch
from torch import Tensor

from quantkit.solve.awq import channel_scale
from quantkit.solve.grids import decode, encode, minmax

BF16 = torch.bfloat16


def loud(seed: int, columns: int = 64) -> tuple[list[Tensor], Tensor, Tensor]:
    """Weights with the inputs' statistics; a few channels are 30 times louder."""
    random = torch.Generator().manual_seed(seed)
    inputs = torch.randn(500, columns, generator=random)
    inputs[:, :4] *= 30
    weights = [torch.randn(rows, columns, generator=random) for rows in (32, 16)]
    return weights, inputs.T @ inputs / 500, inputs.abs().mean(0)


def lost(weight_OI: Tensor, gram_II: Tensor, scale_I: Tensor) -> float:
    scaled = weight_OI * scale_I
    grid = minmax(scaled, 32, symmetric=False, dtype=BF16)
    miss = (weight_OI - decode(encode(scaled, grid), grid) / scale_I).double()
    return float(torch.trace(miss @ gram_II.double() @ miss.T))


def search(weights: list[Tensor], gram_II: Tensor, mean_I: Tensor, channel_I: Tensor) -> Tensor:
    return channel_scale(weights, gram_II, mean_I, channel_I, group_size=32, symmetric=False, dtype=BF16)


def test_loud_channels_are_protected_and_no_linear_is_worse_than_plain() -> None:
    for seed in range(4):
        weights, gram_II, mean_I = loud(seed)
        scale_I = search(weights, gram_II, mean_I, torch.arange(64))
        assert scale_I[:4].min() > scale_I[4:].max()
        for weight_OI in weights:
            assert lost(weight_OI, gram_II, scale_I) < 0.7 * lost(weight_OI, gram_II, torch.ones(64))


def test_columns_fed_by_one_channel_share_a_scale() -> None:
    weights, gram_II, mean_I = loud(1)
    channel_I = torch.arange(64) // 16 // 2 * 16 + torch.arange(64) % 16
    scale_C = search(weights, gram_II, mean_I, channel_I)
    assert scale_C.shape == (32,)


def test_dead_channels_and_zero_weights_bring_no_nan_and_stay() -> None:
    weights, gram_II, mean_I = loud(2)
    gram_II[9] = gram_II[:, 9] = 0
    mean_I[9] = 0
    weights[0][:, 11] = 0
    weights[1][3] = 0
    scale_I = search(weights, gram_II, mean_I, torch.arange(64))
    assert torch.isfinite(scale_I).all() and (scale_I > 0).all() and scale_I[9] == 1


def test_silent_inputs_keep_identity() -> None:
    weights, _, _ = loud(3)
    scale_I = search(weights, torch.zeros(64, 64), torch.zeros(64), torch.arange(64))
    assert torch.equal(scale_I, torch.ones(64))


def test_losses_that_are_not_numbers_keep_identity() -> None:
    weights, gram_II, mean_I = loud(3)
    scale_I = search(weights, gram_II * torch.inf, mean_I, torch.arange(64))
    assert torch.equal(scale_I, torch.ones(64))


def test_the_range_of_scales_is_capped() -> None:
    weights, gram_II, mean_I = loud(0)
    mean_I = torch.logspace(-30, 30, 64)
    scale_I = search(weights, gram_II, mean_I, torch.arange(64))
    assert scale_I.max() / scale_I.min() < 1.0001e4
