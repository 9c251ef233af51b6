"""Turn a GGUF into the safetensors folder that `gguf.describe` promised: dequantized, rotary layout undone.

llama.cpp stores the query and key rows of the llama architecture with each rotary pair side by side; Hugging Face
keeps the two halves of a head apart. Source: `permute` in llama.cpp's convert_hf_to_gguf.py, inverted here.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import psutil
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray
from torch import Tensor
from tqdm import tqdm

from quantkit.checkpoint.gguf import Gguf, GgufTensor, heads, hf_name
from quantkit.checkpoint.gguf_tokenizer import write_tokenizer
from quantkit.checkpoint.write import write_index, write_shard
from quantkit.errors import Fault, PlanError
from quantkit.records import Index, write_json

_ROOM = 64 << 20
"""Bytes that the tokenizer and the config may take beside the weights."""


def convert(gguf: Gguf, index: Index) -> None:
    """Write the folder `index.root`, whole or not at all. One shard is in memory at a time.

    Raises PlanError: too little disk, or a value that the target dtype cannot hold.
    """
    home = index.root.parent
    home.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(home).free
    if free < index.bytes + _ROOM:
        what = f"the converted checkpoint takes {index.bytes >> 20} MiB, {free >> 20} MiB are free"
        raise PlanError(Fault(what, str(home), "free some space, or set QUANTKIT_CACHE to a larger disk"))
    for stale in home.glob(f".{index.root.name}.*.part"):
        if not psutil.pid_exists(int(stale.name.split(".")[-2])):
            shutil.rmtree(stale)
    draft = home / f".{index.root.name}.{os.getpid()}.part"
    draft.mkdir()
    try:
        _write_weights(draft, gguf, index)
        write_tokenizer(draft, gguf.meta, index.config["max_position_embeddings"])
        write_json(draft / "generation_config.json", _generation(gguf))
        write_json(draft / "config.json", index.config)
        write_index(draft, sorted({tensor.file for tensor in index.tensors.values()}))
        draft.rename(index.root)
    except OSError:
        # Another process may have made the same folder meanwhile; its bytes are the same.
        if not index.root.is_dir():
            raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _write_weights(folder: Path, gguf: Gguf, index: Index) -> None:
    names = {hf_name(name): name for name in gguf.tensors}
    shards: dict[str, list[str]] = {}
    for name, tensor in index.tensors.items():
        shards.setdefault(tensor.file, []).append(name)
    with tqdm(total=len(index.tensors), desc="convert the GGUF", unit="tensor", leave=False) as bar:
        for file, members in sorted(shards.items()):
            tensors = {}
            for name in members:
                tensors[name] = _tensor(gguf, names[name], index.config["dtype"])
                bar.update()
            write_shard(folder / file, tensors)


def _tensor(gguf: Gguf, name: str, dtype: str) -> Tensor:
    tensor = gguf.tensors[name]
    values = dequantize(_raw(gguf.path, tensor), GGMLQuantizationType[tensor.type]).reshape(tensor.shape)
    if gguf.meta["general.architecture"] == "llama" and name.endswith((".attn_q.weight", ".attn_k.weight")):
        count, shared, _ = heads(gguf)
        values = apart(values, count if ".attn_q." in name else shared)
    exact = torch.from_numpy(np.ascontiguousarray(values))
    stored = exact.to(getattr(torch, dtype))
    if not bool(torch.isfinite(stored).all()):
        if not bool(torch.isfinite(exact).all()):
            raise PlanError(Fault(f"{name} holds inf or NaN", str(gguf.path), "get the file again, or another one"))
        what = f"{name} reaches {float(exact.abs().max()):g}, which {dtype} cannot hold"
        raise PlanError(Fault(what, "model.dtype", "use dtype: bfloat16"))
    return stored


def apart(values: NDArray[np.float32], count: int) -> NDArray[np.float32]:
    """Rows of `count` heads from rotary pairs side by side (0 0' 1 1' ...) to two halves (0 1 ... 0' 1' ...)."""
    rows = values.shape[0]
    return values.reshape(count, rows // count // 2, 2, -1).swapaxes(1, 2).reshape(values.shape)


def _raw(path: Path, tensor: GgufTensor) -> NDArray[np.uint8 | np.float32 | np.float16]:
    """The stored bytes as `gguf.quants.dequantize` wants them: [rows, bytes of a row], or plain numbers."""
    kind = {"F32": np.float32, "F16": np.float16}.get(tensor.type, np.uint8)
    flat = np.fromfile(path, dtype=kind, count=tensor.bytes // np.dtype(kind).itemsize, offset=tensor.start)
    return flat.reshape(*tensor.shape[:-1], -1)


def _generation(gguf: Gguf) -> dict[str, object]:
    """generation_config.json: where to stop. A chat model may end a turn with another token than a text."""
    meta = gguf.meta
    ends = [meta[key] for key in ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id") if key in meta]
    config: dict[str, object] = {"eos_token_id": sorted(set(ends))} if ends else {}
    for key, ours in (("bos", "bos_token_id"), ("padding", "pad_token_id")):
        if f"tokenizer.ggml.{key}_token_id" in meta:
            config[ours] = meta[f"tokenizer.ggml.{key}_token_id"]
    return config
