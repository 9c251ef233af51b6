"""The table of a run: a row a variant, the source first; generic over suites and regimes, as far as the run came."""

from __future__ import annotations

from pathlib import Path
from statistics import median

from quantkit.records import RegimeTimings, TaskScore
from quantkit.report.escape import clean
from quantkit.report.escape import markdown as escaped
from quantkit.report.stored import RegimeKey, Stored, read

PERPLEXITY = ("perplexity", "kl", "top1_agreement")
NOTHING = ""


def table(run: Path, markdown: bool = False) -> str:
    """The final table of a run folder, for a terminal or as Markdown.

    Columns: variant, MB, perplexity, KL, each other suite (value ± standard error), output tokens a second in each
    regime with the ratio to the source and its bounds, the verdicts, and a mark on the chosen variant.
    """
    return text_of(read(run), markdown)


def text_of(stored: Stored, markdown: bool) -> str:
    from tabulate import tabulate

    safe = escaped if markdown else clean
    headers, rows = cells(stored)
    return tabulate(
        [[_one_line(safe(cell)) for cell in row] for row in rows],
        headers=[_one_line(safe(header)) for header in headers],
        tablefmt="pipe" if markdown else "simple",
        disable_numparse=True,
        colalign=["left", *["right"] * (len(headers) - 4), *["left"] * 3],
    )


def cells(stored: Stored) -> tuple[list[str], list[list[str]]]:
    """Headers and rows, neither of them escaped."""
    tasks = _task_columns(stored)
    regimes = stored.regimes()
    headers = ["variant", "MB", *tasks, *(f"tok/s {name}" for name in regimes.values())]
    headers += ["accuracy", "throughput", "chosen"]
    rows = []
    for name in ("source", *stored.variants):
        size = stored.sizes.get(name)
        row = [name, NOTHING if size is None else f"{size / 1e6:.1f}"]
        row += [_score(stored, name, *column) for column in tasks.values()]
        row += [_speed(stored, name, key) for key in regimes]
        verdict = stored.verdict.variants.get(name) if stored.verdict else None
        row += [verdict.accuracy, verdict.throughput] if verdict else [NOTHING, NOTHING]
        row += ["yes" if stored.verdict and stored.verdict.chosen == name else NOTHING]
        rows.append(row)
    return headers, rows


def number(score: TaskScore) -> str:
    """Value and standard error, with as many digits as tell variants apart."""
    digits = {"perplexity": 2, "kl": 4}.get(score.metric, 3)
    return f"{score.value:.{digits}f} ± {score.stderr:.{digits}f}"


def _task_columns(stored: Stored) -> dict[str, tuple[str, str]]:
    """Header -> (suite, task). Perplexity and KL first; a limited suite says so."""
    columns: dict[str, tuple[str, str]] = {}
    others: dict[str, tuple[str, str]] = {}
    for suite in stored.suites:
        found = [scores[suite] for scores in stored.scores.values() if suite in scores]
        tasks = list(dict.fromkeys(task for scores in found for task in scores.tasks))
        limit = next((scores.limit for scores in found if scores.limit is not None), None)
        mark = f" (first {limit})" if limit is not None else ""
        # Two suites of text both have these tasks: the second is told apart by its own name.
        text = suite if "perplexity" in tasks and ("perplexity" + mark in columns) else ""
        for task in tasks:
            if task in ("perplexity", "kl") and "perplexity" in tasks:
                name = {"perplexity": "perplexity", "kl": "KL"}[task]
                columns[f"{text} {name}{mark}".strip()] = suite, task
            elif task not in PERPLEXITY:
                others[(suite if len(tasks) == 1 else f"{suite} {task}") + mark] = suite, task
    return columns | others


def _score(stored: Stored, variant: str, suite: str, task: str) -> str:
    scores = stored.scores.get(variant, {}).get(suite)
    score = scores.tasks.get(task) if scores else None
    return number(score) if score else NOTHING


def _speed(stored: Stored, variant: str, key: RegimeKey) -> str:
    if variant == "source":
        speed = stored.source_speed(key)
        return NOTHING if speed is None else f"{speed:.1f}"
    regime = stored.regime(variant, key)
    return NOTHING if regime is None else f"{_median(regime)}, {interval(regime)}"


def interval(regime: RegimeTimings) -> str:
    """'1.52 [1.40, 1.64]', or why there is none."""
    if regime.faults:
        return f"{regime.ratio:.2f} [void]"
    if len(regime.pairs) < 2:
        return f"{regime.ratio:.2f} [no interval]"
    return f"{regime.ratio:.2f} [{regime.low:.2f}, {regime.high:.2f}]"


def _median(regime: RegimeTimings) -> str:
    speeds = [pair.variant.output_throughput for pair in regime.pairs]
    return f"{median(speeds):.1f}" if speeds else "none"


def _one_line(text: str) -> str:
    return text.replace("\n", " ")
