"""A shard written in pieces is what the library reads, and is there whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from quantkit.checkpoint.stream import Draft, Pieces, info
from quantkit.errors import ArtifactError

TENSORS = {
    "b": torch.randn(3, 5).bfloat16(),
    "odd": torch.randn(7, 3).to(torch.float8_e4m3fn),
    "wide": torch.randn(4),
    "a": torch.arange(2),
    "none": torch.zeros(0, 4),
}


def put_all(draft: Draft, step: int, leave_out: str = "") -> None:
    for name, tensor in reversed(TENSORS.items()):
        flat = tensor.reshape(-1).view(torch.uint8)
        for start in reversed(range(0, len(flat), step)):
            if name != leave_out:
                draft.put(name, start, flat[start : start + step])


@pytest.mark.parametrize("step", [1, 7, 1000])
def test_pieces_in_any_order_make_the_same_file_that_the_library_reads(tmp_path: Path, step: int) -> None:
    path = tmp_path / "model.safetensors"
    with Draft(path, {name: info(tensor, path.name) for name, tensor in TENSORS.items()}) as draft:
        put_all(draft, step)
        assert not path.exists()
        draft.finish()
    made = load_file(path)
    assert set(made) == set(TENSORS) and list(tmp_path.iterdir()) == [path]
    for name, tensor in TENSORS.items():
        assert made[name].dtype == tensor.dtype and made[name].shape == tensor.shape
        assert torch.equal(made[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))


def test_what_was_never_put_leaves_no_file(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    layout = {name: info(tensor, path.name) for name, tensor in TENSORS.items()}
    with pytest.raises(ArtifactError, match="in part only: wide"), Draft(path, layout) as draft:
        put_all(draft, 1000, "wide")
        draft.finish()
    assert list(tmp_path.iterdir()) == []


def test_bytes_are_read_from_where_they_are_asked_for_and_a_cut_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file(TENSORS, path)
    whole = TENSORS["b"].reshape(-1).view(torch.uint8)
    into = torch.empty(9, dtype=torch.uint8)
    with Pieces(path) as source:
        source.read("b", 4, into)
        assert torch.equal(into, whole[4:13])
        path.write_bytes(path.read_bytes()[:-30])
        with pytest.raises(ArtifactError, match="ends within it"):
            for name, tensor in TENSORS.items():
                source.read(name, 0, torch.empty(tensor.nbytes, dtype=torch.uint8))
