"""Everything that headers can show to be wrong is found from headers, all of it at once, and named."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from quantkit.checkpoint.index import parse_header, read_index
from quantkit.checkpoint.write import write_index
from quantkit.errors import ArtifactError

INDEX = "model.safetensors.index.json"

KEYS = st.sampled_from(["a", "dtype", "shape", "data_offsets", "F32"])
JSON = st.recursive(
    st.none() | st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=12,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two shards, an index, a config."""
    save_file({"a": torch.ones(4, 8), "b": torch.ones(3)}, tmp_path / "model-00001-of-00002.safetensors")
    save_file({"c": torch.ones(5, dtype=torch.bfloat16)}, tmp_path / "model-00002-of-00002.safetensors")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    write_index(tmp_path, ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"])
    return tmp_path


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def move_claim(folder: Path) -> None:
    save_file({"c": torch.ones(5), "b": torch.ones(3)}, folder / "model-00002-of-00002.safetensors")


def cut(folder: Path, count: int = 100) -> None:
    path = folder / "model-00001-of-00002.safetensors"
    path.write_bytes(path.read_bytes()[:-count])


def grow(folder: Path) -> None:
    path = folder / "model-00001-of-00002.safetensors"
    path.write_bytes(path.read_bytes() + b"more")


def rewrite_header(folder: Path, text: bytes) -> None:
    path = folder / "model-00001-of-00002.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(140))


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "no config": (lambda f: (f / "config.json").unlink(), r"no config\.json"),
    "config is no JSON": (lambda f: (f / "config.json").write_text("{"), "unreadable JSON"),
    "config is a list": (lambda f: (f / "config.json").write_text("[]"), "not a JSON object"),
    "shard missing": (lambda f: (f / "model-00002-of-00002.safetensors").unlink(), "shard is missing"),
    "last 100 bytes cut": (cut, "promises 100 bytes more"),
    "cut inside the header": (lambda f: cut(f, 200), "truncated"),
    "cut to nothing": (lambda f: (f / "model-00001-of-00002.safetensors").write_bytes(b""), "truncated"),
    "bytes too many": (grow, "4 bytes after the last tensor"),
    "in the index only": (
        lambda f: edit(f / INDEX, lambda v: v["weight_map"].update(d="model-00002-of-00002.safetensors")),
        "d is in the index but not",
    ),
    "in the shard only": (lambda f: edit(f / INDEX, lambda v: v["weight_map"].pop("b")), "b is in the shard but not"),
    "two claim one": (move_claim, "b stands in .*00001.* and in .*00002"),
    "index is no JSON": (lambda f: (f / INDEX).write_text("no"), "unreadable JSON"),
    "index without map": (lambda f: (f / INDEX).write_text("{}"), "no weight_map"),
    "index leaves the folder": (
        lambda f: edit(f / INDEX, lambda v: v["weight_map"].update(a="../x.safetensors")),
        r"'\.\./x",
    ),
    "no index": (lambda f: (f / INDEX).unlink(), "several shards and no"),
    "header is no JSON": (lambda f: rewrite_header(f, b"hello"), "unreadable safetensors header"),
    "unknown dtype": (
        lambda f: rewrite_header(f, b'{"a":{"dtype":"X7","shape":[1],"data_offsets":[0,4]}}'),
        "unreadable safetensors header .KeyError: 'X7'",
    ),
    "overlap": (
        lambda f: rewrite_header(
            f,
            b'{"a":{"dtype":"F32","shape":[20],"data_offsets":[0,80]},"b":{"dtype":"F32","shape":[25],"data_offsets":[40,140]}}',
        ),
        "bytes of a and b overlap",
    ),
    "shape and bytes differ": (
        lambda f: rewrite_header(f, b'{"a":{"dtype":"F32","shape":[20],"data_offsets":[0,140]}}'),
        r"a: 140 bytes for shape \[20\] of F32, not 80",
    ),
    "quantized": (
        lambda f: edit(f / "config.json", lambda v: v.update(quantization_config={"quant_method": "gptq"})),
        r"quantized already \(gptq\)",
    ),
    "remote code": (lambda f: edit(f / "config.json", lambda v: v.update(auto_map={"AutoModel": "m.M"})), "auto_map"),
    "python file": (lambda f: (f / "modeling_x.py").write_text(""), r"brings code: modeling_x\.py"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_each_damage_is_found_and_named(folder: Path, name: str) -> None:
    damage, message = DAMAGE[name]
    damage(folder)
    with pytest.raises(ArtifactError) as caught:
        read_index(folder)
    assert any(re.search(message, fault.what) for fault in caught.value.faults), caught.value
    assert all(str(folder) in fault.where and fault.do for fault in caught.value.faults)


def test_all_faults_come_at_once(folder: Path) -> None:
    for name in ("quantized", "last 100 bytes cut", "shard missing", "python file"):
        DAMAGE[name][0](folder)
    with pytest.raises(ArtifactError) as caught:
        read_index(folder)
    assert len(caught.value.faults) == 4


def test_pickles_are_refused_and_so_is_nothing_at_all(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ArtifactError, match=r"no \*\.safetensors"):
        read_index(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ArtifactError, match=r"safetensors only; here are pickles: pytorch_model\.bin"):
        read_index(tmp_path)
    with pytest.raises(ArtifactError, match="no such folder"):
        read_index(tmp_path / "absent")


def test_a_sound_folder_tells_names_shapes_and_bytes(folder: Path) -> None:
    (folder / "consolidated.safetensors").write_bytes(b"not part of the model: the index does not name it")
    index = read_index(folder)
    assert {name: (t.dtype, t.shape, t.bytes) for name, t in index.tensors.items()} == {
        "a": ("F32", (4, 8), 128),
        "b": ("F32", (3,), 12),
        "c": ("BF16", (5,), 10),
    }
    assert index.bytes == 150 and index.root == folder and index.origin == str(folder)


def test_an_artifact_may_say_that_it_is_quantized(folder: Path) -> None:
    DAMAGE["quantized"][0](folder)
    assert "quantization_config" in read_index(folder, quantized_ok=True).config


@given(st.binary(max_size=60))
def test_no_header_bytes_escape_the_error_tree(header: bytes) -> None:
    try:
        parse_header(header, "f", "f", 0)
    except ArtifactError:
        return


@given(JSON)
def test_no_json_header_escapes_the_error_tree(value: object) -> None:
    try:
        parse_header(json.dumps(value).encode(), "f", "f", 0)
    except ArtifactError:
        return
