"""Laws of GPTQ and of the descent after it, on random Grams with strong correlations."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quantkit.errors import SolveError
from quantkit.solve.gptq import descend, gptq
from quantkit.solve.grids import decode, encode, minmax, searched
from quantkit.solve.linalg import inverse_factor

BF16 = torch.bfloat16


def correlated(columns: int, seed: int, tokens: int = 400) -> Tensor:
    """Gram of inputs that share a few directions, with a few loud channels."""
    random = torch.Generator().manual_seed(seed)
    inputs = torch.randn(tokens, 6, generator=random) @ torch.randn(6, columns, generator=random)
    inputs = inputs + 0.3 * torch.randn(tokens, columns, generator=random)
    inputs[:, ::17] *= 8
    return inputs.T @ inputs / tokens


def weight(rows: int, columns: int, seed: int) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def lost(weight_OI: Tensor, dense_OI: Tensor, gram_II: Tensor) -> float:
    """The error by its definition, in float64."""
    miss = (weight_OI - dense_OI).double()
    return float(torch.trace(miss @ gram_II.double() @ miss.T))


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_gptq_loses_less_than_plain_rounding_and_descent_less_still(seed: int, symmetric: bool) -> None:
    weight_OI, gram_II = weight(24, 96, seed), correlated(96, seed)
    grid = minmax(weight_OI, 32, symmetric=symmetric, dtype=BF16)
    plain = lost(weight_OI, decode(encode(weight_OI, grid), grid), gram_II)
    codes, damping = gptq(weight_OI, gram_II, grid)
    rounded = lost(weight_OI, decode(codes, grid), gram_II)
    moved = lost(weight_OI, decode(*descend(weight_OI, gram_II, codes, grid, damping=damping, dtype=BF16)), gram_II)
    assert rounded < 0.7 * plain
    assert moved <= rounded * 1.02  # descent counts the damping too


def test_every_row_against_all_codes() -> None:
    """Three columns: GPTQ with descent against the best of all 16 ** 3 roundings."""
    weight_OI, gram_II = weight(40, 3, 1), correlated(3, 1)
    grid = minmax(weight_OI, -1, symmetric=False, dtype=BF16)
    every = torch.cartesian_prod(*[torch.arange(16)] * 3)
    best = plain = found = 0.0
    codes, _ = gptq(weight_OI, gram_II, grid, damping=1e-6)
    for row in range(40):
        scale, zero = grid.scale_OG[row, 0], grid.zero_OG[row, 0]
        miss = weight_OI[row] - (every - zero) * scale
        losses = ((miss @ gram_II) * miss).sum(1)
        place = int(codes[row, 0]) * 256 + int(codes[row, 1]) * 16 + int(codes[row, 2])
        nearest = encode(weight_OI, grid)[row].tolist()
        best += float(losses.min())
        found += float(losses[place])
        plain += float(losses[nearest[0] * 256 + nearest[1] * 16 + nearest[2]])
    assert best <= found < plain
    assert found - best < 0.5 * (plain - best)


@pytest.mark.parametrize("block", [1, 16, 24, 64, 96])
def test_block_width_never_changes_the_answer(block: int) -> None:
    weight_OI, gram_II = weight(16, 96, 5), correlated(96, 5)
    grid = searched(weight_OI, gram_II, 32, symmetric=True, dtype=BF16)
    expected, _ = gptq(weight_OI, gram_II, grid, block=96)
    found, _ = gptq(weight_OI, gram_II, grid, block=block)
    # Sums in another order can tip a weight that lies half-way between two codes, and what follows it.
    assert (found != expected).float().mean() < 0.01


def test_uncorrelated_inputs_leave_nothing_to_compensate() -> None:
    weight_OI = weight(16, 64, 2)
    grid = minmax(weight_OI, 32, symmetric=True, dtype=BF16)
    codes, damping = gptq(weight_OI, torch.eye(64), grid)
    assert torch.equal(codes, encode(weight_OI, grid))
    moved, _ = descend(weight_OI, torch.eye(64), codes, grid, damping=damping, dtype=BF16)
    assert torch.equal(moved, codes)


def test_arguments_are_not_modified() -> None:
    weight_OI, gram_II = weight(8, 64, 3), correlated(64, 3)
    before = weight_OI.clone(), gram_II.clone()
    grid = searched(weight_OI, gram_II, 32, symmetric=True, dtype=BF16)
    scale = grid.scale_OG.clone()
    codes, damping = gptq(weight_OI, gram_II, grid)
    kept = codes.clone()
    descend(weight_OI, gram_II, codes, grid, damping=damping, dtype=BF16)
    assert torch.equal(weight_OI, before[0]) and torch.equal(gram_II, before[1])
    assert torch.equal(grid.scale_OG, scale) and torch.equal(codes, kept)


def test_zero_rows_columns_and_dead_inputs_bring_no_nan() -> None:
    weight_OI, gram_II = weight(16, 64, 4), correlated(64, 4)
    weight_OI[3] = 0
    weight_OI[:, 32:] = 0
    gram_II[7] = gram_II[:, 7] = 0
    for symmetric in (True, False):
        grid = searched(weight_OI, gram_II, 32, symmetric=symmetric, dtype=BF16)
        codes, damping = gptq(weight_OI, gram_II, grid)
        codes, grid = descend(weight_OI, gram_II, codes, grid, damping=damping, dtype=BF16)
        dense = decode(codes, grid)
        assert torch.isfinite(dense).all()
        assert torch.equal(dense[3], torch.zeros(64))


def test_all_zero_gram_is_plain_rounding() -> None:
    weight_OI = weight(8, 32, 6)
    grid = minmax(weight_OI, 32, symmetric=True, dtype=BF16)
    codes, _ = gptq(weight_OI, torch.zeros(32, 32), grid)
    assert torch.equal(codes, encode(weight_OI, grid))


@pytest.mark.parametrize("span", [1, 5, 64])
def test_columns_taken_together_never_change_the_descent(span: int, monkeypatch: pytest.MonkeyPatch) -> None:
    weight_OI, gram_II = weight(16, 96, 9), correlated(96, 9)
    grid = searched(weight_OI, gram_II, 48, symmetric=True, dtype=BF16)
    start = encode(weight_OI, grid)
    codes, moved = descend(weight_OI, gram_II, start, grid, damping=0.01, dtype=BF16)
    monkeypatch.setattr("quantkit.solve.gptq._SPAN", span)
    again, moved_again = descend(weight_OI, gram_II, start, grid, damping=0.01, dtype=BF16)
    assert torch.equal(codes, again) and torch.equal(moved.scale_OG, moved_again.scale_OG)
    assert not torch.equal(codes, start)


def test_factor_is_that_of_the_damped_inverse() -> None:
    gram_II = correlated(48, 7)
    order_I = torch.randperm(48, generator=torch.Generator().manual_seed(1))
    lower_II, used = inverse_factor(gram_II, 0.01, order_I)
    damped = gram_II.double() + 0.01 * gram_II.diagonal().double().mean() * torch.eye(48)
    assert used == 0.01
    assert torch.equal(lower_II, lower_II.tril())
    ordered = damped[order_I][:, order_I]
    torch.testing.assert_close(
        lower_II.double().T @ lower_II.double() @ ordered, torch.eye(48).double(), atol=1e-3, rtol=0
    )


def test_damping_is_raised_and_told_where_the_gram_is_not_positive() -> None:
    gram_II = torch.eye(32)
    gram_II[0, 0] = -0.05
    _, used = inverse_factor(gram_II, 0.01)
    assert used == pytest.approx(0.1)


def test_ten_identical_tokens_are_solved() -> None:
    token = torch.randn(64, generator=torch.Generator().manual_seed(8))
    lower_II, used = inverse_factor(torch.outer(token, token), 0.01)
    assert torch.isfinite(lower_II).all() and used <= 1


def test_hopeless_grams_are_refused() -> None:
    with pytest.raises(SolveError, match="not positive definite"):
        inverse_factor(-torch.eye(16) * torch.linspace(1, 100, 16), 0.01)
    with pytest.raises(SolveError, match="not finite"):
        inverse_factor(torch.full((4, 4), torch.nan), 0.01)
