"""Run one decoder block, in transformers' own code, over the calibration tokens."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel

from quantkit.calibrate.experts import split_experts
from quantkit.calibrate.statistics import Gathering, finish_all
from quantkit.families import Family, family_of
from quantkit.records import Statistics


def embed(family: Family, table_VD: Tensor, tokens_SL: Tensor) -> Tensor:
    """The hidden states [S, L, D] that enter the first block."""
    hidden_SLD = nn.functional.embedding(tokens_SL, table_VD)
    if family.scales_embedding:
        hidden_SLD *= torch.tensor(table_VD.shape[1] ** 0.5).to(table_VD.dtype)
    return hidden_SLD


def build_block(config: Mapping[str, Any], tensors: Mapping[str, Tensor], number: int, batch: Tensor) -> nn.Module:
    """The decoder of `config` cut to block `number`, without final norm: hidden states in, hidden states out.

    Masks, rotary embedding and attention are transformers' own, because the whole decoder around the block is.

    Args:    tensors: the block's, by their name within it. batch: any tensor of the dtype to compute in.
    Raises:  RuntimeError: a tensor is missing, or none of the block's.
    """
    family = family_of(config)
    fields = {key: value for key, value in config.items() if key not in ("model_type", "torch_dtype", "dtype")}
    settings = AutoConfig.for_model(config["model_type"], **copy.deepcopy(fields))
    if getattr(settings, "layer_types", None):
        settings.layer_types = settings.layer_types[number : number + 1]
    settings.num_hidden_layers = 1
    with torch.device("meta"):
        decoder: Any = AutoModel.from_config(settings, dtype=batch.dtype)
    split_experts(decoder.layers[0], family)
    loaded = {family.loaded(name): tensor for name, tensor in tensors.items()}
    decoder.layers[0].load_state_dict(loaded, strict=True, assign=True)
    decoder.norm = nn.Identity()
    decoder.rotary_emb = type(decoder.rotary_emb)(config=decoder.config)
    made: nn.Module = decoder.eval()
    return made


def run_block(
    decoder: nn.Module,
    hidden_SLD: Tensor,
    family: Family,
    *,
    batch: int,
    where: str,
) -> dict[str, Statistics]:
    """Run every sample through the block; `hidden_SLD` is overwritten with the block's output.

    Args:    family: its `inputs` are watched. batch: samples at a time. where: prefix of the names, for errors.
    Returns: statistics by the first linear of each input.
    Raises:  SolveError: an input is not finite, or a linear was never called.
    """
    layer: Any = decoder.layers[0]  # type: ignore[index]  # a ModuleList, which nn.Module's attributes do not show
    gatherings, hooks = {}, []
    # Where experts share an input, each sees a part of the tokens; their router sees all.
    routers = {fold.linears[0]: fold.also[0] for fold in family.folds if fold.also}
    for first, *_ in family.inputs:
        linear: Any = layer.get_submodule(family.loaded(routers.get(first, first)))
        gatherings[first] = Gathering(linear.weight.shape[1])
        hooks.append(linear.register_forward_pre_hook(_watch(gatherings[first])))
    try:
        with torch.inference_mode():
            for start in range(0, len(hidden_SLD), batch):
                part = hidden_SLD[start : start + batch]
                part.copy_(decoder(inputs_embeds=part, use_cache=False).last_hidden_state)
    finally:
        for hook in hooks:
            hook.remove()
    return finish_all(gatherings, family.pooled, where)


def _watch(gathering: Gathering) -> Any:
    def take(_module: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        gathering.add(arguments[0])

    return take
