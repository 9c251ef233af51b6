"""Which kernel of vLLM runs a quantized linear on a target, and what it demands. Read from vLLM 0.32 (2026-11)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import yaml

from quantkit.records import Module

GPU_GROUPS = (-1, 32, 64, 128)


@dataclass(frozen=True)
class Target:
    name: str
    sm: int
    """CUDA compute capability times ten; 0: a CPU."""
    memory_gib: float
    """Of one device; 0: what the machine has."""
    environment: str


@cache
def targets() -> dict[str, Target]:
    """The known serving targets by name."""
    table = yaml.safe_load(Path(__file__).with_name("targets.yaml").read_text(encoding="utf-8"))
    return {name: Target(name=name, **row) for name, row in table.items()}


def why_not_served(target: Target, method: str, group_size: int, modules: tuple[Module, ...], parallel: int) -> str:
    """Why vLLM cannot run these linears on the target; an empty string where it can.

    `parallel` is the tensor-parallel degree. The strictest reading holds for every module, whichever way it is split.
    """
    if method == "fp8":
        if target.sm == 0:
            return "FP8 per channel with dynamic activations has no CPU kernel: the server would hang in warm-up"
        return "" if target.sm >= 75 else f"FP8 needs compute capability 7.5, {target.name} has {target.sm / 10}"
    if method == "int8":
        # CPUInt8ScaledMM takes every shape; CUTLASS has INT8 from Turing on to Hopper, and none after it.
        fits = target.sm == 0 or 75 <= target.sm < 100
        return (
            "" if fits else f"INT8 activations need compute capability 7.5 to 9.0, {target.name} has {target.sm / 10}"
        )
    for module in modules:
        if target.sm == 0:
            if module.columns % 32 or module.rows % 32:
                shape = f"[{module.rows}, {module.columns}]"
                return f"the CPU kernel needs rows and columns in multiples of 32; {module.name} is {shape}"
            if group_size != -1 and group_size % 2:
                return f"the CPU kernel needs an even group size, not {group_size}"
            continue
        if group_size not in GPU_GROUPS:
            return f"the CUDA kernels know groups of {', '.join(map(str, GPU_GROUPS))}, not {group_size}"
        group = module.columns if group_size == -1 else group_size
        if group_size != -1 and module.columns % (group * parallel):
            return f"{module.name}: {module.columns} columns do not divide into groups of {group} on {parallel} GPUs"
    return ""
