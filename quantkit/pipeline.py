"""THE MAP: the whole run, top to bottom.

prepare  recipe + headers -> plan, or every fault at once; nothing is written
quantize one pass over the blocks (of an unknown family: over the shards) -> an artifact per variant
evaluate source and variants, equal settings -> scores
bench    source and servable variants on vLLM, interleaved -> timings
gate     scores + timings -> verdict
publish  the chosen variant -> registry, alias last
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantkit import families, texts
from quantkit.checkpoint import source
from quantkit.errors import PlanError, QuantkitError, RecipeError
from quantkit.evaluate import suites
from quantkit.journal import STAGES, Journal, exclusive
from quantkit.plan.kernels import targets
from quantkit.plan.preflight import make_plan
from quantkit.recipe import Recipe, read
from quantkit.records import Artifact, Index, Judgement, Plan, Run, Scores, Timings, Verdict


@dataclass(frozen=True)
class Prepared:
    """A run that nothing speaks against."""

    recipe: Recipe
    index: Index
    plan: Plan


def prepare(path: Path, runs: Path) -> Prepared:
    """Everything that can be known before work starts. Reads headers only, writes nothing.

    Raises RecipeError or PlanError (the earlier of the two kinds) with the faults of recipe, source, plan and machine.
    """
    recipe, faults = read(path)
    recipe_is_wrong = bool(faults)
    plan = index = None
    found = list(faults)
    if recipe is not None:
        parts: list[texts.Part] = ["calibration"]
        for name in recipe.evaluate.suites if recipe.evaluate else ():
            wrong = suites.check_suite(name, bool(recipe.evaluate and recipe.evaluate.allow_unsandboxed))
            found += wrong
            if not wrong and (suite := suites.load_suite(name)).kind == "perplexity" and suite.text == "held-out":
                parts.append("held_out")
        for part in parts:
            try:
                texts.documents(recipe.calibration.set, part)
            except QuantkitError as error:
                found += error.faults
                break
        try:
            index = source.open_source(recipe.model.source, recipe.model.revision, recipe.model.dtype)
            family = families.FAMILIES.get(str(index.config.get("model_type")))
            plan, wrong = make_plan(recipe, path, index, family, runs)
            found += wrong
        except QuantkitError as error:
            found += error.faults
    if recipe is None or index is None or plan is None or found:
        raise (RecipeError if recipe_is_wrong else PlanError)(*found)
    return Prepared(recipe, index, plan)


def quantize(path: Path, runs: Path, until: str = "publish") -> Verdict | None:
    """The whole run, as far as stage `until`. The same call continues an interrupted run.

    Returns the verdict, or None where the run ends before the gates. Raises QuantkitError; what was finished is kept.
    """
    ready = prepare(path, runs)
    recipe, plan, folder = ready.recipe, ready.plan, runs / ready.recipe.name
    stages = STAGES[: STAGES.index(until) + 1]
    with exclusive(folder):
        index = ready.index
        journal = Journal(folder, recipe, index.origin, index.quantized_origin, source.source_digest(index))
        try:
            if journal.due("plan"):
                with journal.stage("plan"):
                    plan.write(folder / "plan.json")
            if "quantize" in stages and journal.due("quantize"):
                with journal.stage("quantize"):
                    make_artifacts(recipe, index, plan, folder, journal)
            if "evaluate" in stages and recipe.evaluate and journal.due("evaluate"):
                with journal.stage("evaluate"):
                    make_scores(recipe, index, plan, folder)
            # Always looked at: under another margin a variant may be due that was left out before.
            if "bench" in stages and recipe.gates and recipe.gates.throughput:
                with journal.stage("bench"):
                    make_timings(recipe, index, plan, folder)
            if "gate" in stages and recipe.gates:
                with journal.stage("gate"):
                    verdict = judge(folder)
                if "publish" in stages and recipe.publish and verdict.chosen and journal.due("publish"):
                    write_report(folder)  # it is part of the evidence
                    with journal.stage("publish"):
                        publish(folder)
                return verdict
            return None
        finally:
            write_report(folder)


def make_artifacts(recipe: Recipe, index: Index, plan: Plan, folder: Path, journal: Journal) -> None:
    """artifacts/<variant>/ and ledger.jsonl: calibrate and solve, one block at a time, or else shard by shard."""
    from quantkit.engines import shards

    index = source.materialise(index, recipe.model.revision, recipe.model.dtype)
    if plan.engine == "shards":
        shards.quantize(index, plan, folder / "artifacts", folder / "ledger.jsonl", journal.keys["quantize"])
        return
    from transformers import AutoTokenizer

    from quantkit.calibrate.samples import load_samples
    from quantkit.engines import onepass

    asked = recipe.calibration
    tokenizer = AutoTokenizer.from_pretrained(index.root)
    documents = texts.documents(asked.set, "calibration")
    tokens_SL, report = load_samples(documents, tokenizer, asked.samples, asked.length, asked.seed)
    journal.note(calibration_digest=report["digest"])
    onepass.quantize(index, plan, tokens_SL, folder / "artifacts", folder / "ledger.jsonl", journal.keys["quantize"])


def make_scores(recipe: Recipe, index: Index, plan: Plan, folder: Path) -> None:
    """Source and variants through every suite, in-process, with equal settings: scores/<variant>/<suite>.json."""
    from transformers import AutoTokenizer

    from quantkit.engines.inprocess import load_model
    from quantkit.evaluate.perplexity import Reference
    from quantkit.evaluate.run import evaluate

    assert recipe.evaluate is not None  # noqa: S101 - the caller asked
    root = source.materialise(index, recipe.model.revision, recipe.model.dtype).root
    tokenizer = AutoTokenizer.from_pretrained(root)
    held_out = texts.documents(recipe.calibration.set, "held_out")
    reference = None
    for name in ("source", *(variant.name for variant in plan.variants)):
        out = folder / "scores" / name
        missing = [suite for suite in recipe.evaluate.suites if not (out / f"{suite}.json").exists()]
        if not missing:
            continue
        reference = reference or Reference(load_model(root))
        model = reference.model if name == "source" else load_model(folder / "artifacts" / name)
        for suite in missing:
            evaluate(
                suites.load_suite(suite),
                model,
                tokenizer,
                variant=name,
                out=out,
                reference=reference,
                limit=recipe.evaluate.limit.get(suite),
                allow_unsandboxed=recipe.evaluate.allow_unsandboxed,
                held_out=held_out,
            )


def make_timings(recipe: Recipe, index: Index, plan: Plan, folder: Path) -> None:
    """Source and variants on vLLM under the same load, pair by pair: timings/<variant>.json.

    Left out: what the target cannot serve, what already failed its accuracy gate, and what was measured before.
    """
    from quantkit.gates import select, throughput
    from quantkit.serve.endpoint import Endpoint, together
    from quantkit.serve.load import measure, versions

    gate = recipe.gates.throughput if recipe.gates else None
    judged = judge_accuracy(recipe, plan, folder)
    benched = [v.name for v in plan.variants if v.servable and select.accuracy_outcome(judged[v.name]) != "fail"]
    benched = [name for name in benched if not (folder / "timings" / f"{name}.json").exists()]
    if gate is None or not benched:
        return
    target = targets()[recipe.serve.target]
    folders = {"source": source.materialise(index, recipe.model.revision, recipe.model.dtype).root}
    folders |= {name: folder / "artifacts" / name for name in benched}
    endpoints = {
        name: Endpoint(model, target.environment, recipe.serve, folder / "logs" / f"{name}.log")
        for name, model in folders.items()
    }
    with together(endpoints):
        measured = measure(endpoints, gate.regimes, gate.pairs, recipe.calibration.seed, folder / "logs")
        for name in benched:
            judged_regimes = [
                throughput.judge_regime(*measured[name][position], regime, gate.confidence)
                for position, regime in enumerate(gate.regimes)
            ]
            Timings(
                variant=name,
                baseline="source",
                target=target.name,
                regimes=tuple(judged_regimes),
                versions=versions(target.environment),
                flags=endpoints[name].flags,
                kernel=endpoints[name].kernel,
            ).write(folder / "timings" / f"{name}.json")


def judge(folder: Path) -> Verdict:
    """Judge a run from its stored records alone; writes and returns verdict.json."""
    from quantkit.gates import select, throughput

    recipe, plan = stored_recipe(folder), Plan.read(folder / "plan.json")
    timings = {}
    for variant in plan.variants:
        path = folder / "timings" / f"{variant.name}.json"
        gate = recipe.gates.throughput if recipe.gates else None
        if gate and path.exists():
            timings[variant.name] = throughput.judge_again(Timings.read(path), gate)
            timings[variant.name].write(path)
    judgements = judge_accuracy(recipe, plan, folder)
    sizes = {v.name: Artifact.read(folder / "artifacts" / v.name / "quantkit.json").bytes for v in plan.variants}
    quantized_origin = Run.read(folder / "run.json").quantized_origin
    verdict = select.select(recipe, plan, judgements, timings, sizes, quantized_origin)
    verdict.write(folder / "verdict.json")
    return verdict


def judge_accuracy(recipe: Recipe, plan: Plan, folder: Path) -> dict[str, list[Judgement]]:
    """Every accuracy gate of the recipe, variant by variant, from the stored scores."""
    from quantkit.gates import accuracy

    gate = recipe.gates.accuracy if recipe.gates else None
    judgements: dict[str, list[Judgement]] = {variant.name: [] for variant in plan.variants}
    if gate is None:
        return judgements
    margins = [(s, m, True) for s, m in gate.required.items()] + [(s, m, False) for s, m in gate.reported.items()]
    for suite, margin, required in margins:
        baseline = stored_scores(folder, "source", suite)
        for name in judgements:
            scores = stored_scores(folder, name, suite)
            judgements[name].append(
                accuracy.judge(baseline[0], scores[0], baseline[1], scores[1], margin, required, gate.confidence)
            )
    return judgements


def publish(folder: Path) -> dict[str, str]:
    """Register the chosen variant with its evidence, alias last. Raises PublishError where none was chosen.

    The records are judged anew first, so that no verdict is believed that they do not bear out.
    """
    from quantkit.publish.registry import publish as register

    return register(folder, stored_recipe(folder), judge(folder))


def write_report(folder: Path) -> None:
    """report.html, report.md and junit.xml from what the folder holds."""
    from quantkit.report.render import write_report as render

    render(folder)


def stored_recipe(folder: Path) -> Recipe:
    """The recipe that a run was made with. Raises ArtifactError where the folder holds no run."""
    return Recipe.of(Run.read(folder / "run.json").recipe)


def stored_scores(folder: Path, variant: str, suite: str) -> tuple[Scores, list[dict[str, Any]]]:
    """A suite's scores with their items. Raises ArtifactError where the run has none."""
    scores = Scores.read(folder / "scores" / variant / f"{suite}.json")
    lines = (folder / "scores" / variant / scores.items).read_text(encoding="utf-8").splitlines()
    return scores, [json.loads(line) for line in lines]
