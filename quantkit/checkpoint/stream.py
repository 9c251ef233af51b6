"""Safetensors files read and written in pieces, by several threads, so that no shard has to be held in memory.

The layout of a file that is written is fixed before its first byte: sizes follow from shapes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from math import prod
from pathlib import Path
from threading import Lock
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from quantkit.checkpoint.index import BITS, read_header
from quantkit.checkpoint.write import sync_folder
from quantkit.errors import ArtifactError, Fault
from quantkit.records import TensorInfo

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I8": torch.int8, "U8": torch.uint8, "F8_E4M3": torch.float8_e4m3fn,
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def info(tensor: Tensor, file: str) -> TensorInfo:
    """What the header of `file` says about this tensor (which may be on the meta device)."""
    shape = tuple(tensor.shape)
    return TensorInfo(dtype=_NAMES[tensor.dtype], shape=shape, file=file, bytes=prod(shape) * tensor.element_size())


class Pieces:
    """A shard to read byte ranges from. Close it, or use it in a `with`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = os.open(path, os.O_RDONLY)
        length = int.from_bytes(os.pread(self._file, 8, 0), "little")
        entries = json.loads(os.pread(self._file, length, 8))
        self.starts = {n: 8 + length + e["data_offsets"][0] for n, e in entries.items() if n != "__metadata__"}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, _: TracebackType | None) -> None:
        os.close(self._file)

    def read(self, name: str, start: int, into: Tensor) -> None:
        """Fill `into` (uint8 [bytes]) with the bytes of a tensor from its byte `start` on.

        Raises ArtifactError: the file is shorter than when it was indexed.
        """
        if not _read(self._file, into, self.starts[name] + start):
            do = "the file changed since the run began; get it again"
            raise ArtifactError(Fault(f"cannot read {name}: the file ends within it", str(self._path), do))


class Draft:
    """A shard that is being written. It appears under its name when `finish` is called, and not before.

    Args:    layout: every tensor by name.
    """

    def __init__(self, path: Path, layout: Mapping[str, TensorInfo]) -> None:
        self._path = path
        self._layout = layout
        self._draft = path.with_name(f".{path.name}.{os.getpid()}.part")
        path.parent.mkdir(parents=True, exist_ok=True)
        entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
        reached = 0
        # Wide types first, so that every tensor begins at a multiple of its element's size.
        for name in sorted(layout, key=lambda name: (-BITS[layout[name].dtype], name)):
            tensor = layout[name]
            spans = [reached, reached + tensor.bytes]
            entries[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": spans}
            reached += tensor.bytes
        header = json.dumps(entries, separators=(",", ":")).encode()
        header += b" " * (-len(header) % 8)
        self._starts = {
            name: 8 + len(header) + entry["data_offsets"][0]  # type: ignore[index]  # a dict, as built above
            for name, entry in entries.items()
            if name != "__metadata__"
        }
        self._missing = {name: tensor.bytes for name, tensor in layout.items()}
        self._lock = Lock()
        self._file = os.open(self._draft, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
        _write(
            self._file, torch.frombuffer(bytearray(len(header).to_bytes(8, "little") + header), dtype=torch.uint8), 0
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, _: TracebackType | None) -> None:
        os.close(self._file)
        self._draft.unlink(missing_ok=True)

    def put(self, name: str, start: int, data: Tensor, scratch: Tensor | None = None) -> None:
        """Write bytes of a tensor from its byte `start` on, and read them back.

        Args:    data: uint8 [bytes]. scratch: uint8, at least as long; where what is read back may go.
        Raises:  ArtifactError: what came back is something else.
        """
        place = self._starts[name] + start
        _write(self._file, data, place)
        back = torch.empty_like(data) if scratch is None else scratch[: len(data)]
        if not _read(self._file, back, place) or not torch.equal(back, data):
            do = "look at the disk, and run the command again"
            raise ArtifactError(Fault(f"{name} does not read back as it was written", str(self._path), do))
        with self._lock:
            self._missing[name] -= len(data)

    def finish(self) -> None:
        """Make the shard appear, on disk as a whole. Raises ArtifactError: bytes of a tensor were never put."""
        unput = sorted(name for name, missing in self._missing.items() if missing)
        if unput or read_header(self._draft) != {
            name: tensor.model_copy(update={"file": self._draft.name}) for name, tensor in self._layout.items()
        }:
            do = "report it: this is a fault of quantkit"
            raise ArtifactError(Fault(f"written in part only: {', '.join(unput[:3])}", str(self._path), do))
        os.fsync(self._file)
        self._draft.replace(self._path)
        sync_folder(self._path.parent)


def _read(file: int, into: Tensor, place: int) -> bool:
    view, done = memoryview(into.numpy().data), 0
    while done < len(view):
        count = os.preadv(file, [view[done:]], place + done)
        if count == 0:
            return False
        done += count
    return True


def _write(file: int, data: Tensor, place: int) -> None:
    view, done = memoryview(data.numpy().data), 0
    while done < len(view):
        done += os.pwrite(file, view[done:], place + done)
