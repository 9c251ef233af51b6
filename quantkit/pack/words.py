"""Eight 4-bit codes, or four of 8 bits, in one int32 word, the first in the lowest bits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Codes:
    """One linear: its codes with their scales. Shapes as in records.Solution."""

    codes_OI: Tensor
    """uint8 0..15 or 0..255; or float8_e4m3fn or int8."""
    scale_OG: Tensor
    """In the stored dtype."""
    zero_OG: Tensor | None
    """uint8; None: symmetric (zero is 8, or 128)."""
    bits: int = 4
    input_scale: Tensor | None = None
    """FP8 static: the scale of the activations, float32 [1]."""


def pack_columns(codes: Tensor, bits: int = 4, order: tuple[int, ...] | None = None) -> Tensor:
    """uint8 [rows, columns] -> int32 [rows, columns * bits / 32]; nibble i of a word holds its column order[i].

    Words are little-endian, as safetensors stores them.
    """
    if order is not None:
        codes = codes.reshape(len(codes), -1, 8)[..., list(order)].flatten(1)
    if bits == 4:
        codes = codes[:, ::2] | codes[:, 1::2] << 4
    return codes.flatten().view(torch.int32).view(len(codes), -1)


def unpack_columns(words: Tensor, bits: int = 4, order: tuple[int, ...] | None = None) -> Tensor:
    """int32 [rows, words] -> uint8 [rows, words * 32 / bits]."""
    codes = words.flatten().view(torch.uint8).view(len(words), -1)
    if bits == 4:
        codes = torch.stack((codes & 15, codes >> 4), -1).flatten(1)
    if order is not None:
        codes = codes.reshape(len(codes), -1, 8)[..., [order.index(column) for column in range(8)]].flatten(1)
    return codes
