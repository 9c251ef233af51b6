"""Bytes: of an artifact, of the KV cache, of the quantize stage. From shapes alone."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from quantkit.records import Index, Module, VariantPlan

_INTERPRETER = 700 << 20
"""Python with torch and transformers imported, resident (measured)."""

_FLOAT_BYTES = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2}


def linear_bytes(module: Module, format: str, group_size: int, symmetric: bool) -> int:
    """Stored bytes of one quantized linear, its bias not counted; group_size 0 is one scale a row."""
    rows, columns = module.rows, module.columns
    if group_size == 0:
        return rows * columns + 2 * rows
    groups = 1 if group_size == -1 else columns // group_size
    codes, scales, zeros = rows * columns // 2, 2 * groups * rows, groups * rows // 2
    if format == "awq":
        return codes + scales + zeros
    if format == "gptq":
        return codes + scales + zeros + 4 * columns  # g_idx
    return codes + scales + (0 if symmetric else zeros) + 16  # weight_shape


def artifact_bytes(index: Index, modules: Iterable[Module], format: str, group_size: int, symmetric: bool) -> int:
    """Stored bytes of every tensor of the artifact, safetensors headers not counted."""
    saved = sum(
        index.tensors[f"{module.name}.weight"].bytes - linear_bytes(module, format, group_size, symmetric)
        for module in modules
    )
    return index.bytes - saved


def kv_bytes_per_token(config: dict[str, Any], bytes_per_value: int = 2) -> int:
    """Keys and values of one token over all layers; with grouped queries only the KV heads count."""
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


def quantize_disk_bytes(variants: Iterable[VariantPlan], samples: int, length: int, hidden_size: int) -> int:
    """Artifacts, and the hidden states that a killed run resumes from."""
    return sum(variant.bytes for variant in variants) + 2 * samples * length * hidden_size * 2
