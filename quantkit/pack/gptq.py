"""GPTQ, checkpoint format v1: qweight [I/8, O], qzeros [G, O/8] holding z - 1, scales [G, O], g_idx [I]."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from quantkit.pack.words import Codes, pack_columns, unpack_columns
from quantkit.records import VariantPlan

_ZERO = 8


def pack(codes: Codes) -> dict[str, Tensor]:
    columns, groups = codes.codes_OI.shape[1], codes.scale_OG.shape[1]
    stored_zero_GO = torch.full((groups, len(codes.scale_OG)), _ZERO - 1, dtype=torch.uint8)
    return {
        "qweight": pack_columns(codes.codes_OI).T.contiguous(),
        "qzeros": pack_columns(stored_zero_GO),
        "scales": codes.scale_OG.T.contiguous(),
        "g_idx": (torch.arange(columns) // (columns // groups)).to(torch.int32),
    }


def unpack(tensors: Mapping[str, Tensor]) -> Codes:
    return Codes(unpack_columns(tensors["qweight"].T), tensors["scales"].T.contiguous(), None)


def suffixes(variant: VariantPlan) -> tuple[str, ...]:
    return ("qweight", "qzeros", "scales", "g_idx")


def config(variant: VariantPlan, fused: Mapping[str, str]) -> dict[str, Any]:
    """`dynamic` keeps modules out by patterns; vLLM asks it for a fused linear by the fused name."""
    kept = sorted({*variant.ignored, *(fused[name] for name in variant.ignored if name in fused)})
    return {
        "quant_method": "gptq",
        "bits": variant.bits,
        "group_size": variant.group_size,
        "desc_act": False,
        "sym": True,
        "checkpoint_format": "gptq",
        "lm_head": False,
        "dynamic": {f"-:^{re.escape(name)}$": {} for name in kept},
    }
