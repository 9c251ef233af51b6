"""From judgements and timings to one verdict: which variants passed, and which of them is the best."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

from quantkit.recipe import Recipe
from quantkit.records import Judgement, Outcome, Plan, Timings, VariantPlan, VariantVerdict, Verdict

Throughput = Literal["pass", "fail", "inconclusive", "not servable", "not measured"]


def accuracy_outcome(judgements: Sequence[Judgement]) -> Outcome:
    """The worst of the required ones: fail, then inconclusive, then pass. Nothing required is no pass."""
    outcomes = {judgement.outcome for judgement in judgements if judgement.required}
    return _worst(outcomes) if outcomes else "inconclusive"


def select(
    recipe: Recipe,
    plan: Plan,
    judgements: Mapping[str, Sequence[Judgement]],
    timings: Mapping[str, Timings],
    sizes: Mapping[str, int],
    quantized_origin: str | None,
) -> Verdict:
    """The verdict on every variant, and the best by recipe.select.objective of those that passed every gate.

    Args: judgements, timings, sizes: by variant; timings only of those that were measured. sizes: bytes.
    """
    found: dict[str, VariantVerdict] = {}
    for variant in plan.variants:
        of_variant = tuple(judgements.get(variant.name, ()))
        accuracy = accuracy_outcome(of_variant)
        throughput = _throughput(recipe, variant, timings.get(variant.name))
        found[variant.name] = VariantVerdict(
            accuracy=accuracy,
            throughput=throughput,
            bytes=sizes[variant.name],
            why=tuple(_reasons(recipe, variant, of_variant, accuracy, timings.get(variant.name), throughput)),
            judgements=of_variant,
        )
    gated = recipe.gates is not None and recipe.gates.throughput is not None
    enough = {"pass"} if gated else {"pass", "not measured"}
    passed = [name for name, one in found.items() if one.accuracy == "pass" and one.throughput in enough]
    objective = recipe.select.objective
    costs = {name: (_cost(objective, found[name], timings.get(name)), sizes[name], name) for name in passed}
    chosen = min(passed, key=costs.__getitem__, default=None)
    for name in passed:
        best = f"best by {objective} of the {len(passed)} that passed"
        line = f"chosen: {best}" if name == chosen else f"passed every gate; {chosen} is the {best}"
        found[name] = found[name].model_copy(update={"why": (*found[name].why, line)})
    return Verdict(
        chosen=chosen,
        objective=objective,
        variants=found,
        source_bytes=plan.source_bytes,
        quantized_origin=quantized_origin,
    )


def _throughput(recipe: Recipe, variant: VariantPlan, timings: Timings | None) -> Throughput:
    if not variant.servable:
        return "not servable"
    if recipe.gates is None or recipe.gates.throughput is None or timings is None or not timings.regimes:
        return "not measured"
    return _worst({regime.verdict for regime in timings.regimes})


def _worst(outcomes: set[Outcome]) -> Outcome:
    order: tuple[Outcome, ...] = ("fail", "inconclusive", "pass")
    return next(outcome for outcome in order if outcome in outcomes)


def _cost(objective: str, verdict: VariantVerdict, timings: Timings | None) -> float:
    """What the objective wants small. Equal costs are settled by size, then by name."""
    if objective == "throughput" and timings is not None:
        return -math.fsum(math.log(regime.ratio) for regime in timings.regimes) / len(timings.regimes)
    if objective == "quality":
        ratios = [one.value for one in verdict.judgements if one.measure == "ratio"]
        return max(ratios or [one.value for one in verdict.judgements])
    return float(verdict.bytes)


def _reasons(
    recipe: Recipe,
    variant: VariantPlan,
    judgements: Sequence[Judgement],
    accuracy: Outcome,
    timings: Timings | None,
    throughput: Throughput,
) -> list[str]:
    lines = []
    for one in judgements:
        lines.append(f"{one.suite} ({'required' if one.required else 'reported'}): {one.outcome}: {one.why}")
    if not any(one.required for one in judgements):
        lines.append("accuracy: inconclusive: the recipe requires no suite")
    if throughput == "not servable":
        lines.append(f"not servable on {recipe.serve.target}: {variant.why_not}; it cannot be chosen for that target")
    elif recipe.gates is None or recipe.gates.throughput is None:
        lines.append("throughput: not measured: the recipe has no throughput gate")
    elif throughput == "not measured":
        reason = "its accuracy gate failed" if accuracy == "fail" else "there are no timings of it"
        lines.append(f"throughput: not measured: {reason}")
    elif timings is not None:
        lines += [f"throughput at concurrency {r.concurrency}: {r.verdict}: {r.why}" for r in timings.regimes]
    return lines
