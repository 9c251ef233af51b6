"""Stages that run alone, on any model folder: evaluate, serve, bench."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from quantkit.errors import Fault, PlanError
from quantkit.plan.kernels import Target, targets
from quantkit.recipe import Regime, Serve
from quantkit.records import Scores, Timings

if TYPE_CHECKING:
    from quantkit.serve.endpoint import Endpoint


def evaluate(artifact: Path, suite: str, baseline: Path | None, limit: int | None, out: Path) -> list[Scores]:
    """Score model folders on one suite with equal settings: the baseline first (as 'source'), then the artifact.

    Raises PlanError for an unknown suite, ArtifactError for a folder that is no model.
    """
    from transformers import AutoTokenizer

    from quantkit import texts
    from quantkit.engines.inprocess import load_model
    from quantkit.evaluate import run, suites
    from quantkit.evaluate.perplexity import Reference

    faults = suites.check_suite(suite)
    if faults:
        raise PlanError(*faults)
    asked = suites.load_suite(suite)
    held_out = texts.documents("python-docs", "held_out")
    named = ({"source": baseline} if baseline else {}) | {artifact.name: artifact}
    scores, reference = [], None
    for name, folder in named.items():
        model = load_model(folder)
        reference = Reference(model) if baseline and reference is None else reference
        tokenizer = AutoTokenizer.from_pretrained(folder)
        scores.append(
            run.evaluate(
                asked,
                model,
                tokenizer,
                variant=name,
                out=out / name,
                reference=reference,
                limit=limit,
                allow_unsandboxed=False,
                held_out=held_out,
            )
        )
    return scores


def endpoint(
    artifact: Path, target: str, port: int | None, max_model_len: int, prefix_caching: bool = True
) -> Endpoint:
    """An endpoint of the artifact, not started yet: a context manager. Raises PlanError for an unknown target."""
    from quantkit.serve.endpoint import Endpoint

    serve = Serve(target=target, max_model_len=max_model_len)
    log = Path("logs") / f"{artifact.name}.log"
    return Endpoint(artifact, _target(target).environment, serve, log, prefix_caching, port)


def bench(
    artifact: Path, baseline: Path, target: str, concurrency: tuple[int, ...], pairs: int, min_ratio: float
) -> Timings:
    """Load both folders on vLLM, interleaved, one regime per concurrency; the timings carry the verdicts."""
    from quantkit.gates.throughput import judge_regime
    from quantkit.serve.endpoint import together
    from quantkit.serve.load import measure, versions

    environment = _target(target).environment
    regimes = tuple(Regime(concurrency=streams, min_ratio=min_ratio) for streams in concurrency)
    endpoints = {
        name: endpoint(folder, target, None, 1024, prefix_caching=False)
        for name, folder in {"source": baseline, "variant": artifact}.items()
    }
    with together(endpoints):
        measured = measure(endpoints, regimes, pairs, 0, Path("logs"))["variant"]
        served = endpoints["variant"]
        return Timings(
            variant=str(artifact),
            baseline=str(baseline),
            target=target,
            regimes=tuple(judge_regime(*measured[position], regime, 0.95) for position, regime in enumerate(regimes)),
            versions=versions(environment),
            flags=served.flags,
            kernel=served.kernel,
        )


def _target(name: str) -> Target:
    found = targets().get(name)
    if found is None:
        raise PlanError(Fault(f"unknown target {name!r}", "--target", f"use one of {', '.join(targets())}"))
    return found
