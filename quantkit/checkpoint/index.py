"""A checkpoint from its headers alone: config.json and the first bytes of each safetensors file. No torch here.

A safetensors file is: the header's length (8 bytes, little endian), the header (JSON: name -> dtype, shape,
data_offsets), then the tensors without gaps. Source: the safetensors format description, huggingface/safetensors.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

from quantkit.errors import ArtifactError, Fault
from quantkit.records import Index, TensorInfo

BITS = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}
INDEX_NAME = "model.safetensors.index.json"
_LARGEST_HEADER = 100_000_000
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
_AGAIN = "download or copy the file again"


def read_index(folder: Path, origin: str | None = None, *, quantized_ok: bool = False) -> Index:
    """Index a checkpoint folder; no weight is read, so this takes milliseconds.

    Args:    origin: what the recipe named; None: the folder itself.
             quantized_ok: an artifact is being read, not a source: `quantization_config` is no fault.
    Raises:  ArtifactError with every fault of the folder: config or shard missing, truncated, unreadable or in
             disagreement with the index; a tensor claimed twice; pickles only; custom code; already quantized.
    """
    if not folder.is_dir():
        raise ArtifactError(Fault("no such folder", str(folder), "give the folder of a safetensors checkpoint"))
    faults: list[Fault] = []
    config = _read_json(folder / "config.json", "a model folder has one; give the folder that holds it", faults)
    faults += config_faults(config, str(folder / "config.json"), quantized_ok=quantized_ok)
    names = [path.name for path in folder.iterdir()]
    faults += code_faults(names, str(folder))
    unread = len(faults)
    index = _read_json(folder / INDEX_NAME, _AGAIN, faults) if INDEX_NAME in names else None
    if len(faults) == unread:
        weight_map, files = weight_files(names, index, str(folder), faults)
    else:
        weight_map, files = weight_files(names, None, str(folder), [])
    headers: dict[str, dict[str, TensorInfo]] = {}
    for name in files:
        try:
            headers[name] = read_header(folder / name)
        except ArtifactError as error:
            faults += error.faults
    faults += disagreements(headers, weight_map, str(folder))
    tensors = {name: tensor for header in headers.values() for name, tensor in header.items()}
    if files and headers and not tensors:
        faults.append(Fault("no tensor in any file", str(folder), "give a checkpoint with weights"))
    if faults:
        raise ArtifactError(*faults)
    return Index(root=folder, config=config, tensors=dict(sorted(tensors.items())), origin=origin or str(folder))


def read_header(path: Path) -> dict[str, TensorInfo]:
    """The tensors of one safetensors file. Raises ArtifactError: missing, truncated, or not such a file."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(_LARGEST_HEADER, size - 8):
                what = f"truncated, or no safetensors file: a header of {length:,} bytes in a file of {size:,}"
                raise ArtifactError(Fault(what, str(path), _AGAIN))
            return parse_header(file.read(length), path.name, str(path), size - 8 - length)
    except FileNotFoundError:
        raise ArtifactError(Fault("this shard is missing", str(path), "complete the download or copy")) from None
    except OSError as error:
        raise ArtifactError(Fault(f"not readable: {error.strerror}", str(path), _AGAIN)) from None


def parse_header(header: bytes, file: str, where: str, room: int) -> dict[str, TensorInfo]:
    """The tensors that a safetensors header names. `room`: bytes that follow it in the file.

    Raises ArtifactError: unreadable, overlapping or gapped offsets, or an end that differs from `room`.
    """
    try:
        entries = json.loads(header)
        spans = []
        tensors = {}
        for name, entry in entries.items():
            if name == "__metadata__":
                continue
            start, end = entry["data_offsets"]
            shape = tuple(entry["shape"])
            tensors[name] = TensorInfo(dtype=entry["dtype"], shape=shape, file=file, bytes=end - start)
            expected = prod(shape) * BITS[entry["dtype"]] // 8
            if end - start != expected:
                what = f"{name}: {end - start:,} bytes for shape {list(shape)} of {entry['dtype']}, not {expected:,}"
                raise ArtifactError(Fault(what, where, _AGAIN))
            spans.append((start, end, name))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        what = f"unreadable safetensors header ({type(error).__name__}: {error})"
        raise ArtifactError(Fault(what, where, _AGAIN)) from None
    faults = []
    before, reached = "the header", 0
    for start, end, name in sorted(spans):
        if start != reached:
            word = "overlap" if start < reached else "leave a gap"
            faults.append(Fault(f"the bytes of {before} and {name} {word}", where, _AGAIN))
        before, reached = name, max(end, reached)
    if reached > room:
        faults.append(
            Fault(f"truncated: the header promises {reached - room:,} bytes more than there are", where, _AGAIN)
        )
    elif reached < room and not faults:
        faults.append(Fault(f"{room - reached:,} bytes after the last tensor", where, _AGAIN))
    if faults:
        raise ArtifactError(*faults)
    return tensors


def config_faults(config: Mapping[str, Any], where: str, *, quantized_ok: bool = False) -> list[Fault]:
    """What a config alone shows: already quantized, or in need of remote code."""
    faults = []
    quantized = config.get("quantization_config") or config.get("compression_config")
    if quantized and not quantized_ok:
        method = quantized.get("quant_method", "unknown method") if isinstance(quantized, dict) else quantized
        do = "give the checkpoint that it was made from, in bfloat16 or float16"
        faults.append(Fault(f"the model is quantized already ({method})", where, do))
    if "auto_map" in config:
        do = "use a checkpoint whose architecture transformers has itself (no auto_map, no *.py)"
        faults.append(Fault("the config asks for code from the checkpoint (auto_map)", where, do))
    return faults


def code_faults(names: list[str], where: str) -> list[Fault]:
    """What file names alone show: custom code, or pickles in place of safetensors."""
    faults = []
    code = sorted(name for name in names if name.endswith(".py"))
    if code:
        do = "use a checkpoint whose architecture transformers has itself; quantkit runs no code of a checkpoint"
        faults.append(Fault(f"the checkpoint brings code: {', '.join(code)}", where, do))
    if not any(name.endswith(".safetensors") for name in names):
        pickles = sorted(name for name in names if name.endswith(_PICKLES))
        if pickles:
            do = "convert with save_pretrained(safe_serialization=True), where you trust the file"
            faults.append(Fault(f"safetensors only; here are pickles: {', '.join(pickles[:4])}", where, do))
        else:
            faults.append(Fault("no *.safetensors file", where, "give a folder with safetensors weights"))
    return faults


def weight_files(
    there: list[str], index: Mapping[str, Any] | None, where: str, faults: list[Fault]
) -> tuple[dict[str, str] | None, list[str]]:
    """The index's weight map (None: no index, or no usable one) and the safetensors files that make up the model."""
    shards = sorted(name for name in there if name.endswith(".safetensors"))
    if index is None:
        if "model.safetensors" in shards:
            return None, ["model.safetensors"]
        if len(shards) > 1:
            faults.append(Fault(f"several shards and no {INDEX_NAME}", where, "add the index file"))
        return None, shards
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        faults.append(Fault(f"{INDEX_NAME} has no weight_map of tensor to file", where, _AGAIN))
        return None, shards
    outside = sorted(name for name in set(weight_map.values()) if not re.fullmatch(r"[^/\\]+\.safetensors", name))
    for name in outside:
        faults.append(Fault(f"{INDEX_NAME} names {name!r}, not a safetensors file of this folder", where, _AGAIN))
    return weight_map, sorted(set(weight_map.values()) - set(outside))


def disagreements(
    headers: Mapping[str, Mapping[str, TensorInfo]], weight_map: Mapping[str, str] | None, where: str
) -> list[Fault]:
    """Tensors that two shards claim, that the index promises in vain, or that it does not know."""
    faults = []
    claims: dict[str, list[str]] = {}
    for file, header in headers.items():
        for name in header:
            claims.setdefault(name, []).append(file)
    for name, claimants in claims.items():
        if len(claimants) > 1:
            do = "delete the shard that does not belong here, or get the checkpoint again"
            faults.append(Fault(f"{name} stands in {' and in '.join(claimants)}", where, do))
    if weight_map is None:
        return faults
    for name, file in weight_map.items():
        if file in headers and name not in headers[file]:
            faults.append(Fault(f"{name} is in the index but not in the shard", f"{where}: {file}", _AGAIN))
    for name in sorted(set(claims) - set(weight_map)):
        faults.append(Fault(f"{name} is in the shard but not in the index", f"{where}: {claims[name][0]}", _AGAIN))
    return faults


def _read_json(path: Path, do: str, faults: list[Fault]) -> dict[str, Any]:
    """The JSON object in `path`; {} and a fault where there is none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(value, dict):
            return value
        faults.append(Fault("not a JSON object", str(path), _AGAIN))
    except FileNotFoundError:
        faults.append(Fault(f"no {path.name}", str(path), do))
    except (OSError, ValueError) as error:
        faults.append(Fault(f"unreadable JSON: {error}", str(path), _AGAIN))
    return {}
