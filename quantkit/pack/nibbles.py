"""Eight 4-bit codes in one int32 word, the first in the lowest bits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_SHIFTS = torch.arange(0, 32, 4, dtype=torch.int32)


@dataclass(frozen=True)
class Codes:
    """One linear: its codes with their scales. Shapes as in records.Solution."""

    codes_OI: Tensor
    """uint8 0..15, or float8_e4m3fn."""
    scale_OG: Tensor
    """In the stored dtype."""
    zero_OG: Tensor | None
    """uint8; None: symmetric (zero of INT4 is 8)."""


def pack_columns(codes: Tensor, order: tuple[int, ...] = (0, 1, 2, 3, 4, 5, 6, 7)) -> Tensor:
    """uint8 [rows, columns] -> int32 [rows, columns / 8]; nibble i of a word holds its column order[i]."""
    words = codes.to(torch.int32).reshape(len(codes), -1, 8)[..., list(order)]
    # The top nibble wraps into the sign bit.
    return torch.sum(words << _SHIFTS, -1, dtype=torch.int32)


def unpack_columns(words: Tensor, order: tuple[int, ...] = (0, 1, 2, 3, 4, 5, 6, 7)) -> Tensor:
    """int32 [rows, words] -> uint8 [rows, 8 * words]."""
    nibbles = (words[..., None] >> _SHIFTS) & 15
    places = [order.index(column) for column in range(8)]
    return nibbles[..., places].flatten(1).to(torch.uint8)
