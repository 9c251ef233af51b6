"""Refuse before spending: everything that a recipe, the headers and this machine can show to be wrong, at once."""

from __future__ import annotations

import importlib.util
import shutil
from fnmatch import fnmatchcase
from pathlib import Path

import psutil

from quantkit.errors import Fault
from quantkit.families import FAMILIES, Family
from quantkit.plan import anymodel
from quantkit.plan.kernels import targets, why_not_served
from quantkit.plan.memory import (
    BLOCK,
    artifact_bytes,
    kv_bytes_per_token,
    quantize_disk_bytes,
    quantize_peak_bytes,
    shards_peak_bytes,
)
from quantkit.recipe import Recipe, Variant
from quantkit.records import Index, Module, Plan, VariantPlan


def make_plan(recipe: Recipe, path: Path, index: Index, family: Family | None, runs: Path) -> tuple[Plan, list[Fault]]:
    """The plan of a run and every fault found on the way; the plan holds only where there is none.

    Reads headers, config and the machine's free disk and memory; writes nothing.

    Args:    family: None: the table does not know this checkpoint; what needs no forward is made all the same.
    """
    faults: list[Fault] = []
    target = targets().get(recipe.serve.target)
    if target is None:
        where = f"{path}: serve.target"
        faults.append(Fault(f"unknown target {recipe.serve.target!r}", where, f"use one of {', '.join(targets())}"))
    if family is None:
        faults += _unknown_family(recipe, path, index)
    linears = family.linears(index.config, index.tensors) if family else anymodel.linears(index.tensors)
    fused = family.fused if family else anymodel.FUSED
    variants = []
    for name, variant in recipe.variants.items() if linears else ():
        planned, wrong = _plan_variant(name, variant, f"{path}: variants.{name}", index, linears, fused)
        faults += wrong
        if not wrong:
            kept = () if family else anymodel.kept(index.tensors, planned.modules)
            planned = planned.model_copy(update={"ignored": tuple(sorted({*planned.ignored, *kept}))})
            faults += _hidden_by_substrings(planned, f"{path}: variants.{name}")
            why_not = why_not_served(target, planned, recipe.serve.tensor_parallel) if target else "no target"
            update = {"bytes": artifact_bytes(index, planned), "servable": not why_not, "why_not": why_not}
            variants.append(planned.model_copy(update=update))
    asked = recipe.calibration if family else None
    plan = Plan(
        family=family.name if family else str(index.config.get("model_type")),
        engine="onepass" if family else "shards",
        variants=tuple(variants),
        source_bytes=index.bytes,
        peak_bytes=quantize_peak_bytes(index, variants, asked.samples, asked.length)
        if asked
        else shards_peak_bytes(variants),
        disk_bytes=quantize_disk_bytes(index, variants, asked.samples * asked.length if asked else 0),
        calibration_tokens=asked.samples * asked.length if asked else 0,
        kv_bytes_per_token=kv_bytes_per_token(index.config),
        target=recipe.serve.target,
    )
    if recipe.publish and importlib.util.find_spec("mlflow") is None:
        faults.append(Fault("MLflow is not installed", f"{path}: publish", "pip install 'quantkit[mlflow]'"))
    return plan, faults + _lengths(recipe, path, index, bool(asked)) + _machine(plan, path, runs)


def _unknown_family(recipe: Recipe, path: Path, index: Index) -> list[Fault]:
    """What cannot be made of a checkpoint that the table does not describe, and why."""
    kind = index.config.get("model_type")
    faults = []
    for name, variant in recipe.variants.items():
        if variant.needs_forward:
            asked = f"{variant.method} {variant.scheme}" if variant.scheme else variant.method
            what = f"{asked} runs the model, and model_type {kind!r} is not in the table of families"
            do = "use fp8 (dynamic or block), int8 or rtn, which read weights alone, or add a line to families.py"
            faults.append(Fault(f"{what} ({', '.join(FAMILIES)})", f"{path}: variants.{name}.method", do))
    where = "config.json: model_type"
    if reason := anymodel.why_not_by_rows(index.config):
        faults.append(Fault(reason, where, "use a model whose linears are stored by output rows"))
    elif not anymodel.linears(index.tensors):
        do = "use a checkpoint whose blocks are named like layers.0 or h.0 and hold matrices in bf16, fp16 or fp32"
        faults.append(Fault(f"no linear found among the tensors of model_type {kind!r}", where, do))
    return faults


def _plan_variant(
    name: str,
    variant: Variant,
    where: str,
    index: Index,
    linears: tuple[Module, ...],
    fused: tuple[tuple[str, ...], ...],
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
    faults += _split_fusions(fused, linears, ignored, f"{where}.ignore")
    if variant.group_size:
        faults += _group_faults(modules, variant.group_size, variant.bits or 4, where)
    if variant.scheme == "block":
        faults += _cut_blocks(modules, fused, where)
    planned = VariantPlan(
        name=name,
        method=variant.method,
        format=variant.format or "",
        bits=variant.bits or 4,
        group_size=variant.group_size or 0,
        symmetric=bool(variant.symmetric),
        rounding=variant.rounding,
        damping=variant.damping,
        scheme=variant.scheme or "",
        modules=modules,
        ignored=tuple(sorted(ignored)),
        bytes=0,
        servable=False,
    )
    return planned, faults


def _hidden_by_substrings(variant: VariantPlan, where: str) -> list[Fault]:
    """vLLM keeps what a name in AWQ's config is a part of: 'mlp.gate' would keep 'mlp.gate_proj' too."""
    if variant.format != "awq":
        return []
    hidden = [(kept, module.name) for module in variant.modules for kept in variant.ignored if kept in module.name]
    do = "use format compressed-tensors, which keeps by whole names"
    return [
        Fault(f"format awq keeps by parts of names: {kept} would keep {name} too", f"{where}.format", do)
        for kept, name in hidden[:1]
    ]


def _group_faults(modules: tuple[Module, ...], group: int, bits: int, where: str) -> list[Fault]:
    """What this group size or format cannot hold, once for all linears that share the reason."""
    found: dict[tuple[str, str, str], list[str]] = {}
    in_word = 32 // bits
    for module in modules:
        rows, columns = module.rows, module.columns
        if group != -1 and columns % group:
            fitting = [str(g) for g in (128, 64, 32) if columns % g == 0]
            do = f"use {' or '.join(fitting)}, or add" if fitting else "add"
            what = f"{columns} input columns do not divide into groups of {group} ({columns % group} left over)"
            found.setdefault((what, "group_size", do), []).append(module.name)
        elif columns % in_word or rows % in_word:
            reason = (f"[{rows}, {columns}] does not pack, {in_word} codes share a word", "format", "add")
            found.setdefault(reason, []).append(module.name)
    return _told_once(found, where)


def _cut_blocks(modules: tuple[Module, ...], fused: tuple[tuple[str, ...], ...], where: str) -> list[Fault]:
    """vLLM refuses a fused linear whose parts, but for the last, end within a block."""
    found: dict[tuple[str, str, str], list[str]] = {}
    for module in modules:
        for parts in fused:
            if module.rows % BLOCK and module.name.endswith(tuple(f".{part}" for part in parts[:-1])):
                what = f"{module.rows} rows end within a block of {BLOCK}, and vLLM fuses {', '.join(parts)}"
                found.setdefault((what, "scheme", "use scheme dynamic or static, or add"), []).append(module.name)
    return _told_once(found, where)


def _told_once(found: dict[tuple[str, str, str], list[str]], where: str) -> list[Fault]:
    """Faults from the linears by reason: what, the recipe's key, what to do before ignoring them."""
    faults = []
    for (what, key, do), names in found.items():
        alike = f" and {len(names) - 1} more" if len(names) > 1 else ""
        ignore = f"{do} {names[0]!r}{' and the others' if alike else ''} to {where.rsplit(': ')[-1]}.ignore"
        faults.append(Fault(f"{names[0]}{alike}: {what}", f"{where}.{key}", ignore))
    return faults


def _split_fusions(
    fused: tuple[tuple[str, ...], ...], linears: tuple[Module, ...], ignored: set[str], where: str
) -> list[Fault]:
    """vLLM fuses q/k/v and gate/up into one linear each: all of them are quantized, or none."""
    faults = []
    names = {module.name for module in linears}
    for group in fused:
        for first in sorted(name for name in names if name.endswith("." + group[0])):
            stem = first.removesuffix(group[0])
            parts = [stem + part for part in group if stem + part in names]
            kept = [part for part in parts if part in ignored]
            if kept and len(kept) < len(parts):
                what = f"{stem}*: {', '.join(kept)} kept but the rest quantized; vLLM fuses {', '.join(group)}"
                faults.append(Fault(what, where, "ignore all of them or none"))
    return faults


def _lengths(recipe: Recipe, path: Path, index: Index, calibrated: bool) -> list[Fault]:
    limit = index.config.get("max_position_embeddings")
    asked = {"serve.max_model_len": recipe.serve.max_model_len}
    if calibrated:
        asked["calibration.length"] = recipe.calibration.length
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
        do = "use fewer or shorter calibration samples, fewer variants, or a machine with more memory"
        faults.append(Fault(what, f"{path}: calibration", do))
    return faults
