"""Read the tensors of an indexed checkpoint one at a time."""

from __future__ import annotations

from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self

from safetensors import SafetensorError, safe_open
from torch import Tensor

from quantkit.errors import ArtifactError, Fault
from quantkit.records import Index


class Weights:
    """Tensors of a checkpoint by name, on the CPU in their stored dtype; one shard is open at a time.

    `get` reads from disk on every call and keeps nothing, so memory does not grow with the checkpoint. Ask in the
    order of the shards (`index.tensors[name].file`) to open each only once.
    """

    def __init__(self, index: Index) -> None:
        self.index = index
        self._file = ""
        self._open: Any = None
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._stack.close()
        self._file, self._open = "", None

    def get(self, name: str) -> Tensor:
        """Raises KeyError: no such tensor. ArtifactError: its shard changed or vanished since it was indexed."""
        file = self.index.tensors[name].file
        path = self.index.root / file
        try:
            if file != self._file:
                self.close()
                self._open = self._stack.enter_context(safe_open(path, framework="pt", device="cpu"))
                self._file = file
            tensor: Tensor = self._open.get_tensor(name)
        except (OSError, SafetensorError) as error:
            do = "the file changed since the run began; get it again"
            raise ArtifactError(Fault(f"cannot read {name}: {error}", str(path), do)) from None
        return tensor
