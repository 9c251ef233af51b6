"""Laws of the family table, against transformers' own modules."""

from __future__ import annotations

from pathlib import Path

import pytest

from quantkit.checkpoint.index import read_index
from quantkit.errors import PlanError
from quantkit.families import FAMILIES, family_of
from tests.conftest import TinyFamily


@pytest.mark.parametrize("kind", FAMILIES)
def test_every_linear_of_a_block_is_in_the_table(kind: str, tmp_path: Path, tiny_family: TinyFamily) -> None:
    index = read_index(tiny_family(tmp_path, kind))
    family = family_of(index.config)
    blocks = range(family.blocks(index.config))
    two_dimensional = {name.removesuffix(".weight") for name, t in index.tensors.items() if len(t.shape) == 2}
    expected = {name for name in two_dimensional if name.startswith(family.layers)}
    routers = {family.prefix(block) + name for block in blocks for name in family.routers}
    assert {module.name for module in family.linears(index.config, index.tensors)} | routers == expected
    assert len(routers) == (len(blocks) if family.experts else 0)


@pytest.mark.parametrize("kind", FAMILIES)
def test_each_fold_feeds_one_group_of_inputs(kind: str) -> None:
    family = family_of({"model_type": kind, "num_experts": 3})
    assert [fold.linears for fold in family.folds] == list(family.inputs)


def test_unknown_families_are_refused_with_the_table() -> None:
    with pytest.raises(PlanError, match=rf"rwkv.*{', '.join(FAMILIES)}"):
        family_of({"model_type": "rwkv"})


def test_missing_linears_are_named(tmp_path: Path, tiny_family: TinyFamily) -> None:
    index = read_index(tiny_family(tmp_path, "llama"))
    tensors = dict(index.tensors)
    del tensors["model.layers.1.mlp.down_proj.weight"]
    with pytest.raises(PlanError, match=r"model\.layers\.1\.mlp\.down_proj"):
        family_of(index.config).linears(index.config, tensors)


def test_a_missing_router_and_a_missing_number_of_experts_are_named(tmp_path: Path, tiny_family: TinyFamily) -> None:
    index = read_index(tiny_family(tmp_path, "mixtral"))
    tensors = dict(index.tensors)
    del tensors["model.layers.2.block_sparse_moe.gate.weight"]
    with pytest.raises(PlanError, match=r"model\.layers\.2\.block_sparse_moe\.gate\.weight is missing"):
        family_of(index.config).linears(index.config, tensors)
    with pytest.raises(PlanError, match="number of experts"):
        family_of({"model_type": "mixtral"})
