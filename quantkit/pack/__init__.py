"""Tensor layouts that vLLM loads: codes and scales in, stored tensors out, and back. One format, one file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from quantkit.pack import awq, compressed_tensors, gptq
from quantkit.pack.words import Codes
from quantkit.records import VariantPlan


@dataclass(frozen=True)
class Format:
    pack: Callable[[Codes], dict[str, Tensor]]
    """Stored tensors of one linear by the last part of their name."""
    unpack: Callable[[Mapping[str, Tensor]], Codes]
    """The exact opposite."""
    config: Callable[[VariantPlan, Mapping[str, str]], dict[str, Any]]
    """`quantization_config`; the mapping gives, for a linear that vLLM fuses, the name of the fused one."""
    suffixes: Callable[[VariantPlan], tuple[str, ...]]
    """Last parts of the names that `pack` gives each linear of a variant; only eight bits keep a plain `weight`."""


FORMATS: dict[str, Format] = {
    "awq": Format(awq.pack, awq.unpack, awq.config, awq.suffixes),
    "gptq": Format(gptq.pack, gptq.unpack, gptq.config, gptq.suffixes),
    "compressed-tensors": Format(
        compressed_tensors.pack, compressed_tensors.unpack, compressed_tensors.config, compressed_tensors.suffixes
    ),
}
"""By `quant_method` of the stored config, which is the recipe's `format`."""

__all__ = ["FORMATS", "Codes", "Format"]
