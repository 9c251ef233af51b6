"""The linears of a checkpoint whose family nobody described, from the names and shapes of its tensors alone.

A guess that errs on the safe side: what is not clearly a linear of a decoder block is kept as it is, and stands in the
artifact's config as kept. Enough for methods that need no forward; what runs the model needs a line in families.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from quantkit.records import Module, TensorInfo

FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""What vLLM fuses in most models, by the last part of the name."""
FUSED_NAMES = ("qkv_proj", "gate_up_proj")

_FLOATS = ("BF16", "F16", "F32")
_BLOCK = re.compile(r"(^|\.)(layers?|h|blocks?)\.\d+\.")
# Whole parts of a name; a router decides where tokens go, and a few bits of it change that.
_KEPT_PARTS = re.compile(r"(^|\.)(lm_head|gate|router|shared_expert_gate|wpe|wte)(\.|$)")
_KEPT_WORDS = re.compile(r"embed|norm|conv|lora|bias|vision|visual|image|audio|speech|vit_|tower|projector")
_TRANSPOSED = ("gpt2", "openai-gpt", "imagegpt", "decision_transformer")


def linears(tensors: Mapping[str, TensorInfo]) -> tuple[Module, ...]:
    """Two-dimensional weights inside the blocks, without routers, embeddings, convolutions and other towers."""
    return tuple(
        Module(name=name.removesuffix(".weight"), rows=tensor.shape[0], columns=tensor.shape[1])
        for name, tensor in tensors.items()
        if name.endswith(".weight")
        and len(tensor.shape) == 2
        and tensor.dtype in _FLOATS
        and _BLOCK.search(name)
        and not _KEPT_PARTS.search(name)
        and not _KEPT_WORDS.search(name)
    )


def kept(tensors: Mapping[str, TensorInfo], quantized: tuple[Module, ...]) -> tuple[str, ...]:
    """The modules with a matrix (or more) of weights that stay as they are."""
    names = {f"{module.name}.weight" for module in quantized}
    matrices = (name for name, tensor in tensors.items() if len(tensor.shape) > 1 and name not in names)
    # An expert's or a parameter's own tensor has no module of its name: the module that holds it is kept.
    return tuple(
        sorted({name.removesuffix(".weight") if name.endswith(".weight") else _owner(name) for name in matrices})
    )


def why_not_by_rows(config: Mapping[str, Any]) -> str:
    """Why rows of this checkpoint's weights are not output channels; an empty string where they are."""
    kind = config.get("model_type")
    return f"{kind} stores its linears transposed (Conv1D)" if kind in _TRANSPOSED else ""


def _owner(name: str) -> str:
    return name.rpartition(".")[0]
