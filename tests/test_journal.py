"""One run a folder; a stage is done only under the settings that it ran under."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from quantkit.errors import PlanError
from quantkit.journal import STAGES, Journal, exclusive, stage_keys
from quantkit.recipe import Recipe

BASE: dict[str, Any] = {
    "name": "t",
    "model": {"source": "x"},
    "variants": {"awq": {"method": "awq"}},
    "evaluate": {"suites": ["perplexity"]},
    "gates": {
        "accuracy": {"required": {"perplexity": {"max_ratio": 1.2}}},
        "throughput": {"regimes": [{"concurrency": 1, "min_ratio": 1.1}]},
    },
}


def recipe(**changes: Any) -> Recipe:
    return Recipe.of(BASE | changes)


def journal(folder: Path, recipe: Recipe) -> Journal:
    folder.mkdir(exist_ok=True)
    return Journal(folder, recipe, "x", None, "digest")


def changed(**changes: Any) -> set[str]:
    old, new = stage_keys(recipe(), "d"), stage_keys(recipe(**changes), "d")
    return {stage for stage in STAGES if old[stage] != new[stage]}


def test_a_margin_changes_no_measurement() -> None:
    gates = {
        "accuracy": {"required": {"perplexity": {"max_ratio": 1.3}}},
        "throughput": {"regimes": [{"concurrency": 1, "min_ratio": 2.0}]},
    }
    assert changed(gates=gates) == {"plan", "gate", "publish"}


def test_a_calibration_change_changes_everything() -> None:
    assert changed(calibration={"samples": 2}) == set(STAGES)


def test_a_limit_spares_the_artifacts() -> None:
    assert "quantize" not in changed(evaluate={"suites": ["perplexity"], "limit": {"perplexity": 3}})


def test_a_finished_stage_is_not_due_again(tmp_path: Path) -> None:
    first = journal(tmp_path, recipe())
    assert first.due("quantize")
    with first.stage("quantize"):
        pass
    assert not journal(tmp_path, recipe()).due("quantize")


def test_a_failed_stage_stays_due(tmp_path: Path) -> None:
    first = journal(tmp_path, recipe())
    with pytest.raises(ZeroDivisionError), first.stage("quantize"):
        raise ZeroDivisionError
    again = journal(tmp_path, recipe())
    assert again.due("quantize") and again.run.stages["quantize"].state == "failed"


def test_other_artifacts_are_never_overwritten(tmp_path: Path) -> None:
    with journal(tmp_path, recipe()).stage("quantize"):
        pass
    with pytest.raises(PlanError, match="another model, calibration or set of variants"):
        journal(tmp_path, recipe(variants={"gptq": {"method": "gptq"}}))


def test_scores_of_other_settings_are_dropped(tmp_path: Path) -> None:
    with journal(tmp_path, recipe()).stage("evaluate"):
        (tmp_path / "scores").mkdir()
    journal(tmp_path, recipe())
    assert (tmp_path / "scores").exists()
    journal(tmp_path, recipe(evaluate={"suites": ["perplexity"], "limit": {"perplexity": 3}}))
    assert not (tmp_path / "scores").exists()


def test_the_second_run_of_a_folder_is_refused(tmp_path: Path) -> None:
    code = f"""
from pathlib import Path
from quantkit.errors import PlanError
from quantkit.journal import exclusive
try:
    with exclusive(Path({str(tmp_path)!r})):
        print("in")
except PlanError:
    print("refused")
"""
    run = [sys.executable, "-c", code]
    with exclusive(tmp_path):
        assert subprocess.run(run, capture_output=True, text=True, check=True).stdout == "refused\n"
    assert subprocess.run(run, capture_output=True, text=True, check=True).stdout == "in\n"
