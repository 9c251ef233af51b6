"""Load a model folder into transformers, whatever it is stored as: what evaluation runs.

Packed weights are unpacked to (q - z) * s in float32 and cast to the model's dtype once: q - z is exact there, so this
is the weight that vLLM's kernels multiply with. FP8 and INT8 quantize activations, as their kernels do.
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

from quantkit.calibrate.experts import split_experts
from quantkit.checkpoint.index import read_index
from quantkit.checkpoint.read import Weights
from quantkit.engines.codes import dense, unpack_module
from quantkit.errors import ArtifactError, Fault
from quantkit.families import FAMILIES, family_of
from quantkit.pack import FORMATS, Codes
from quantkit.solve.eight_bit import SIDE, nearest, per_row

_MARKS = ("qweight", "weight_packed", "weight_scale")

_LEAST_SCALE = {torch.float8_e4m3fn: 1 / (448 * 512)}
"""vLLM's FP8 kernels never scale a token by less than this."""


class EightBitLinear(nn.Module):
    """FP8 or INT8: the weight's codes, and activations in the same codes, as vLLM's kernels quantize them.

    A weight with a scale a row: a scale a token, as it comes. One a block of 128 x 128: one a token and 128 columns.
    One for all: the calibrated one, beyond which activations clamp.
    """

    def __init__(self, codes: Codes, bias_O: Tensor | None, dtype: torch.dtype) -> None:
        super().__init__()
        self.out_features, self.in_features = codes.codes_OI.shape
        self.codes = codes.codes_OI.dtype
        self.input_scale = codes.input_scale
        scale = codes.scale_OG.float()
        self.blocks = scale.ndim == 2 and scale.shape != (self.out_features, 1)
        # Both codes are exact in bfloat16 and float16; products are summed in float32 by the matrix product. Scales
        # that change within a row have to be multiplied in before, and that is exact in float32 alone.
        weight_OI = dense(codes) if self.blocks else codes.codes_OI.to(dtype)
        self.weight = nn.Parameter(weight_OI, requires_grad=False)
        self.scale_O = None if self.blocks else nn.Parameter(scale.flatten(), requires_grad=False)
        self.bias = None if bias_O is None else nn.Parameter(bias_O, requires_grad=False)

    def forward(self, input_TI: Tensor) -> Tensor:
        if self.scale_O is None:
            output_TO = functional.linear(self._grouped(input_TI), self.weight)
        else:
            codes_TI, scale = self._quantized(input_TI)
            output_TO = functional.linear(codes_TI.to(self.weight.dtype), self.weight).float() * scale * self.scale_O
        output_TO = output_TO.to(input_TI.dtype)
        return output_TO if self.bias is None else output_TO + self.bias

    def _quantized(self, input_TI: Tensor) -> tuple[Tensor, Tensor]:
        if self.input_scale is not None:
            return nearest(input_TI.float() * self.input_scale.reciprocal(), self.codes), self.input_scale
        return per_row(input_TI, self.codes, dtype=torch.float32, least=_LEAST_SCALE.get(self.codes, 0))

    def _grouped(self, input_TI: Tensor) -> Tensor:
        """What the codes of each token and 128 columns stand for, float32."""
        columns = input_TI.shape[-1]
        padded = functional.pad(input_TI, (0, -columns % SIDE))
        codes, scale = per_row(padded.reshape(*input_TI.shape[:-1], -1, SIDE), self.codes, dtype=torch.float32)
        return (codes.float() * scale).flatten(-2)[..., :columns]


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
    family = family_of(index.config) if index.config.get("model_type") in FAMILIES else None
    if dynamic and family:
        for block in model.get_submodule(family.layers):
            split_experts(block, family)
    for module, codes in dynamic.items():
        name = family.loaded(module) if family else module
        model.set_submodule(name, EightBitLinear(codes, state.get(f"{module}.bias"), dtype))
    if (folder / "generation_config.json").is_file():
        text = json.loads((folder / "generation_config.json").read_text(encoding="utf-8"))
        model.generation_config = GenerationConfig.from_dict(text)
    return model.eval()


def _packed(names: Mapping[str, Any]) -> list[str]:
    return sorted({name.rpartition(".")[0] for name in names if name.rpartition(".")[2] in _MARKS})


def _model_dtype(state: Mapping[str, Tensor]) -> torch.dtype:
    """That of the widest-used floating tensors (the embedding is among them)."""
    return max((tensor for tensor in state.values() if tensor.is_floating_point()), key=lambda t: t.numel()).dtype
