"""The detailed tables of the HTML report: gates, scores, load runs, layers. Cells are text, not escaped."""

from __future__ import annotations

from statistics import median

from quantkit.report.stored import Stored
from quantkit.report.table import interval, number

Rows = list[list[str]]


def sections(stored: Stored) -> list[tuple[str, tuple[str, ...], Rows]]:
    """Title, headers and rows of each; no rows where the run did not come so far."""
    return [
        (
            "Accuracy gates",
            ("variant", "suite", "decides", "measure", "value", "low", "high", "allowed", "n", "needed", "verdict"),
            _gates(stored),
        ),
        (
            "Scores",
            ("variant", "suite", "task", "metric", "value ± stderr", "n", "chance", "backend", "seconds"),
            _scores(stored),
        ),
        (
            "Load runs, median over the pairs",
            ("variant", "regime", "requests", "pairs", "tok/s", "TTFT ms", "TPOT ms", "ratio", "asked", "verdict"),
            _runs(stored),
        ),
        (
            "Layers, median over the modules",
            ("variant", "modules", "methods", "tokens", "error", "plain rounding"),
            _layers(stored),
        ),
    ]


def _gates(stored: Stored) -> Rows:
    return [
        [
            name,
            one.suite,
            "yes" if one.required else "no, reported",
            one.measure,
            f"{one.value:.4f}",
            f"{one.low:.4f}",
            f"{one.high:.4f}",
            f"{one.margin:g}",
            str(one.n),
            str(one.needed or ""),
            one.outcome + (", source at chance" if one.source_at_chance else ""),
        ]
        for name, verdict in (stored.verdict.variants.items() if stored.verdict else ())
        for one in verdict.judgements
    ]


def _scores(stored: Stored) -> Rows:
    return [
        [
            name,
            suite + (f" (first {scores.limit})" if scores.limit is not None else ""),
            task,
            score.metric,
            number(score),
            str(score.n),
            "" if score.chance is None else f"{score.chance:g}",
            scores.backend,
            f"{scores.seconds:.1f}",
        ]
        for name in ("source", *stored.variants)
        for suite, scores in stored.scores.get(name, {}).items()
        for task, score in scores.tasks.items()
    ]


def _runs(stored: Stored) -> Rows:
    rows: Rows = []
    for name in stored.variants:
        for key, short in stored.regimes().items():
            regime = stored.regime(name, key)
            if regime is None:
                continue
            for who, runs in (
                ("source", [pair.baseline for pair in regime.pairs]),
                (name, [pair.variant for pair in regime.pairs]),
            ):
                columns: list[list[float]] = [
                    [run.output_throughput for run in runs],
                    [run.median_ttft_ms for run in runs],
                    [run.median_tpot_ms for run in runs],
                ]
                last = [interval(regime), f"{regime.min_ratio:g}", regime.verdict] if who == name else ["", "", ""]
                figures = [f"{median(column):.1f}" if column else "" for column in columns]
                where = f"{short} ({key[1]}+{key[2]} tokens)" if "(" not in short else short
                rows.append([who, where, str(regime.requests), str(len(runs)), *figures, *last])
    return rows


def _layers(stored: Stored) -> Rows:
    rows: Rows = []
    for name in stored.variants:
        lines = [line for line in stored.ledger if line.variant == name]
        if lines:
            used = [line.used for line in lines]
            methods = ", ".join(f"{used.count(method)} {method}" for method in dict.fromkeys(used))
            errors = [f"{median(line.error for line in lines):.2e}", f"{median(line.rtn_error for line in lines):.2e}"]
            rows.append([name, str(len(lines)), methods, f"{lines[0].tokens:,}", *errors])
    return rows
