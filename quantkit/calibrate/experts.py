"""Experts as the checkpoint has them: separate linears, where transformers runs one tensor for all.

So each expert's own inputs can be watched, and its linears replaced.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from quantkit.families import Family


class SplitExperts(nn.Module):
    """Computes what the fused experts of transformers do; `N.gate`, named as in the checkpoint, is a linear.

    Args: fused: with gate_up_proj [E, 2F, D] and down_proj [E, D, F]; no weight is copied. parts: gate, up, down.
    """

    def __init__(self, fused: Any, parts: tuple[str, str, str]) -> None:
        super().__init__()
        self.parts = parts
        self.activation = fused.act_fn
        for number in range(len(fused.down_proj)):
            weights = (*fused.gate_up_proj[number].chunk(2), fused.down_proj[number])
            linears = {part: _linear(weight_OI) for part, weight_OI in zip(parts, weights, strict=True)}
            self.add_module(str(number), nn.ModuleDict(linears))

    def forward(self, hidden_TD: Tensor, expert_TK: Tensor, share_TK: Tensor) -> Tensor:
        """Args: expert_TK: the experts chosen for each token. share_TK: the weight of each in the sum."""
        output_TD = torch.zeros_like(hidden_TD)
        for number in sorted(set(expert_TK.flatten().tolist())):
            gate, up, down = (self.get_submodule(f"{number}.{part}") for part in self.parts)
            token_N, choice_N = torch.where(expert_TK == number)
            input_ND = hidden_TD[token_N]
            made_ND = down(self.activation(gate(input_ND)) * up(input_ND))
            output_TD.index_add_(0, token_N, (made_ND * share_TK[token_N, choice_N, None]).to(output_TD.dtype))
        return output_TD


def split_experts(block: nn.Module, family: Family) -> None:
    """Replace the fused experts of a transformers block, where the family has any."""
    if family.experts:
        path = f"{family.experts.loaded}.experts"
        block.set_submodule(path, SplitExperts(block.get_submodule(path), family.experts.parts))


def _linear(weight_OI: Tensor) -> nn.Linear:
    linear = nn.Linear(weight_OI.shape[1], weight_OI.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(weight_OI, requires_grad=False)
    return linear
