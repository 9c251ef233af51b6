"""Which kernel of vLLM runs a quantized linear on a target, and what it demands. Read from vLLM 0.32 (2026-11)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import yaml

from quantkit.plan.memory import BLOCK
from quantkit.records import Module, VariantPlan

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


def why_not_served(target: Target, variant: VariantPlan, parallel: int) -> str:
    """Why vLLM cannot run the variant's linears on the target; an empty string where it can.

    `parallel` is the tensor-parallel degree. The strictest reading holds for every module, whichever way it is split.
    """
    if variant.method == "fp8":
        return _why_not_fp8(target, variant, parallel)
    if variant.method == "int8":
        # CPUInt8ScaledMM takes every shape; CUTLASS has INT8 from Turing on to Hopper, and none after it.
        fits = target.sm == 0 or 75 <= target.sm < 100
        return (
            "" if fits else f"INT8 activations need compute capability 7.5 to 9.0, {target.name} has {target.sm / 10}"
        )
    return _why_not_cpu(variant) if target.sm == 0 else _why_not_cuda(target, variant, parallel)


def _why_not_fp8(target: Target, variant: VariantPlan, parallel: int) -> str:
    if target.sm == 0:
        if variant.scheme == "dynamic":
            return "FP8 per channel with dynamic activations has no CPU kernel: the server would hang in warm-up"
        if not _has_amx():
            return f"FP8 {variant.scheme} runs on a CPU with AMX only, and this one has none"
        uneven = next((module for module in variant.modules if module.rows % 32), None)
        return f"FP8 on a CPU needs rows in multiples of 32; {_shape(uneven)}" if uneven else ""
    if target.sm < 75:
        return f"FP8 needs compute capability 7.5, {target.name} has {target.sm / 10}"
    for module in variant.modules if variant.scheme == "block" else ():
        # Activations are cut into groups of 128 without a remainder; weights only where GPUs share them.
        if module.columns % (BLOCK * parallel) or (parallel > 1 and module.rows % (BLOCK * parallel)):
            return f"FP8 block needs shards in multiples of {BLOCK}; {_shape(module)}, on {parallel} GPUs"
    return ""


def _why_not_cpu(variant: VariantPlan) -> str:
    if variant.bits != 4:
        return f"the CPU kernel for weights alone takes 4 bits, not {variant.bits}; method int8 has a kernel there"
    for module in variant.modules:
        if module.columns % 32 or module.rows % 32:
            return f"the CPU kernel needs rows and columns in multiples of 32; {_shape(module)}"
    if variant.group_size != -1 and variant.group_size % 2:
        return f"the CPU kernel needs an even group size, not {variant.group_size}"
    return ""


def _why_not_cuda(target: Target, variant: VariantPlan, parallel: int) -> str:
    group = variant.group_size
    if group not in GPU_GROUPS:
        return f"the CUDA kernels know groups of {', '.join(map(str, GPU_GROUPS))}, not {group}"
    # Marlin, which runs everything else, has no zero points of 8 bits; Machete has.
    machete = variant.bits == 8 and not variant.symmetric
    if machete and (target.sm != 90 or group == 32):
        return "8 bits with zero points run on Machete alone: Hopper (9.0), groups of 64, 128 or a whole row"
    for module in variant.modules:
        if group != -1 and module.columns % (group * parallel):
            return f"{module.name}: {module.columns} columns do not divide into groups of {group} on {parallel} GPUs"
        if machete and (module.columns % (64 * parallel) or module.rows % (128 * parallel)):
            return f"Machete needs columns in multiples of 64, rows of 128; {_shape(module)}, on {parallel} GPUs"
    return ""


def _shape(module: Module) -> str:
    return f"{module.name} is [{module.rows}, {module.columns}]"


@cache
def _has_amx() -> bool:
    info = Path("/proc/cpuinfo")
    return info.exists() and " amx_tile" in info.read_text(encoding="utf-8")
