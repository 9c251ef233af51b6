"""Load a model folder into transformers, whatever it is stored as: what evaluation runs.

INT4 weights are unpacked to (q - z) * s in float32 and cast to the model's dtype once: q - z is exact there, so this
is the weight that vLLM's kernels multiply with. FP8 and INT8 quantize activations per token, as their kernels do.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, GenerationConfig

from quantkit.checkpoint.index import read_index
from quantkit.checkpoint.read import Weights
from quantkit.errors import ArtifactError, Fault
from quantkit.pack import FORMATS, Codes
from quantkit.solve.eight_bit import per_row
from quantkit.solve.grids import MIDDLE, Grid, decode

_MARKS = ("qweight", "weight_packed", "weight_scale")


class DynamicLinear(nn.Module):
    """FP8 or INT8: a weight with a scale a row, activations in the same codes with a scale a token, as they come."""

    def __init__(self, codes: Codes, bias_O: Tensor | None, dtype: torch.dtype) -> None:
        super().__init__()
        self.out_features, self.in_features = codes.codes_OI.shape
        self.codes = codes.codes_OI.dtype
        # Both codes are exact in bfloat16 and float16; products are summed in float32 by the matrix product.
        self.weight = nn.Parameter(codes.codes_OI.to(dtype), requires_grad=False)
        self.scale_O = nn.Parameter(codes.scale_OG.float().flatten(), requires_grad=False)
        self.bias = None if bias_O is None else nn.Parameter(bias_O, requires_grad=False)

    def forward(self, input_TI: Tensor) -> Tensor:
        codes_TI, scale_T1 = per_row(input_TI, self.codes, dtype=torch.float32)
        output_TO = functional.linear(codes_TI.to(self.weight.dtype), self.weight).float() * scale_T1 * self.scale_O
        output_TO = output_TO.to(input_TI.dtype)
        return output_TO if self.bias is None else output_TO + self.bias


def dense(codes: Codes) -> Tensor:
    """float32 [O, I]."""
    if codes.codes_OI.dtype != torch.uint8:
        return codes.codes_OI.float() * codes.scale_OG.float()
    scale_OG = codes.scale_OG.float()
    zero_OG = torch.full_like(scale_OG, MIDDLE) if codes.zero_OG is None else codes.zero_OG.float()
    return decode(codes.codes_OI, Grid(scale_OG, zero_OG))


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


def load_model(folder: Path) -> Any:
    """A transformers model in eval mode, in the dtype of its checkpoint.

    Raises ArtifactError: the folder is no checkpoint, or is quantized in a way that quantkit does not write.
    """
    index = read_index(folder, quantized_ok=True)
    settings = index.config.get("quantization_config")
    fields = {key: value for key, value in index.config.items() if key != "quantization_config"}
    state: dict[str, Tensor] = {}
    dynamic: dict[str, Codes] = {}
    with Weights(index) as weights:
        packed = _packed(index.tensors)
        format = settings["quant_method"] if settings else ""
        if packed and format not in FORMATS:
            do = f"use one of {', '.join(FORMATS)}"
            raise ArtifactError(Fault(f"quantized as {format!r}", str(folder / "config.json"), do))
        for name in index.tensors:
            if name.rpartition(".")[0] not in packed or name.endswith(".bias"):
                state[name] = weights.get(name)
        dtype = _model_dtype(state)
        for module in packed:
            codes = unpack_module(weights, module, format)
            if codes.codes_OI.dtype != torch.uint8:
                dynamic[module] = codes
            state[f"{module}.weight"] = dense(codes).to(dtype)
    config = AutoConfig.for_model(fields["model_type"], **{k: v for k, v in fields.items() if k != "model_type"})
    kind = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    model: Any = kind.from_pretrained(None, config=config, state_dict=state, dtype=dtype)
    for module, codes in dynamic.items():
        model.set_submodule(module, DynamicLinear(codes, state.get(f"{module}.bias"), dtype))
    if (folder / "generation_config.json").is_file():
        text = json.loads((folder / "generation_config.json").read_text(encoding="utf-8"))
        model.generation_config = GenerationConfig.from_dict(text)
    return model.eval()


def _packed(names: Mapping[str, Any]) -> list[str]:
    return sorted({name.rpartition(".")[0] for name in names if name.rpartition(".")[2] in _MARKS})


def _model_dtype(state: Mapping[str, Tensor]) -> torch.dtype:
    """That of the widest-used floating tensors (the embedding is among them)."""
    return max((tensor for tensor in state.values() if tensor.is_floating_point()), key=lambda t: t.numel()).dtype
