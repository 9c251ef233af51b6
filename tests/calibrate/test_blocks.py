"""Laws of running a block: alone it does what it does within the whole model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from quantkit.calibrate.blocks import build_block, embed, run_block
from quantkit.checkpoint.index import read_index
from quantkit.checkpoint.read import Weights
from quantkit.families import FAMILIES, family_of
from tests.conftest import TinyFamily


def blocks_are_the_whole_model(folder: Path, batch: int) -> None:
    index = read_index(folder)
    family = family_of(index.config)
    tokens = torch.randint(0, 64, (4, 24), generator=torch.Generator().manual_seed(3))
    model = AutoModelForCausalLM.from_pretrained(folder).model
    with torch.no_grad():
        whole = model(tokens, output_hidden_states=True)
    with Weights(index) as weights:
        hidden = embed(family, weights.get(f"{family.embedding}.weight"), tokens)
        for block in range(family.blocks(index.config)):
            torch.testing.assert_close(hidden, whole.hidden_states[block], rtol=1e-5, atol=1e-5)
            prefix = family.prefix(block)
            tensors = {n.removeprefix(prefix): weights.get(n) for n in index.tensors if n.startswith(prefix)}
            decoder = build_block(index.config, tensors, block, hidden)
            statistics = run_block(decoder, hidden, family, batch=batch, where=prefix)
            assert {statistics[group[0]].tokens for group in family.inputs if group[0] not in family.pooled} == {96}
            chosen = index.config.get("num_experts_per_tok", 0)
            assert sum(statistics[name].tokens for name in family.pooled) == 96 * chosen
    with torch.no_grad():
        torch.testing.assert_close(model.norm(hidden), whole.last_hidden_state, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.parametrize("batch", [1, 4])
def test_blocks_one_by_one_are_the_whole_model(kind: str, batch: int, tmp_path: Path, tiny_family: TinyFamily) -> None:
    blocks_are_the_whole_model(tiny_family(tmp_path, kind, "float32"), batch)


@pytest.mark.parametrize("kind", ["qwen2", "gemma2", "gemma3_text"])
def test_older_configs_that_imply_the_kind_of_each_block_too(
    kind: str, tmp_path: Path, tiny_family: TinyFamily
) -> None:
    folder = tiny_family(tmp_path, kind, "float32")
    config = json.loads((folder / "config.json").read_text())
    for key in ("layer_types", "rope_parameters"):
        del config[key]
    config |= {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": None, "sliding_window_pattern": 2}
    (folder / "config.json").write_text(json.dumps(config))
    blocks_are_the_whole_model(folder, 4)
