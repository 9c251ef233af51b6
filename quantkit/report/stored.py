"""What a run folder holds, as far as it came. Nothing missing is an error; what cannot be read is said."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TypeVar

from pydantic import ValidationError

from quantkit.errors import ArtifactError
from quantkit.recipe import Recipe
from quantkit.records import Artifact, LedgerLine, Plan, Record, RegimeTimings, Run, Scores, TaskScore, Timings, Verdict

AnyRecord = TypeVar("AnyRecord", bound=Record)
RegimeKey = tuple[int, int, int]
"""concurrency, prompt tokens, output tokens"""


@dataclass(frozen=True)
class Stored:
    name: str
    run: Run | None
    recipe: Recipe | None
    plan: Plan | None
    scores: dict[str, dict[str, Scores]]
    """variant -> suite"""
    timings: dict[str, Timings]
    verdict: Verdict | None
    sizes: dict[str, int]
    """Bytes of the weights: measured, or where there is no artifact yet, as planned."""
    ledger: tuple[LedgerLine, ...]
    unreadable: tuple[str, ...]

    @property
    def variants(self) -> list[str]:
        """As the plan orders them; where there is no plan, whatever the records name."""
        planned = [variant.name for variant in self.plan.variants] if self.plan else []
        found = [*planned, *(self.verdict.variants if self.verdict else ()), *self.scores, *self.timings]
        return [name for name in dict.fromkeys(found) if name != "source"]

    @property
    def suites(self) -> list[str]:
        """As the recipe orders them."""
        asked = self.recipe.evaluate.suites if self.recipe and self.recipe.evaluate else ()
        found = [suite for suites in self.scores.values() for suite in suites]
        return [suite for suite in dict.fromkeys([*asked, *found]) if suite in found]

    def task(self, variant: str, name: str) -> TaskScore | None:
        """A task of that name in any suite."""
        suites = self.scores.get(variant, {}).values()
        return next((scores.tasks[name] for scores in suites if name in scores.tasks), None)

    def regimes(self) -> dict[RegimeKey, str]:
        """Each regime that was measured, with a short name of it."""
        keys = list(dict.fromkeys(key_of(regime) for timings in self.timings.values() for regime in timings.regimes))
        streams = [key[0] for key in keys]
        return {k: f"@{k[0]}" if streams.count(k[0]) == 1 else f"@{k[0]} ({k[1]}+{k[2]})" for k in keys}

    def regime(self, variant: str, key: RegimeKey) -> RegimeTimings | None:
        timings = self.timings.get(variant)
        return next((regime for regime in timings.regimes if key_of(regime) == key), None) if timings else None

    def source_speed(self, key: RegimeKey) -> float | None:
        """Median output tokens a second of the source over its runs in that regime."""
        found = {
            (pair.seed, pair.baseline.output_throughput)
            for name in self.timings
            if (regime := self.regime(name, key)) is not None
            for pair in regime.pairs
        }
        return median(speed for _, speed in found) if found else None


def key_of(regime: RegimeTimings) -> RegimeKey:
    return regime.concurrency, regime.prompt_tokens, regime.output_tokens


def read(folder: Path) -> Stored:
    """Everything that can be read of a run folder."""
    wrong: list[str] = []

    def one(kind: type[AnyRecord], path: Path) -> AnyRecord | None:
        if not path.exists():
            return None
        try:
            return kind.read(path)
        except ArtifactError:
            wrong.append(f"{path.relative_to(folder)} is not readable as {kind.__name__}")
            return None

    run, plan = one(Run, folder / "run.json"), one(Plan, folder / "plan.json")
    verdict = one(Verdict, folder / "verdict.json")
    scores: dict[str, dict[str, Scores]] = {}
    for path in sorted(folder.glob("scores/*/*.json")):
        if (scored := one(Scores, path)) is not None:
            scores.setdefault(path.parent.name, {})[path.stem] = scored
    timed = {path.stem: one(Timings, path) for path in sorted(folder.glob("timings/*.json"))}
    timings = {name: found for name, found in timed.items() if found}
    sizes = {variant.name: variant.bytes for variant in plan.variants} if plan else {}
    if plan:
        sizes["source"] = plan.source_bytes
    for path in sorted(folder.glob("artifacts/*/quantkit.json")):
        if (artifact := one(Artifact, path)) is not None:
            sizes[path.parent.name] = artifact.bytes
    if verdict:
        sizes |= {"source": verdict.source_bytes, **{name: judged.bytes for name, judged in verdict.variants.items()}}
    recipe = None
    if run:
        try:
            recipe = Recipe.of(run.recipe)
        except ValidationError:
            wrong.append("run.json holds a recipe of another version of quantkit")
    return Stored(
        name=recipe.name if recipe else folder.resolve().name,
        run=run,
        recipe=recipe,
        plan=plan,
        scores=scores,
        timings=timings,
        verdict=verdict,
        sizes=sizes,
        ledger=_ledger(folder / "ledger.jsonl"),
        unreadable=tuple(wrong),
    )


def _ledger(path: Path) -> tuple[LedgerLine, ...]:
    """Its whole lines; the last one of a killed run may be torn."""
    found = []
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ()
    for line in lines:
        try:
            found.append(LedgerLine.model_validate(json.loads(line)))
        except ValueError:
            continue
    return tuple(found)
