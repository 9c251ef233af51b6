"""compressed-tensors: pack-quantized INT4 (symmetric or not); float-quantized FP8 and int-quantized INT8 by rows.

INT4: weight_packed [O, I/8] of q + 8, weight_scale [O, G], weight_shape, weight_zero_point [O/8, G] of z + 8 packed
along rows. Codes 0..15 of quantkit are q + 8 already.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
    QuantizationStatus,
    QuantizationStrategy,
    QuantizationType,
)
from torch import Tensor

from quantkit.pack.nibbles import Codes, pack_columns, unpack_columns
from quantkit.records import VariantPlan


def pack(codes: Codes) -> dict[str, Tensor]:
    if codes.codes_OI.dtype != torch.uint8:
        return {"weight": codes.codes_OI.contiguous(), "weight_scale": codes.scale_OG.contiguous()}
    stored = {
        "weight_packed": pack_columns(codes.codes_OI),
        "weight_scale": codes.scale_OG.contiguous(),
        "weight_shape": torch.tensor(codes.codes_OI.shape, dtype=torch.int64),
    }
    if codes.zero_OG is not None:
        stored["weight_zero_point"] = pack_columns(codes.zero_OG.T).T.contiguous()
    return stored


def unpack(tensors: Mapping[str, Tensor]) -> Codes:
    if "weight_packed" not in tensors:
        return Codes(tensors["weight"], tensors["weight_scale"], None)
    zero_GO = tensors["weight_zero_point"].T if "weight_zero_point" in tensors else None
    return Codes(
        unpack_columns(tensors["weight_packed"]),
        tensors["weight_scale"],
        None if zero_GO is None else unpack_columns(zero_GO).T.contiguous(),
    )


def suffixes(variant: VariantPlan) -> tuple[str, ...]:
    if variant.group_size == 0:
        return ("weight", "weight_scale")
    return ("weight_packed", "weight_scale", "weight_shape", *(() if variant.symmetric else ("weight_zero_point",)))


def config(variant: VariantPlan, fused: Mapping[str, str]) -> dict[str, Any]:
    """Of the library's own classes. lm_head is always kept: where it is tied it is still a Linear to the loader."""
    if variant.group_size == 0:
        kind = QuantizationType.FLOAT if variant.method == "fp8" else QuantizationType.INT
        weights = QuantizationArgs(num_bits=8, type=kind, strategy=QuantizationStrategy.CHANNEL)
        inputs = QuantizationArgs(num_bits=8, type=kind, strategy=QuantizationStrategy.TOKEN, dynamic=True)
        scheme = QuantizationScheme(targets=["Linear"], weights=weights, input_activations=inputs)
    else:
        whole_row = variant.group_size == -1
        weights = QuantizationArgs(
            num_bits=variant.bits,
            type=QuantizationType.INT,
            strategy=QuantizationStrategy.CHANNEL if whole_row else QuantizationStrategy.GROUP,
            group_size=None if whole_row else variant.group_size,
            symmetric=variant.symmetric,
            zp_dtype=None if variant.symmetric else torch.int8,
        )
        scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    made = QuantizationConfig(
        config_groups={"group_0": scheme},
        format={"fp8": "float-quantized", "int8": "int-quantized"}.get(variant.method, "pack-quantized"),
        quantization_status=QuantizationStatus.COMPRESSED,
        ignore=["lm_head", *(name for name in variant.ignored if name != "lm_head")],
    )
    dumped: dict[str, Any] = made.model_dump(mode="json")
    return dumped
