"""What is written is whole, the same every time, loads elsewhere, and differs from the source only where it must."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from quantkit.checkpoint.index import read_index
from quantkit.checkpoint.write import finish, shard_name, write_shard
from quantkit.errors import ArtifactError
from tests.conftest import TinyLlama


def test_equal_tensors_give_equal_bytes_whatever_their_order_and_strides(tmp_path: Path) -> None:
    a, b = torch.randn(6, 4, dtype=torch.float32), torch.arange(5)
    write_shard(tmp_path / "1.safetensors", {"a": a, "b": b})
    write_shard(tmp_path / "2.safetensors", {"b": b, "a": a.T.contiguous().T})
    assert (tmp_path / "1.safetensors").read_bytes() == (tmp_path / "2.safetensors").read_bytes()
    with safe_open(tmp_path / "1.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
    assert torch.equal(load_file(tmp_path / "2.safetensors")["a"], a)


def test_a_write_that_fails_leaves_the_old_file_and_no_scraps(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    write_shard(path, {"a": torch.ones(2)})
    before = path.read_bytes()
    shared = torch.ones(4)
    with pytest.raises(RuntimeError):
        write_shard(path, {"a": shared, "b": shared})
    assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["x.safetensors"]


def test_a_finished_folder_is_the_source_plus_one_key(tmp_path: Path, tiny_llama: TinyLlama) -> None:
    source = tiny_llama(tmp_path / "source")
    (source / "chat_template.jinja").write_text("{{ messages }}\r\n")
    (source / "preprocessor_config.json").write_text("{ }")
    (source / "README.md").write_text("a card of another model")
    # A generation config that transformers itself refuses to save again.
    (source / "generation_config.json").write_text('{"temperature": 0.6, "do_sample": false}')
    index = read_index(source)
    tensors = load_file(source / "model.safetensors")
    names = sorted(tensors)
    target = tmp_path / "target"
    shards = [shard_name(1, 2), shard_name(2, 2)]
    write_shard(target / shards[0], {name: tensors[name] for name in names[:5]})
    write_shard(target / shards[1], {name: tensors[name] for name in names[5:]})
    finish(target, index, shards, {"quant_method": "awq", "bits": 4})

    copied = {path.name for path in source.iterdir()} - {"model.safetensors", "config.json", "README.md"}
    for name in copied:
        assert (target / name).read_bytes() == (source / name).read_bytes()
    assert {path.name for path in target.iterdir()} == {*copied, *shards, "config.json", "model.safetensors.index.json"}
    config = json.loads((target / "config.json").read_text())
    assert list(config) == [*json.loads((source / "config.json").read_text()), "quantization_config"]
    assert config.pop("quantization_config") == {"quant_method": "awq", "bits": 4}
    assert config == index.config
    total = json.loads((target / "model.safetensors.index.json").read_text())["metadata"]["total_size"]
    assert total == sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    again = read_index(target, quantized_ok=True)
    assert {name: (t.dtype, t.shape) for name, t in again.tensors.items()} == {
        name: (t.dtype, t.shape) for name, t in index.tensors.items()
    }


def test_a_shard_that_is_not_there_leaves_no_index(tmp_path: Path, tiny_llama: TinyLlama) -> None:
    index = read_index(tiny_llama(tmp_path / "source"))
    (tmp_path / "target").mkdir()
    with pytest.raises(ArtifactError, match="shard is missing"):
        finish(tmp_path / "target", index, [shard_name(1, 1)], None)
    assert not (tmp_path / "target" / "model.safetensors.index.json").exists()
