"""Sufficient statistics of one linear input, gathered batch by batch."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from quantkit.errors import Fault, SolveError
from quantkit.records import Statistics

_STRIPE = 192
_THIN = 8
"""An expert that fewer tokens reach than an eighth of its columns is solved on what all experts saw."""


class Gathering:
    """Sums over every token seen; `finish` makes them means. Memory is one Gram, whatever the number of tokens."""

    def __init__(self, columns: int) -> None:
        self._gram_II = torch.zeros(columns, columns)
        self._abs_I = torch.zeros(columns)
        self._max_I = torch.zeros(columns)
        self._tokens = 0

    def add(self, input_TI: Tensor) -> None:
        """Take in the inputs of some tokens, each counted once; leading axes are tokens too."""
        rows_TI = input_TI.flatten(0, -2)
        exact = rows_TI.dtype == torch.bfloat16
        wide_TI = rows_TI.float()
        size_TI = wide_TI.abs()
        self._abs_I += size_TI.sum(0)
        self._max_I = torch.maximum(self._max_I, size_TI.amax(0))
        self._tokens += len(rows_TI)
        with _bf16_products(exact):
            # The matrix is symmetric: only the part left of each stripe's end is computed.
            for start in range(0, wide_TI.shape[1], _STRIPE):
                end = start + _STRIPE
                self._gram_II[start:end, :end].addmm_(wide_TI[:, start:end].T, wide_TI[:, :end])

    @property
    def tokens(self) -> int:
        return self._tokens

    @property
    def thin(self) -> bool:
        """Too few tokens to tell one direction of the input from another."""
        return self._tokens * _THIN < len(self._abs_I)

    @classmethod
    def together(cls, parts: Collection[Gathering]) -> Gathering:
        """As if one had seen what each of `parts` saw."""
        whole = cls(max(len(part._abs_I) for part in parts))
        for part in parts:
            whole._gram_II += part._gram_II
            whole._abs_I += part._abs_I
            whole._max_I = torch.maximum(whole._max_I, part._max_I)
            whole._tokens += part._tokens
        return whole

    def finish(self, where: str) -> Statistics:
        """Raises SolveError naming `where`: no token came by, or an input was not finite."""
        if not self._tokens:
            raise SolveError(Fault("no token reached this module", where, "check the family table and the samples"))
        gram_II = self._gram_II.tril_().div_(self._tokens)
        # The other half, stripe by stripe: at 70B widths a copy of the Gram would be 3 GB.
        for start in range(0, len(gram_II), _STRIPE):
            end = start + _STRIPE
            gram_II[:start, start:end] = gram_II[start:end, :start].T
            corner_CC = gram_II[start:end, start:end]
            corner_CC += torch.tril(corner_CC, -1).T
        if not bool(torch.isfinite(gram_II.sum(1)).all()):
            do = "the source model overflows on these samples; check it, or calibrate in bfloat16"
            raise SolveError(Fault("an input of this module is not finite", where, do))
        return Statistics(gram_II, self._abs_I / self._tokens, self._max_I, self._tokens)


def finish_all(gatherings: Mapping[str, Gathering], pooled: Collection[str], where: str) -> dict[str, Statistics]:
    """Statistics by name. A thin one of `pooled`, experts of one block, gets those of all; its token count stays.

    Raises SolveError naming `where` and the name: no token came by, or an input was not finite.
    """
    thin = [name for name in pooled if gatherings[name].thin]
    # First, for `finish` makes means of the sums in place.
    everyone = Gathering.together([gatherings[name] for name in pooled]) if thin else None
    found = {name: gathering.finish(where + name) for name, gathering in gatherings.items() if name not in thin}
    if everyone:
        shared = everyone.finish(where + thin[0])
        found |= {name: replace(shared, tokens=gatherings[name].tokens) for name in thin}
    return found


@contextmanager
def _bf16_products(exact: bool) -> Iterator[None]:
    """Let float32 products of values that are bfloat16 already run on bfloat16 units: exact products, float32 sums."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium" if exact else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
