"""compressed-tensors: pack-quantized INT4 and INT8 (symmetric or not), float-quantized FP8, int-quantized INT8.

Packed, with B bits: weight_packed [O, I * B / 32] of q + 8 (INT8: q + 128), weight_scale [O, G], weight_shape,
weight_zero_point [O * B / 32, G] of z + 8 packed along rows. quantkit's own codes are q + 8 already.
FP8 and INT8 with activations: weight [O, I], weight_scale [O, 1], [1], or one a block of 128 x 128; FP8 static adds
input_scale [1].
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

from quantkit.pack.words import Codes, pack_columns, unpack_columns
from quantkit.records import VariantPlan

_FORMATS = {"fp8": "float-quantized", "int8": "int-quantized"}

_EIGHT_BITS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "dynamic": (
        {"strategy": QuantizationStrategy.CHANNEL},
        {"strategy": QuantizationStrategy.TOKEN, "dynamic": True},
    ),
    "static": ({"strategy": QuantizationStrategy.TENSOR}, {"strategy": QuantizationStrategy.TENSOR}),
    "block": (
        {"strategy": QuantizationStrategy.BLOCK, "block_structure": [128, 128]},
        {"strategy": QuantizationStrategy.GROUP, "group_size": 128, "dynamic": True},
    ),
}
"""By scheme: how weights and how activations are scaled."""


def pack(codes: Codes) -> dict[str, Tensor]:
    if codes.codes_OI.dtype != torch.uint8:
        stored = {"weight": codes.codes_OI.contiguous(), "weight_scale": codes.scale_OG.contiguous()}
        return stored if codes.input_scale is None else stored | {"input_scale": codes.input_scale}
    stored = {
        "weight_packed": pack_columns(codes.codes_OI, codes.bits),
        "weight_scale": codes.scale_OG.contiguous(),
        "weight_shape": torch.tensor(codes.codes_OI.shape, dtype=torch.int64),
    }
    if codes.zero_OG is not None:
        stored["weight_zero_point"] = pack_columns(codes.zero_OG.T, codes.bits).T.contiguous()
    return stored


def unpack(tensors: Mapping[str, Tensor]) -> Codes:
    if "weight_packed" not in tensors:
        return Codes(tensors["weight"], tensors["weight_scale"], None, 8, tensors.get("input_scale"))
    bits = 32 * tensors["weight_packed"].shape[1] // int(tensors["weight_shape"][1])
    zero_GO = tensors["weight_zero_point"].T if "weight_zero_point" in tensors else None
    return Codes(
        unpack_columns(tensors["weight_packed"], bits),
        tensors["weight_scale"],
        None if zero_GO is None else unpack_columns(zero_GO, bits).T.contiguous(),
        bits,
    )


def suffixes(variant: VariantPlan) -> tuple[str, ...]:
    if variant.group_size == 0:
        return ("weight", "weight_scale", *(("input_scale",) if variant.scheme == "static" else ()))
    return ("weight_packed", "weight_scale", "weight_shape", *(() if variant.symmetric else ("weight_zero_point",)))


def config(variant: VariantPlan, fused: Mapping[str, str]) -> dict[str, Any]:
    """Of the library's own classes. lm_head is always kept: where it is tied it is still a Linear to the loader."""
    made = QuantizationConfig(
        config_groups={"group_0": _scheme(variant, ["Linear"])},
        format=_FORMATS.get(variant.method, "pack-quantized"),
        quantization_status=QuantizationStatus.COMPRESSED,
        ignore=["lm_head", *(name for name in variant.ignored if name != "lm_head")],
    )
    dumped: dict[str, Any] = made.model_dump(mode="json")
    return dumped


def _scheme(variant: VariantPlan, targets: list[str]) -> QuantizationScheme:
    if variant.group_size == 0:
        kind = QuantizationType.FLOAT if variant.method == "fp8" else QuantizationType.INT
        weights, inputs = _EIGHT_BITS[variant.scheme]
        return QuantizationScheme(
            targets=targets,
            weights=QuantizationArgs(num_bits=8, type=kind, **weights),
            input_activations=QuantizationArgs(num_bits=8, type=kind, **inputs),
        )
    whole_row = variant.group_size == -1
    args = QuantizationArgs(
        num_bits=variant.bits,
        type=QuantizationType.INT,
        strategy=QuantizationStrategy.CHANNEL if whole_row else QuantizationStrategy.GROUP,
        group_size=None if whole_row else variant.group_size,
        symmetric=variant.symmetric,
        zp_dtype=None if variant.symmetric else torch.int8,
    )
    return QuantizationScheme(targets=targets, weights=args)
