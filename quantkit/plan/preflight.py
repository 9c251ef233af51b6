"""Refuse before spending: everything that a recipe, the headers and this machine can show to be wrong, at once."""

from __future__ import annotations

import importlib.util
import shutil
from fnmatch import fnmatchcase
from pathlib import Path

import psutil

from quantkit.errors import Fault
from quantkit.families import Family
from quantkit.plan.kernels import Target, targets, why_not_served
from quantkit.plan.memory import artifact_bytes, kv_bytes_per_token, quantize_disk_bytes, quantize_peak_bytes
from quantkit.recipe import Recipe, Variant
from quantkit.records import Index, Module, Plan, VariantPlan


def make_plan(recipe: Recipe, path: Path, index: Index, family: Family, runs: Path) -> tuple[Plan, list[Fault]]:
    """The plan of a run and every fault found on the way; the plan holds only where there is none.

    Reads headers, config and the machine's free disk and memory; writes nothing.
    """
    faults: list[Fault] = []
    target = targets().get(recipe.serve.target)
    if target is None:
        where = f"{path}: serve.target"
        faults.append(Fault(f"unknown target {recipe.serve.target!r}", where, f"use one of {', '.join(targets())}"))
    linears = family.linears(index.config, index.tensors)
    variants = []
    for name, variant in recipe.variants.items():
        where = f"{path}: variants.{name}"
        planned, wrong = _plan_variant(name, variant, where, index, family, linears, target, recipe)
        faults += wrong
        if not wrong:
            variants.append(planned)
    samples, length = recipe.calibration.samples, recipe.calibration.length
    plan = Plan(
        family=family.name,
        variants=tuple(variants),
        source_bytes=index.bytes,
        peak_bytes=quantize_peak_bytes(index, variants, samples, length),
        disk_bytes=quantize_disk_bytes(variants, samples, length, int(index.config["hidden_size"])),
        calibration_tokens=samples * length,
        kv_bytes_per_token=kv_bytes_per_token(index.config),
        target=recipe.serve.target,
    )
    if recipe.publish and importlib.util.find_spec("mlflow") is None:
        faults.append(Fault("MLflow is not installed", f"{path}: publish", "pip install 'quantkit[mlflow]'"))
    return plan, faults + _lengths(recipe, path, index) + _machine(plan, path, runs)


def _plan_variant(
    name: str,
    variant: Variant,
    where: str,
    index: Index,
    family: Family,
    linears: tuple[Module, ...],
    target: Target | None,
    recipe: Recipe,
) -> tuple[VariantPlan, list[Fault]]:
    faults = []
    ignored = set()
    for pattern in variant.ignore:
        matched = {module.name for module in linears if fnmatchcase(module.name, pattern)}
        if not matched:
            do = f"correct it; the linears are named like {linears[0].name}"
            faults.append(Fault(f"{pattern!r} matches no linear", f"{where}.ignore", do))
        ignored |= matched
    modules = tuple(module for module in linears if module.name not in ignored)
    if not modules:
        faults.append(Fault("nothing is left to quantize", f"{where}.ignore", "ignore less"))
    faults += _split_fusions(family, linears, ignored, f"{where}.ignore")
    group = 0 if variant.per_row else variant.group_size
    if group:
        faults += _group_faults(modules, group, where)
    format = variant.format or ""
    why_not = ""
    if target and not faults:
        why_not = why_not_served(target, variant.method, group, modules, recipe.serve.tensor_parallel)
    planned = VariantPlan(
        name=name,
        method=variant.method,
        format=format,
        bits=variant.bits,
        group_size=group,
        symmetric=bool(variant.symmetric),
        rounding=variant.rounding,
        damping=variant.damping,
        modules=modules,
        ignored=tuple(sorted(ignored)),
        bytes=0 if faults else artifact_bytes(index, modules, format, group, bool(variant.symmetric)),
        servable=target is not None and not why_not,
        why_not=why_not,
    )
    return planned, faults


def _group_faults(modules: tuple[Module, ...], group: int, where: str) -> list[Fault]:
    """What this group size or format cannot hold, once for all linears that share the reason."""
    found: dict[tuple[str, str, str], list[str]] = {}
    for module in modules:
        rows, columns = module.rows, module.columns
        if group != -1 and (group == 0 or columns % group):
            over = f" ({columns % group} left over)" if group else ""
            fitting = [str(g) for g in (128, 64, 32) if columns % g == 0]
            do = f"use {' or '.join(fitting)}, or add" if fitting else "add"
            reason = (f"{columns} input columns do not divide into groups of {group}{over}", "group_size", do)
            found.setdefault(reason, []).append(module.name)
        elif columns % 8 or rows % 8:
            reason = (f"[{rows}, {columns}] does not pack, 8 codes share a word", "format", "add")
            found.setdefault(reason, []).append(module.name)
    faults = []
    for (what, key, do), names in found.items():
        alike = f" and {len(names) - 1} more" if len(names) > 1 else ""
        ignore = f"{do} {names[0]!r}{' and the others' if alike else ''} to {where.rsplit(': ')[-1]}.ignore"
        faults.append(Fault(f"{names[0]}{alike}: {what}", f"{where}.{key}", ignore))
    return faults


def _split_fusions(family: Family, linears: tuple[Module, ...], ignored: set[str], where: str) -> list[Fault]:
    """vLLM fuses q/k/v and gate/up into one linear each: all of them are quantized, or none."""
    faults = []
    names = {module.name for module in linears}
    for fused in family.fused:
        for first in sorted(name for name in names if name.endswith("." + fused[0])):
            stem = first.removesuffix(fused[0])
            parts = [stem + part for part in fused if stem + part in names]
            kept = [part for part in parts if part in ignored]
            if kept and len(kept) < len(parts):
                what = f"{stem}*: {', '.join(kept)} kept but the rest quantized; vLLM fuses {', '.join(fused)}"
                faults.append(Fault(what, where, "ignore all of them or none"))
    return faults


def _lengths(recipe: Recipe, path: Path, index: Index) -> list[Fault]:
    limit = index.config.get("max_position_embeddings")
    asked = {"calibration.length": recipe.calibration.length, "serve.max_model_len": recipe.serve.max_model_len}
    return [
        Fault(f"{tokens} tokens, but the model has {limit} positions", f"{path}: {where}", f"use at most {limit}")
        for where, tokens in asked.items()
        if limit and tokens > limit
    ]


def _machine(plan: Plan, path: Path, runs: Path) -> list[Fault]:
    faults = []
    standing = next(folder for folder in (runs, *runs.absolute().parents) if folder.exists())
    free = shutil.disk_usage(standing).free
    if plan.disk_bytes > free:
        what = f"the artifacts need {plan.disk_bytes / 1e9:.2f} GB of disk, {free / 1e9:.2f} GB are free"
        faults.append(Fault(what, str(runs.absolute()), "free some, or give another --runs folder"))
    available = psutil.virtual_memory().available
    if plan.peak_bytes > available:
        what = (
            f"quantizing needs about {plan.peak_bytes / 1e9:.2f} GB of memory, {available / 1e9:.2f} GB are available"
        )
        do = "use fewer or shorter calibration samples, or a machine with more memory"
        faults.append(Fault(what, f"{path}: calibration", do))
    return faults
