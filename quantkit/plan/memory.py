"""Bytes: of an artifact, of the KV cache, of the quantize stage. From shapes alone."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from quantkit.records import Index, Module, VariantPlan

_INTERPRETER = 700 << 20
"""Python with torch and transformers imported, resident (measured)."""

BLOCK = 128
"""Rows and columns that share a scale in FP8's scheme block."""


def linear_bytes(module: Module, variant: VariantPlan) -> int:
    """Stored bytes of one quantized linear, its bias not counted."""
    rows, columns = module.rows, module.columns
    if variant.group_size == 0:
        scales = {"dynamic": 2 * rows, "static": 2 + 4, "block": 2 * -(-rows // BLOCK) * -(-columns // BLOCK)}
        return rows * columns + scales[variant.scheme]
    groups = 1 if variant.group_size == -1 else columns // variant.group_size
    codes, scale, zeros = rows * columns * variant.bits // 8, 2 * groups * rows, groups * rows * variant.bits // 8
    if variant.format == "awq":
        return codes + scale + zeros
    if variant.format == "gptq":
        return codes + scale + zeros + 4 * columns  # g_idx
    return codes + scale + (0 if variant.symmetric else zeros) + 16  # weight_shape


def artifact_bytes(index: Index, variant: VariantPlan) -> int:
    """Stored bytes of every tensor of the artifact, safetensors headers not counted."""
    saved = sum(
        index.tensors[f"{module.name}.weight"].bytes - linear_bytes(module, variant) for module in variant.modules
    )
    return index.bytes - saved


def kv_bytes_per_token(config: dict[str, Any], bytes_per_value: int = 2) -> int:
    """Keys and values of one token over all layers; with grouped queries only the KV heads count.

    0 where the config does not tell, as in families that quantkit does not know.
    """
    config = config.get("text_config", config)
    if not {"num_attention_heads", "num_hidden_layers"} <= set(config) or not {"head_dim", "hidden_size"} & set(config):
        return 0
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    return 2 * int(config["num_hidden_layers"]) * int(kv_heads) * int(head_dim) * bytes_per_value


def quantize_peak_bytes(index: Index, variants: Iterable[VariantPlan], samples: int, length: int) -> int:
    """Predicted peak of the quantize stage: one block, its statistics, the hidden states. Depth does not enter."""
    config = index.config
    hidden = samples * length * int(config["hidden_size"]) * 2
    embedding = max((tensor.bytes for name, tensor in index.tensors.items() if "embed" in name), default=0)
    layers = int(config["num_hidden_layers"])
    block = sum(t.bytes for n, t in index.tensors.items() if ".layers." in n) // max(layers, 1)
    widest = max((module.columns for variant in variants for module in variant.modules), default=0)
    largest = max((module.rows * module.columns for variant in variants for module in variant.modules), default=0)
    grams = 4 * (3 * int(config["hidden_size"]) ** 2 + widest**2)
    # Solving the widest input: its Gram, the damped copy, its inverse factor and a few float32 copies of the weight.
    solving = 4 * (4 * widest**2 + 8 * largest)
    return _INTERPRETER + 2 * hidden + embedding + 4 * block + grams + solving


def shards_peak_bytes(variants: Iterable[VariantPlan]) -> int:
    """Predicted peak of quantizing shard by shard: of the largest linear the codes and their packed form."""
    largest = [max(module.rows * module.columns for module in variant.modules) for variant in variants]
    return _INTERPRETER + (256 << 20) + 2 * sum(largest)


def quantize_disk_bytes(index: Index, variants: Iterable[VariantPlan], tokens: int) -> int:
    """Artifacts, and the hidden states of the calibration tokens that a killed run resumes from."""
    hidden = 2 * tokens * int(index.config["hidden_size"]) * 2 if tokens else 0
    return sum(variant.bytes for variant in variants) + hidden
