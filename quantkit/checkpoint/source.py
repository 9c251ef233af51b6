"""Where a checkpoint comes from: a folder, the hub, or a GGUF. Headers first; bytes only when they are wanted.

No torch here: a dry run uses this. The hub's client is imported only for a hub id, the converter only to convert.
"""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

from quantkit.checkpoint import gguf
from quantkit.checkpoint.index import read_index
from quantkit.errors import ArtifactError, Fault, PlanError
from quantkit.records import Index

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def open_source(source: str, revision: str | None, dtype: str) -> Index:
    """The index of what a recipe's `model` names, from headers; nothing is downloaded or converted.

    Args:    source: a folder, a hub id org/name, package:NAME/FILE.gguf, or the path of a .gguf file.
             revision: of a hub id: branch, tag or commit. The others have none.
             dtype: 'bfloat16' or 'float16', for a GGUF; other checkpoints keep their own.
    Raises:  PlanError with every fault of the source.
    """
    kind = _kind(source)
    if kind != "hub" and revision is not None:
        do = "remove model.revision; only a hub id has one"
        raise PlanError(Fault(f"{source} is no hub id, so it has no revision", "model.revision", do))
    if kind == "gguf":
        return gguf.describe(gguf.read_header(gguf.locate(source)), source, dtype)
    if kind == "hub":
        from quantkit.checkpoint import hub

        return hub.open_repository(source, revision)
    try:
        return read_index(Path(source).expanduser().resolve(), source)
    except ArtifactError as error:
        raise PlanError(*error.faults) from None


def materialise(index: Index, revision: str | None, dtype: str) -> Index:
    """The same index with its files on disk: converts a GGUF, downloads a repository, or has nothing to do.

    Converted checkpoints stay in the cache folder and are used again.
    Raises:  PlanError: no network, too little disk. ArtifactError: what came is not what was announced.
    """
    kind = _kind(index.origin)
    if kind == "hub":
        from quantkit.checkpoint import hub

        return hub.download(index)
    if kind == "folder":
        return index
    if not index.root.is_dir():
        from quantkit.checkpoint.gguf_convert import convert

        convert(gguf.read_header(gguf.locate(index.origin)), index)
    do = f"delete {index.root} and run the command again"
    try:
        made = read_index(index.root, index.origin).model_copy(update={"quantized_origin": index.quantized_origin})
    except ArtifactError as error:
        raise ArtifactError(*(Fault(fault.what, fault.where, do) for fault in error.faults)) from None
    if made != index:
        raise ArtifactError(Fault("the converted checkpoint is not what its GGUF promises", str(index.root), do))
    return made


def source_digest(index: Index) -> str:
    """sha256 that changes when the source does: config, tensor headers, and its content as far as cheap.

    A hub checkpoint and a converted GGUF live in folders that are named after their content; of a plain folder the
    first KiB of every file's tensor data is read.
    """
    digest = hashlib.sha256(json.dumps(index.config, sort_keys=True).encode())
    for name, tensor in sorted(index.tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tensor.shape} {tensor.file} {tensor.bytes}\n".encode())
    if _kind(index.origin) != "folder":
        digest.update(index.root.name.encode())
        return digest.hexdigest()
    for file in sorted({tensor.file for tensor in index.tensors.values()}):
        path = index.root / file
        size = path.stat().st_size
        digest.update(f"{file} {size}\n".encode())
        with path.open("rb") as opened:
            start = 8 + int.from_bytes(opened.read(8), "little")
            for step in range(64):
                opened.seek(start + (size - start) * step // 64)
                digest.update(opened.read(1024))
    return digest.hexdigest()


def _kind(source: str) -> str:
    if source.startswith("package:") or source.endswith(".gguf"):
        return "gguf"
    if _HUB_ID.fullmatch(source.partition("@")[0]) and not Path(source).expanduser().exists():
        return "hub"
    return "folder"
