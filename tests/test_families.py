"""Laws of the family table, against transformers' own modules."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from quantkit.errors import PlanError
from quantkit.families import FAMILIES, family_of
from quantkit.records import TensorInfo


def _headers(kind: str) -> tuple[dict, dict[str, TensorInfo]]:
    config = AutoConfig.for_model(
        kind, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, vocab_size=40
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    tensors = {
        name: TensorInfo(dtype="F32", shape=tuple(tensor.shape), file="x", bytes=4 * tensor.numel())
        for name, tensor in model.state_dict().items()
    }
    return config.to_dict(), tensors


@pytest.mark.parametrize("kind", FAMILIES)
def test_every_linear_of_a_block_is_in_the_table(kind: str) -> None:
    config, tensors = _headers(kind)
    family = family_of(config)
    two_dimensional = {n.removesuffix(".weight") for n, t in tensors.items() if len(t.shape) == 2}
    expected = {name for name in two_dimensional if name.startswith(family.layers)}
    assert {module.name for module in family.linears(config, tensors)} == expected


@pytest.mark.parametrize("kind", FAMILIES)
def test_each_fold_feeds_one_group_of_inputs(kind: str) -> None:
    family = FAMILIES[kind]
    assert [fold.linears for fold in family.folds] == list(family.inputs)


def test_unknown_families_are_refused_with_the_table() -> None:
    with pytest.raises(PlanError, match=r"rwkv.*llama, mistral, qwen2"):
        family_of({"model_type": "rwkv"})


def test_missing_linears_are_named() -> None:
    config, tensors = _headers("llama")
    del tensors["model.layers.1.mlp.down_proj.weight"]
    with pytest.raises(PlanError, match=r"model\.layers\.1\.mlp\.down_proj"):
        family_of(config).linears(config, tensors)
