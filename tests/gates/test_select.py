"""From verdicts to the chosen variant: nothing that failed, was not measured, or cannot be served is ever chosen."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from quantkit.gates.select import accuracy_outcome, select
from quantkit.recipe import Recipe
from quantkit.records import Judgement, Outcome, Plan, RegimeTimings, Timings, VariantPlan, Verdict

OUTCOMES: tuple[Outcome, ...] = ("pass", "inconclusive", "fail")


def judgement(outcome: str = "pass", required: bool = True, **changes: Any) -> Judgement:
    fields = {
        "suite": "perplexity",
        "required": required,
        "task": "perplexity",
        "measure": "ratio",
        "value": 1.05,
        "low": 1.0,
        "high": 1.1,
        "margin": 1.15,
        "outcome": outcome,
        "n": 32,
        "why": "because",
    }
    return Judgement.model_validate(fields | changes)


def timed(name: str, *regimes: tuple[float, str]) -> Timings:
    found = [
        {"concurrency": 2**k, "requests": 8, "prompt_tokens": 96, "output_tokens": 48, "min_ratio": 1.0, "pairs": []}
        | {"ratio": ratio, "low": ratio, "high": ratio, "verdict": verdict, "why": "because"}
        for k, (ratio, verdict) in enumerate(regimes)
    ]
    return Timings(
        variant=name,
        baseline="source",
        target="cpu",
        regimes=tuple(RegimeTimings.model_validate(one) for one in found),
        versions={},
        flags=(),
        kernel="",
    )


def chosen_of(
    judgements: dict[str, list[Judgement]],
    timings: dict[str, Timings],
    *,
    sizes: dict[str, int] | None = None,
    objective: str = "throughput",
    gated: bool = True,
    unservable: tuple[str, ...] = (),
) -> Verdict:
    throughput = {"regimes": [{"concurrency": 1, "min_ratio": 1.0}]} if gated else None
    recipe = Recipe.of(
        {
            "name": "r",
            "model": {"source": "m"},
            "variants": {name: {"method": "awq"} for name in judgements},
            "gates": {"accuracy": {"required": {}}, "throughput": throughput},
            "select": {"objective": objective},
        }
    )
    plans = [
        VariantPlan(
            name=name, method="awq", format="awq", bits=4, group_size=128, symmetric=False, rounding="gptq",
            damping=0.01, modules=(), ignored=(), bytes=1, servable=name not in unservable, why_not="no kernel",
        )
        for name in judgements
    ]  # fmt: skip
    counts = {"source_bytes": 9, "peak_bytes": 1, "disk_bytes": 1, "calibration_tokens": 1, "kv_bytes_per_token": 1}
    plan = Plan(family="llama", variants=tuple(plans), target="cpu", **counts)
    return select(recipe, plan, judgements, timings, sizes or dict.fromkeys(judgements, 100), "GGUF Q4_1")


@pytest.mark.parametrize("outcomes", list(itertools.product(OUTCOMES, repeat=2)))
def test_the_worst_required_judgement_decides(outcomes: tuple[Outcome, Outcome]) -> None:
    found = accuracy_outcome([judgement(one) for one in outcomes] + [judgement("fail", required=False)])
    assert OUTCOMES.index(found) == max(map(OUTCOMES.index, outcomes))


def test_nothing_required_is_no_pass() -> None:
    assert accuracy_outcome([]) == accuracy_outcome([judgement(required=False)]) == "inconclusive"


@pytest.mark.parametrize(("accuracy", "speed"), list(itertools.product(OUTCOMES, repeat=2)))
def test_only_what_passed_everything_is_chosen(accuracy: Outcome, speed: Outcome) -> None:
    verdict = chosen_of({"a": [judgement(accuracy)]}, {"a": timed("a", (1.5, "pass"), (1.2, speed))})
    assert (verdict.chosen == "a") == (accuracy == speed == "pass")
    assert (verdict.variants["a"].accuracy, verdict.variants["a"].throughput) == (accuracy, speed)
    assert verdict.quantized_origin == "GGUF Q4_1" and verdict.source_bytes == 9


def test_what_the_target_cannot_serve_is_never_chosen() -> None:
    for gated in (True, False):
        verdict = chosen_of({"fp8": [judgement()]}, {}, unservable=("fp8",), gated=gated)
        assert verdict.chosen is None and verdict.variants["fp8"].throughput == "not servable"
        assert any("no kernel" in line and "cpu" in line for line in verdict.variants["fp8"].why)


def test_unmeasured_is_enough_only_where_the_recipe_asks_no_speed() -> None:
    assert chosen_of({"a": [judgement()]}, {}).chosen is None
    without = chosen_of({"a": [judgement()]}, {}, gated=False)
    assert (without.chosen, without.variants["a"].throughput) == ("a", "not measured")
    failed = chosen_of({"a": [judgement("fail")]}, {}).variants["a"]
    assert failed.throughput == "not measured" and any("accuracy gate failed" in line for line in failed.why)


def test_each_objective_has_its_own_best() -> None:
    judgements = {
        "fast": [judgement(value=1.08)],
        "small": [judgement(value=1.09)],
        "good": [judgement(value=1.02), judgement(required=False, measure="drop", value=0.04)],
    }
    timings = {
        "fast": timed("fast", (1.5, "pass"), (1.5, "pass")),
        "small": timed("small", (2.0, "pass"), (1.05, "pass")),
        "good": timed("good", (1.2, "pass"), (1.2, "pass")),
    }
    sizes = {"fast": 120, "small": 80, "good": 130}
    for objective, best in (("throughput", "fast"), ("size", "small"), ("quality", "good")):
        verdict = chosen_of(judgements, timings, sizes=sizes, objective=objective)
        assert verdict.chosen == best and verdict.objective == objective
        for name in judgements:
            last = verdict.variants[name].why[-1]
            assert last.startswith("chosen: ") if name == best else best in last
    drops = {name: [judgement(measure="drop", value=v)] for name, v in (("a", 0.02), ("b", 0.01))}
    assert chosen_of(drops, {}, gated=False, objective="quality").chosen == "b"


def test_ties_go_to_the_smaller_then_to_the_first_name() -> None:
    both = {"b": [judgement()], "a": [judgement()]}
    assert chosen_of(both, {}, gated=False, sizes={"a": 2, "b": 1}, objective="quality").chosen == "b"
    assert chosen_of(both, {}, gated=False).chosen == "a"
    assert chosen_of(both, {}, gated=False, sizes={"a": 2, "b": 1}, objective="throughput").chosen == "b"


def test_every_reason_is_said() -> None:
    one = [judgement(), judgement("fail", required=False, suite="mmlu-dev")]
    why = chosen_of({"a": one}, {"a": timed("a", (1.5, "pass"), (0.8, "fail"))}).variants["a"].why
    assert len(why) == 4
    assert why[0].startswith("perplexity (required): pass") and why[1].startswith("mmlu-dev (reported): fail")
    assert why[3].startswith("throughput at concurrency 2: fail")
