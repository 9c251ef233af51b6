"""The whole run through the command line, on a random model of twelve blocks: kills, exit codes, what is published."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conftest import TinyLlama

COMMAND = Path(sys.executable).with_name("quantkit")
Recipe = dict[str, Any]


@pytest.fixture(scope="module")
def model(tiny_llama: TinyLlama, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tiny_llama(tmp_path_factory.mktemp("cli") / "model", num_hidden_layers=12, max_position_embeddings=1024)
    # lm-eval asks for an end of text; the letter of a byte that no text holds stands in for it.
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "\u0143"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture
def recipe(model: Path) -> Recipe:
    return {
        "name": "tiny",
        "model": {"source": str(model)},
        "calibration": {"samples": 16, "length": 128},
        "variants": {
            "awq": {"method": "awq", "group_size": 32},
            "gptq": {"method": "gptq", "group_size": 32},
            "int8": {"method": "int8"},
        },
        "evaluate": {"suites": ["perplexity"], "limit": {"perplexity": 8}},
        "gates": {"accuracy": {"required": {"perplexity": {"max_ratio": 1.05}}}},
        "serve": {"max_model_len": 512},
        "select": {"objective": "size"},
        "publish": {"name": "tiny-model"},
    }


def start(folder: Path, *words: str) -> subprocess.Popen[str]:
    """As a shell starts a background command: with SIGINT ignored, unless the first word is 'foreground'."""
    trap = "" if words[0] == "foreground" else "trap '' INT; "
    command = ["sh", "-c", f'{trap}exec "$@"', "sh", COMMAND, *words[words[0] == "foreground" :]]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def call(folder: Path, *words: str) -> tuple[int, str, str]:
    process = start(folder, *words)
    out, err = process.communicate()
    return process.returncode, out, err


def write(folder: Path, recipe: Recipe) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return "recipe.yaml"


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_from_recipe_to_registry_and_the_same_again_makes_nothing_new(tmp_path: Path, recipe: Recipe) -> None:
    pytest.importorskip("mlflow")
    code, out, err = call(tmp_path, "quantize", write(tmp_path, recipe), "--json")
    assert code == 0, err
    verdict = json.loads(out)
    run = tmp_path / "runs" / "tiny"
    assert verdict["chosen"] in verdict["variants"] and set(verdict["variants"]) == set(recipe["variants"])
    assert json.loads((run / "verdict.json").read_text())["chosen"] == verdict["chosen"]
    assert {path.name for path in run.glob("report.*")} == {"report.html", "report.md"} and (run / "junit.xml").exists()
    uri = ("--uri", f"sqlite:///{tmp_path / 'runs' / 'mlflow.db'}")
    assert call(tmp_path, "verify", "models:/tiny-model@champion", *uri)[0] == 0
    assert call(tmp_path, "verify", "models:/tiny-model/1")[0] == 0

    before = content(run / "artifacts") | content(run / "scores")
    code, out, _ = call(tmp_path, "quantize", "recipe.yaml", "--json")
    assert (code, json.loads(out)) == (0, verdict)
    assert before == content(run / "artifacts") | content(run / "scores")
    assert call(tmp_path, "verify", "models:/tiny-model/2")[0] == 8

    weights = next((run / "artifacts" / verdict["chosen"]).glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-1] + b"!")
    code, _, err = call(tmp_path, "verify", str(weights.parent))
    assert code == 5 and weights.name in err
    assert call(tmp_path, "publish", str(run))[0] == 5


def test_what_fails_its_gate_is_not_published_and_the_exit_code_says_so(tmp_path: Path, recipe: Recipe) -> None:
    # 20 questions cannot show that nothing is lost: inconclusive, and that is no pass.
    recipe["evaluate"] = {"suites": ["mmlu-dev"], "limit": {"mmlu-dev": 20}}
    recipe["gates"]["accuracy"]["required"] = {"mmlu-dev": {"max_drop": 0.01}}
    recipe["variants"] = {"gptq": recipe["variants"]["gptq"]}
    code, out, err = call(tmp_path, "quantize", write(tmp_path, recipe))
    assert code == 7, err
    assert "chosen: none" in out
    run = tmp_path / "runs" / "tiny"
    assert json.loads((run / "verdict.json").read_text())["chosen"] is None
    assert not (tmp_path / "runs" / "mlflow.db").exists()
    code, _, err = call(tmp_path, "publish", str(run))
    assert code == 8 and "no variant passed" in err

    # An edited verdict is not believed.
    verdict = json.loads((run / "verdict.json").read_text())
    (run / "verdict.json").write_text(json.dumps(verdict | {"chosen": "gptq"}))
    assert call(tmp_path, "publish", str(run))[0] == 8
    assert call(tmp_path, "gate", str(run))[0] == 7


def interrupted(folder: Path, recipe: Recipe, block: int, end: Callable[[subprocess.Popen[str]], object]) -> int:
    """Start the quantize stage and end it when a block, of twelve, is done. Returns its exit code."""
    process = start(folder, "foreground", "quantize", write(folder, recipe), "--until", "quantize")
    mark = folder / "runs" / "tiny" / "artifacts" / ".work" / f"block-{block}.json"
    while not mark.exists() and process.poll() is None:
        time.sleep(0.005)
    end(process)
    process.communicate()
    assert not (folder / "runs" / "tiny" / "artifacts" / "awq" / "quantkit.json").exists(), "it ended too late"
    return process.returncode


def test_a_killed_run_continues_and_its_artifacts_come_out_byte_equal(tmp_path: Path, recipe: Recipe) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    write(whole, recipe)
    assert call(tmp_path, "quantize", "whole/recipe.yaml", "--until", "quantize", "--runs", "w")[0] == 0
    assert interrupted(cut, recipe, 1, lambda process: process.kill()) == -signal.SIGKILL
    assert interrupted(cut, recipe, 4, lambda process: process.send_signal(signal.SIGINT)) == 130
    code, _, err = call(cut, "quantize", "recipe.yaml", "--until", "quantize")
    assert code == 0
    assert "block" in err
    assert content(cut / "runs" / "tiny" / "artifacts") == content(tmp_path / "w" / "tiny" / "artifacts")


def test_a_background_run_ends_on_sigterm_and_says_how_to_go_on(tmp_path: Path, recipe: Recipe) -> None:
    process = start(tmp_path, "quantize", write(tmp_path, recipe), "--until", "quantize")
    while not (tmp_path / "runs" / "tiny" / "artifacts" / ".work").exists() and process.poll() is None:
        time.sleep(0.005)
    process.terminate()
    _, err = process.communicate()
    assert process.returncode == 130 and "the same command continues" in err


def test_a_second_run_in_the_same_folder_is_refused(tmp_path: Path, recipe: Recipe) -> None:
    def second(first: subprocess.Popen[str]) -> None:
        os.kill(first.pid, signal.SIGSTOP)
        code, _, err = call(tmp_path, "quantize", "recipe.yaml")
        os.kill(first.pid, signal.SIGCONT)
        first.terminate()
        assert code == 3 and "another quantkit run" in err

    assert interrupted(tmp_path, recipe, 1, second) == 130


def test_every_fault_is_said_at_once_and_nothing_is_written(tmp_path: Path, recipe: Recipe) -> None:
    recipe["calibration"]["lenght"] = 512
    recipe["variants"]["awq"]["group_size"] = 48
    recipe["variants"]["gptq"]["ignore"] = ["*.nothing"]
    recipe["variants"]["int8"]["method"] = "int7"
    recipe["evaluate"]["suites"] += ["nosuite"]
    code, out, err = call(tmp_path, "quantize", write(tmp_path, recipe))
    assert code == 2 and out == ""
    for said in ("lenght", "48", "*.nothing", "int7", "nosuite"):
        assert said in err
    # Two kinds of shape do not divide; every other fault has one place.
    assert err.count("  do     ") == 6
    assert [path.name for path in tmp_path.iterdir()] == ["recipe.yaml"]


def test_a_dry_run_prints_the_plan_and_writes_nothing(tmp_path: Path, recipe: Recipe) -> None:
    code, out, _ = call(tmp_path, "quantize", write(tmp_path, recipe), "--dry-run", "--json")
    plan = json.loads(out)
    assert code == 0 and plan["faults"] == [] and set(plan["weights_bytes"]) == {"source", *recipe["variants"]}
    assert [path.name for path in tmp_path.iterdir()] == ["recipe.yaml"]
    made = call(tmp_path, "quantize", "recipe.yaml", "--until", "quantize")
    assert made[0] == 0
    for name in recipe["variants"]:
        record = json.loads((tmp_path / "runs" / "tiny" / "artifacts" / name / "quantkit.json").read_text())
        # The shards' headers are not planned.
        assert 0 <= record["bytes"] - plan["weights_bytes"][name] < 100_000


@pytest.mark.parametrize("words", [["quantize"], ["no-such-command"], ["quantize", "nothing.yaml"], ["evaluate", "x"]])
def test_a_wrong_command_line_is_exit_code_2(tmp_path: Path, words: list[str]) -> None:
    code, out, err = call(tmp_path, *words)
    assert code == 2 and out == "" and err
