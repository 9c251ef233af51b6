"""Codes of a linear: how methods fp8 and int8 make them, and the weights that codes of any format stand for."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quantkit.checkpoint.read import Weights
from quantkit.errors import ArtifactError, Fault
from quantkit.pack import FORMATS, Codes
from quantkit.solve import eight_bit, grids
from quantkit.solve.eight_bit import calibrated, per_block, per_row, per_tensor

EIGHT_BIT = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}
"""The codes of the methods that quantize activations too."""


def eight_bits(
    method: str, scheme: str, weights: Sequence[Tensor], dtype: torch.dtype, max_abs_I: Tensor | None = None
) -> list[Codes]:
    """Codes of linears that share one input.

    Args:    weights: [O, I] each. dtype: what the weights' scales are stored in. max_abs_I: scheme static needs the
             largest input of each column; vLLM fuses such linears, so they share one scale for their weights.
    """
    kind = EIGHT_BIT[method]
    if scheme == "block":
        return [Codes(*per_block(weight_OI, kind, dtype=dtype), None, 8) for weight_OI in weights]
    if scheme == "dynamic":
        return [Codes(*per_row(weight_OI, kind, dtype=dtype), None, 8) for weight_OI in weights]
    assert max_abs_I is not None  # noqa: S101 - only the one pass, which has statistics, is given this scheme
    codes_OI, scale_1 = per_tensor(torch.cat(list(weights)), kind, dtype=dtype)
    parts = torch.split(codes_OI, [len(weight_OI) for weight_OI in weights])
    # Each its own scale tensors: safetensors refuses tensors that share memory.
    return [Codes(part, scale_1.clone(), None, 8, calibrated(max_abs_I, kind)) for part in parts]


def dense(codes: Codes) -> Tensor:
    """The weights that codes stand for: float32 [O, I]."""
    if codes.codes_OI.dtype != torch.uint8:
        return eight_bit.decode(codes.codes_OI, codes.scale_OG)
    scale_OG = codes.scale_OG.float()
    middle = grids.middle(codes.bits)
    zero_OG = torch.full_like(scale_OG, middle) if codes.zero_OG is None else codes.zero_OG.float()
    return grids.decode(codes.codes_OI, grids.Grid(scale_OG, zero_OG))


def unpack_module(weights: Weights, module: str, format: str) -> Codes:
    """The codes of one stored linear. Raises ArtifactError where its tensors are not of that format."""
    stored = {
        name.removeprefix(module + "."): weights.get(name)
        for name in weights.index.tensors
        if name.startswith(module + ".") and name != f"{module}.bias"
    }
    try:
        return FORMATS[format].unpack(stored)
    except KeyError as error:
        where = f"{weights.index.root}: {module}"
        raise ArtifactError(
            Fault(f"no tensor {error} for format {format}", where, "quantize the model again")
        ) from None
