"""Write a checkpoint folder: shards whole or not at all, the index last, everything else byte for byte."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from quantkit.checkpoint.index import INDEX_NAME, read_header
from quantkit.errors import ArtifactError, Fault
from quantkit.records import Index, write_json, write_text

_SIDE_FILES = (
    r"tokenizer.*|vocab.*|merges\.txt|.*\.model|special_tokens_map\.json|added_tokens\.json"
    r"|generation_config\.json|chat_template.*|.*\.jinja|(pre)?processor_config\.json|.*_processor\.json"
)


def shard_name(number: int, count: int) -> str:
    """The name of shard `number` (from 1) of `count`."""
    return f"model-{number:05d}-of-{count:05d}.safetensors"


def write_shard(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """One safetensors file, whole or not at all; the same tensors give the same bytes."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.part")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        save_file({name: tensors[name].contiguous() for name in sorted(tensors)}, draft, metadata={"format": "pt"})
        # safetensors makes files that only their owner reads; a server may run as another user.
        draft.chmod(0o644)
        with draft.open("rb+") as file:
            os.fsync(file.fileno())
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
    sync_folder(path.parent)


def write_index(folder: Path, shard_names: Sequence[str]) -> None:
    """model.safetensors.index.json over shards that are complete, from their headers.

    Raises ArtifactError: a shard is missing or broken, or two hold one tensor.
    """
    weight_map: dict[str, str] = {}
    total = 0
    for shard in sorted(shard_names):
        for name, tensor in read_header(folder / shard).items():
            if name in weight_map:
                what = f"{name} stands in {weight_map[name]} and in {shard}"
                raise ArtifactError(Fault(what, str(folder), "delete the folder and run the command again"))
            weight_map[name] = shard
            total += tensor.bytes
    write_json(folder / INDEX_NAME, {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))})
    sync_folder(folder)


def finish(
    folder: Path, index_source: Index, shard_names: Sequence[str], quantization_config: Mapping[str, Any] | None
) -> None:
    """Turn a folder of shards into a model folder that loads.

    Copies the source's tokenizer, generation config, chat template and preprocessor files byte for byte, and its
    config.json with the key `quantization_config` added at the end (None: byte for byte too). Custom code (*.py) is
    not copied: sources that need it are refused. The index is written last, so a folder with an index is complete.

    Raises ArtifactError: a shard is missing or broken.
    """
    for path in sorted(index_source.root.iterdir()):
        if path.is_file() and re.fullmatch(_SIDE_FILES, path.name):
            _copy(path, folder / path.name)
    source = index_source.root / "config.json"
    if quantization_config is None:
        _copy(source, folder / source.name)
    else:
        config = json.loads(source.read_text(encoding="utf-8"))
        config["quantization_config"] = dict(quantization_config)
        write_text(folder / source.name, json.dumps(config, indent=2, ensure_ascii=False) + "\n")
    write_index(folder, shard_names)


def _copy(source: Path, target: Path) -> None:
    draft = target.with_name(f".{target.name}.{os.getpid()}.part")
    shutil.copyfile(source, draft)
    with draft.open("rb+") as file:
        os.fsync(file.fileno())
    draft.replace(target)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder survive a loss of power."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
