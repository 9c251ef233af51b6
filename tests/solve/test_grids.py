"""Laws of INT4 and INT8 grids and of FP8 scales."""

from __future__ import annotations

import pytest
import torch

from quantkit.solve import eight_bit
from quantkit.solve.eight_bit import calibrated, nearest, per_block, per_row, per_tensor
from quantkit.solve.grids import decode, encode, minmax, searched

BF16 = torch.bfloat16


def random(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group_size", [32, 64, 128, -1])
@pytest.mark.parametrize("bits", [4, 8])
def test_no_weight_moves_more_than_half_a_step_but_at_the_clipped_end(
    group_size: int, symmetric: bool, bits: int
) -> None:
    weight_OI = random(16, 128)
    grid = minmax(weight_OI, group_size, symmetric=symmetric, dtype=BF16, bits=bits)
    assert grid.scale_OG.shape == (16, 1 if group_size == -1 else 128 // group_size)
    codes = encode(weight_OI, grid)
    steps = ((weight_OI - decode(codes, grid)) / grid.columns(128).scale_OG).abs()
    # The ends lose up to half a step, zeros are rounded, and scales to 8 bits: that is 2 ** -9 of each step.
    assert steps.max() <= 1.01 + grid.top * 2**-9
    assert (steps <= 0.501)[(codes > 0) & (codes < grid.top)].all()
    assert (steps <= 0.51).float().mean() > (0.96 if bits == 4 else 0.9)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scales_are_of_the_stored_dtype_before_codes_are_made(dtype: torch.dtype) -> None:
    for grid in (
        minmax(random(16, 64), 32, symmetric=True, dtype=dtype),
        searched(random(16, 64), torch.eye(64), 32, symmetric=False, dtype=dtype),
    ):
        assert torch.equal(grid.scale_OG, grid.scale_OG.to(dtype).float())
        assert ((grid.zero_OG >= 0) & (grid.zero_OG <= 15) & (grid.zero_OG == grid.zero_OG.round())).all()


@pytest.mark.parametrize("symmetric", [True, False])
def test_searched_grids_lose_less_in_every_group(symmetric: bool) -> None:
    weight_OI = random(32, 64) ** 3
    inputs = random(200, 64, 1) @ random(64, 64, 2)
    gram_II = inputs.T @ inputs / 200

    def losses(grid: object) -> torch.Tensor:
        miss = weight_OI - decode(encode(weight_OI, grid), grid)
        return torch.stack([((miss[:, s] @ gram_II[s, s]) * miss[:, s]).sum(1) for s in (slice(32), slice(32, 64))])

    plain = losses(minmax(weight_OI, 32, symmetric=symmetric, dtype=BF16))
    found = losses(searched(weight_OI, gram_II, 32, symmetric=symmetric, dtype=BF16))
    assert (found <= plain * 1.0001).all()
    assert found.sum() < 0.95 * plain.sum()


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [4, 8])
def test_codes_use_all_their_bits_and_stay_within_them(symmetric: bool, bits: int) -> None:
    weight_OI = random(8, 4096)
    for grid in (
        minmax(weight_OI, -1, symmetric=symmetric, dtype=BF16, bits=bits),
        searched(weight_OI, torch.eye(4096), -1, symmetric=symmetric, dtype=BF16, bits=bits),
    ):
        codes = encode(weight_OI, grid)
        assert grid.top == 2**bits - 1 and codes.max() == grid.top and codes.min() <= grid.top // 16
        if symmetric:
            assert (grid.zero_OG == 2 ** (bits - 1)).all()


EIGHT_BIT = [(torch.float8_e4m3fn, 448), (torch.int8, 127)]


@pytest.mark.parametrize(("codes", "largest"), EIGHT_BIT)
def test_a_rows_scale_is_its_largest_over_the_largest_code_and_zero_rows_get_one(
    codes: torch.dtype, largest: int
) -> None:
    weight_OI = random(8, 64) * 1e-3
    weight_OI[2] = 0
    values, scale = per_row(weight_OI, codes, dtype=BF16)
    assert scale.dtype == BF16 and scale.shape == (8, 1) and scale[2] == 1
    expected = weight_OI.abs().amax(1) / largest
    alive = torch.arange(8) != 2
    torch.testing.assert_close(scale[alive, 0].float(), expected[alive], rtol=2**-8, atol=0)
    dense = values.float() * scale.float()
    assert torch.isfinite(dense).all() and not dense[2].any()
    if codes == torch.int8:
        # Half a step; a scale that was rounded down also clamps the largest by up to 127 / 2**9 of a step.
        assert ((dense - weight_OI).abs() <= 0.5001 * scale.float()).all()
    else:
        assert ((dense - weight_OI).abs() <= weight_OI.abs() / 16 + scale.float() * 2**-9).all()


@pytest.mark.parametrize(("codes", "largest"), EIGHT_BIT)
def test_eight_bits_clamp_and_do_not_wrap(codes: torch.dtype, largest: int) -> None:
    assert nearest(torch.tensor([1e4, -1e4]), codes).float().tolist() == [largest, -largest]


@pytest.mark.parametrize(("codes", "largest"), EIGHT_BIT)
def test_values_on_the_grid_come_back_exactly(codes: torch.dtype, largest: int) -> None:
    row = torch.arange(-largest, largest + 1).float()
    row = row.to(codes).float().unique() * 0.25
    values, scale = per_row(row[None], codes, dtype=BF16)
    assert torch.equal(values.float() * scale.float(), row[None])


@pytest.mark.parametrize("rows", [128, 130, 40])
@pytest.mark.parametrize("columns", [256, 200])
def test_every_block_is_a_tensor_of_its_own(rows: int, columns: int) -> None:
    weight_OI = random(rows, columns) * 10 ** random(rows, columns, 1)
    weight_OI[:128, 128:] = 0
    codes, scale = per_block(weight_OI, torch.float8_e4m3fn, dtype=BF16)
    assert codes.shape == weight_OI.shape and codes.is_contiguous()
    assert scale.shape == (-(-rows // 128), 2) and scale[0, 1] == 1
    dense = eight_bit.decode(codes, scale)
    for top in range(0, rows, 128):
        for left in range(0, columns, 128):
            block = (slice(top, top + 128), slice(left, left + 128))
            own_codes, own_scale = per_tensor(weight_OI[block], torch.float8_e4m3fn, dtype=BF16)
            assert own_scale.shape == (1,) and own_scale == scale[top // 128, left // 128]
            assert torch.equal(own_codes.float(), codes[block].float())
            assert torch.equal(dense[block], own_codes.float() * own_scale.float())
            largest = weight_OI[block].abs().max()
            assert largest == 0 or abs(float(own_scale) * 448 / float(largest) - 1) <= 2**-8


def test_the_calibrated_scale_reaches_the_largest_value_seen() -> None:
    seen_I = random(1, 64).abs()[0]
    scale = calibrated(seen_I, torch.float8_e4m3fn)
    assert scale.dtype == torch.float32 and scale.shape == (1,)
    assert float(scale) == pytest.approx(float(seen_I.max()) / 448)
    assert calibrated(torch.zeros(4), torch.float8_e4m3fn) == 1
