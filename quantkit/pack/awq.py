"""AWQ "gemm": qweight [I, O/8], qzeros [G, O/8], scales [G, O]; w = (q - z) * s."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from quantkit.pack.words import Codes, pack_columns, unpack_columns
from quantkit.records import VariantPlan

_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def pack(codes: Codes) -> dict[str, Tensor]:
    assert codes.zero_OG is not None  # noqa: S101 - the recipe gives this format only asymmetric grids
    return {
        "qweight": pack_columns(codes.codes_OI.T, order=_ORDER),
        "qzeros": pack_columns(codes.zero_OG.T, order=_ORDER),
        "scales": codes.scale_OG.T.contiguous(),
    }


def unpack(tensors: Mapping[str, Tensor]) -> Codes:
    return Codes(
        unpack_columns(tensors["qweight"], order=_ORDER).T.contiguous(),
        tensors["scales"].T.contiguous(),
        unpack_columns(tensors["qzeros"], order=_ORDER).T.contiguous(),
    )


def suffixes(variant: VariantPlan) -> tuple[str, ...]:
    return ("qweight", "qzeros", "scales")


def config(variant: VariantPlan, fused: Mapping[str, str]) -> dict[str, Any]:
    """vLLM looks fused linears up by their parts, so the kept modules are listed by their own names."""
    return {
        "quant_method": "awq",
        "bits": variant.bits,
        "group_size": variant.group_size,
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": list(variant.ignored) or None,
    }
