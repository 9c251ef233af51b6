"""One block of one variant: statistics and weights in, the tensors that are stored and their ledger out."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from quantkit.engines.codes import EIGHT_BIT, dense, eight_bits
from quantkit.errors import Fault, SolveError
from quantkit.families import Family, Fold
from quantkit.pack import FORMATS, Codes
from quantkit.records import LedgerLine, Solution, Statistics, VariantPlan
from quantkit.solve.awq import channel_scale
from quantkit.solve.gptq import descend, gptq
from quantkit.solve.grids import Grid, decode, encode, searched
from quantkit.solve.linalg import energy_O
from quantkit.solve.rtn import rtn

_SLACK = 1.01
"""A folded row has other scales after rounding them, so plain rounding itself moves by up to this factor."""


@dataclass(frozen=True)
class Solved:
    tensors: dict[str, Tensor]
    """Everything that the artifact stores of this block, by full name."""
    lines: tuple[LedgerLine, ...]
    digests: dict[str, str]
    """By module: what `digest` of its codes must be after reopening."""
    changed: tuple[str, ...]
    """Full names of norms, biases and routers that folding altered."""


@dataclass(frozen=True)
class _Folded:
    """A block's weights after folding, with what takes them back: W = folded * out / in."""

    weights: dict[str, Tensor]
    changed: dict[str, Tensor]
    """Norms, biases and routers in the stored dtype, by name within the block."""
    in_scale: dict[str, Tensor]
    out_scale: dict[str, Tensor]


def digest(codes: Codes) -> str:
    """sha256 over codes, scales and zero points."""
    total = hashlib.sha256()
    for tensor in (codes.codes_OI, codes.scale_OG, codes.zero_OG, codes.input_scale):
        if tensor is not None:
            total.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def solve_block(
    variant: VariantPlan,
    family: Family,
    config: Mapping[str, Any],
    prefix: str,
    source: Mapping[str, Tensor],
    statistics: Mapping[str, Statistics],
) -> Solved:
    """Solve every linear of the block that the variant quantizes; all else is stored as it came.

    Args:    source: the block's tensors by their name within it. statistics: by the first linear of each input.
    Raises:  SolveError naming the module: a weight, Gram or scale is not finite, or no damping helps.
    """
    asked = {module.name for module in variant.modules}
    groups = [tuple(name for name in group if prefix + name in asked) for group in family.inputs]
    weights = {name: source[f"{name}.weight"].float() for group in groups for name in group}
    for name, weight_OI in weights.items():
        if not bool(torch.isfinite(weight_OI).all()):
            raise SolveError(Fault("a weight is not finite", prefix + name, "check the source checkpoint"))
    folds = [fold for fold in family.folds if variant.method == "awq" and _foldable(fold, weights, source)]
    while True:
        folded = _fold(variant, folds, config, source, weights, statistics)
        solutions: dict[str, Solution] = {}
        for group, whole in zip(groups, family.inputs, strict=True):
            if group:
                solutions |= _solve_group(variant, group, weights, folded, statistics[whole[0]], source, prefix)
        worse = {name for name, found in solutions.items() if not found.error <= _SLACK * found.rtn_error}
        kept = [fold for fold in folds if not worse.intersection((*fold.linears, fold.before))]
        if len(kept) == len(folds):
            break
        folds = kept  # this fold makes a linear worse than plain rounding does: solve again without it
    tensors = {prefix + name: folded.changed.get(name, tensor) for name, tensor in source.items()}
    digests = {}
    for name, found in solutions.items():
        del tensors[f"{prefix}{name}.weight"]
        codes = Codes(found.codes_OI, found.scale_OG, found.zero_OG, variant.bits, found.input_scale)
        tensors |= {f"{prefix}{name}.{end}": tensor for end, tensor in FORMATS[variant.format].pack(codes).items()}
        digests[prefix + name] = digest(codes)
    tokens = {name: statistics[group[0]].tokens for group in family.inputs for name in group}
    lines = tuple(
        LedgerLine(
            variant=variant.name,
            module=prefix + name,
            asked=variant.method,
            used=found.used,
            tokens=tokens[name],
            damping=found.damping,
            error=found.error,
            rtn_error=found.rtn_error,
        )
        for name, found in solutions.items()
    )
    return Solved(tensors, lines, digests, tuple(prefix + name for name in folded.changed))


def _foldable(fold: Fold, weights: Mapping[str, Tensor], source: Mapping[str, Tensor]) -> bool:
    """Only where everything that changes is quantized anyway: ignored linears stay byte-equal."""
    before_is_norm = source[f"{fold.before}.weight"].ndim == 1
    return all(name in weights for name in fold.linears) and (before_is_norm or fold.before in weights)


def _channels(fold: Fold, config: Mapping[str, Any], columns: int, rows: int) -> Tensor:
    """Which channel of `fold.before`, of so many rows, feeds each column of its linears."""
    channels = rows
    if rows > columns:  # q/k/v or gate/up in one linear
        channels = (rows - columns) // 2 if fold.repeats_heads else columns
    column_I = torch.arange(columns)
    if columns == channels:
        return column_I
    width = int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])
    repeats = columns // channels
    return column_I // width // repeats * width + column_I % width


def _folded_norm(weight_C: Tensor, scale_C: Tensor, *, adds_one: bool) -> tuple[Tensor, Tensor]:
    """The norm divided by the scale, as it is stored, and the scale that this rounding left."""
    one = 1.0 if adds_one else 0.0
    gain_C = weight_C.float() + one
    stored_C = (gain_C / scale_C - one).to(weight_C.dtype)
    # A gain that rounding would take to zero loses its channel: that one stays as it is.
    stored_C = torch.where(stored_C.float() + one == 0, weight_C, stored_C)
    left_C = stored_C.float() + one
    return stored_C, torch.where(left_C != 0, gain_C / left_C, 1.0)


def _fold(
    variant: VariantPlan,
    folds: list[Fold],
    config: Mapping[str, Any],
    source: Mapping[str, Tensor],
    weights: Mapping[str, Tensor],
    statistics: Mapping[str, Statistics],
) -> _Folded:
    folded = _Folded(dict(weights), {}, {}, {})
    for fold in folds:
        known = statistics[fold.linears[0]]
        before = source[f"{fold.before}.weight"]
        channel_I = _channels(fold, config, len(known.mean_abs_I), len(before))
        scale_C = channel_scale(
            [weights[name] for name in fold.linears],
            known.gram_II,
            known.mean_abs_I,
            channel_I,
            group_size=variant.group_size,
            symmetric=variant.symmetric,
            dtype=scale_dtype(before.dtype),
        )
        if before.ndim == 1:
            norm_C, scale_C = _folded_norm(before, scale_C, adds_one=fold.adds_one)
            folded.changed[f"{fold.before}.weight"] = norm_C
        else:
            out_O = torch.cat([torch.ones(len(before) - len(scale_C)), scale_C])
            folded.weights[fold.before] = folded.weights[fold.before] / out_O[:, None]
            folded.out_scale[fold.before] = out_O
            if f"{fold.before}.bias" in source:
                bias_O = source[f"{fold.before}.bias"]
                folded.changed[f"{fold.before}.bias"] = (bias_O.float() / out_O).to(bias_O.dtype)
        for name in fold.also:
            weight_OI = source[f"{name}.weight"]
            folded.changed[f"{name}.weight"] = (weight_OI.float() * scale_C).to(weight_OI.dtype)
        for name in fold.linears:
            folded.weights[name] = folded.weights[name] * scale_C[channel_I]
            folded.in_scale[name] = scale_C[channel_I]
    return folded


def scale_dtype(weight: torch.dtype) -> torch.dtype:
    """What scales are stored in: the model's dtype, or bfloat16 (no overflow) for a float32 model."""
    return weight if weight in (torch.bfloat16, torch.float16) else torch.bfloat16


def _solve_group(
    variant: VariantPlan,
    group: tuple[str, ...],
    weights: Mapping[str, Tensor],
    folded: _Folded,
    known: Statistics,
    source: Mapping[str, Tensor],
    prefix: str,
) -> dict[str, Solution]:
    """The linears that share one input, stacked: one factorisation serves them all."""
    rows = [len(weights[name]) for name in group]
    dtype = scale_dtype(source[f"{group[0]}.weight"].dtype)
    weight_OI = torch.cat([weights[name] for name in group])
    folded_OI = torch.cat([folded.weights[name] for name in group])
    in_I = folded.in_scale.get(group[0], torch.ones(weight_OI.shape[1]))
    out_O = torch.cat([folded.out_scale.get(name, torch.ones(n)) for name, n in zip(group, rows, strict=True)])
    gram_II = known.gram_II / in_I / in_I[:, None]
    norm_O = energy_O(weight_OI, known.gram_II)

    def errors(dense_OI: Tensor) -> Tensor:
        """By linear, of weights in folded coordinates."""
        lost_O = energy_O(weight_OI - dense_OI * out_O[:, None] / in_I, known.gram_II)
        parts = zip(torch.split(lost_O, rows), torch.split(norm_O, rows), strict=True)
        return torch.stack([lost.sum() / norm.sum().clamp(min=1e-30) for lost, norm in parts])

    if variant.method in EIGHT_BIT:
        made = eight_bits(variant.method, variant.scheme, [weights[name] for name in group], dtype, known.max_abs_I)
        lost = errors(torch.cat([dense(codes) for codes in made])).tolist()
        return {
            name: _checked(
                Solution(codes.codes_OI, codes.scale_OG, None, variant.method, 0.0, error, error, codes.input_scale),
                prefix + name,
            )
            for name, codes, error in zip(group, made, lost, strict=True)
        }
    kind: dict[str, Any] = {"symmetric": variant.symmetric, "dtype": dtype, "bits": variant.bits}
    plain_OI, plain = rtn(weight_OI, variant.group_size, **kind)
    plain_errors = errors(decode(plain_OI, plain) / out_O[:, None] * in_I)
    found, damping = [], 0.0
    if variant.method != "rtn":
        grid = searched(folded_OI, gram_II, variant.group_size, **kind)
        found.append((encode(folded_OI, grid), grid))
    if variant.method != "rtn" and variant.rounding == "gptq":
        try:
            codes_OI, damping = gptq(folded_OI, gram_II, grid, damping=variant.damping)
        except SolveError as error:
            raise SolveError(*(replace(fault, where=prefix + group[0]) for fault in error.faults)) from None
        found.insert(0, descend(folded_OI, gram_II, codes_OI, grid, damping=damping, dtype=dtype))
    # Only where the method's own rounding loses to plain rounding on this linear does the plain one stand in.
    found.append(rtn(folded_OI, variant.group_size, **kind))
    return _choose(variant, group, rows, found, errors, plain_errors, damping, dtype, prefix)


def _choose(
    variant: VariantPlan,
    group: tuple[str, ...],
    rows: list[int],
    found: list[tuple[Tensor, Grid]],
    errors: Callable[[Tensor], Tensor],
    plain_errors: Tensor,
    damping: float,
    dtype: torch.dtype,
    prefix: str,
) -> dict[str, Solution]:
    """For each linear the first of `found` that does no worse than plain rounding, or else the last, plain rounding."""
    solutions: dict[str, Solution] = {}
    for codes_OI, grid in found:
        is_plain = codes_OI is found[-1][0]
        lost = errors(decode(codes_OI, grid)).tolist()
        parts = zip(
            group,
            torch.split(codes_OI, rows),
            torch.split(grid.scale_OG, rows),
            torch.split(grid.zero_OG, rows),
            strict=True,
        )
        for place, (name, codes, scale, zero) in enumerate(parts):
            if name in solutions or not (is_plain or lost[place] <= float(plain_errors[place])):
                continue
            solution = Solution(
                codes,
                scale.to(dtype),
                None if variant.symmetric else zero.to(torch.uint8),
                "rtn" if is_plain else variant.method,
                0.0 if is_plain else damping,
                lost[place],
                float(plain_errors[place]),
            )
            solutions[name] = _checked(solution, prefix + name)
        if len(solutions) == len(group):
            break
    return {name: solutions[name] for name in group}


def _checked(solution: Solution, name: str) -> Solution:
    """Raises SolveError where a scale overflowed its dtype, or the error is not a number."""
    if not bool(torch.isfinite(solution.scale_OG.float()).all()):
        do = f"its weights are too large for {solution.scale_OG.dtype}; ignore it, or use a bfloat16 checkpoint"
        raise SolveError(Fault("a scale is not finite", name, do))
    if not math.isfinite(solution.error):
        raise SolveError(Fault("the error of the rounded weight is not finite", name, "ignore it in the recipe"))
    return solution
