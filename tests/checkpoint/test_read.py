"""Reading hands out what the file holds, and a tiny model that tests build by hand is one that transformers loads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from quantkit.checkpoint.index import read_index
from quantkit.checkpoint.read import Weights
from quantkit.errors import ArtifactError
from tests.conftest import TinyLlama


def test_every_tensor_comes_back_equal_to_the_bit(stories260k: Path) -> None:
    index = read_index(stories260k)
    expected = load_file(stories260k / "model.safetensors")
    with Weights(index) as weights:
        assert set(index.tensors) == set(expected)
        for name, tensor in expected.items():
            assert torch.equal(weights.get(name), tensor)
            assert index.tensors[name].bytes == tensor.numel() * tensor.element_size()


def test_a_shard_that_vanishes_is_named(tmp_path: Path, tiny_llama: TinyLlama) -> None:
    index = read_index(tiny_llama(tmp_path / "m"))
    (tmp_path / "m" / "model.safetensors").unlink()
    with Weights(index) as weights, pytest.raises(ArtifactError, match=r"model\.safetensors"):
        weights.get("model.norm.weight")


@pytest.mark.parametrize("tied", [False, True])
def test_the_tiny_model_loads_without_a_missing_or_spare_tensor(
    tmp_path: Path, tiny_llama: TinyLlama, tied: bool
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = tiny_llama(tmp_path, tied=tied)
    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer("déjà vu", return_tensors="pt").input_ids
    assert tokenizer.decode(ids[0]) == "déjà vu"
    assert model(ids).logits.isfinite().all()
