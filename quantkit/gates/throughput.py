"""Does a variant serve as fast as its margin asks? Paired load runs, decided on the bounds of the ratio."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from scipy import stats

from quantkit.errors import Fault, GateError
from quantkit.recipe import Regime, ThroughputGate
from quantkit.records import LoadRun, Outcome, Pair, RegimeTimings, Timings


def judge_regime(pairs: Sequence[Pair], faults: Sequence[str], regime: Regime, confidence: float) -> RegimeTimings:
    """Judge the pairs of one regime: pass where the lower bound reaches min_ratio, fail where the upper does not.

    The ratio is the geometric mean over the pairs; its one-sided bounds are Student's t on the log ratios.

    Args: faults: what makes load runs void; any is a fail, and those that the pairs themselves show are added.
          confidence: of each one-sided bound.
    """
    logs = [
        math.log(p.variant.output_throughput / p.baseline.output_throughput)
        for p in pairs
        if _moves(p.baseline) and _moves(p.variant)
    ]
    found = tuple(dict.fromkeys([*faults, *(fault for pair in pairs for fault in _faults(pair, regime, faults))]))
    mean = statistics.fmean(logs) if logs else None
    low = high = mean
    if mean is not None and len(logs) > 1:
        reach = float(stats.t.ppf(confidence, len(logs) - 1)) * statistics.stdev(logs) / len(logs) ** 0.5
        low, high = mean - reach, mean + reach
    # Without a usable pair there is no ratio; JSON has no NaN, and 0 claims nothing for the variant.
    ratio, low, high = (0.0 if log is None else math.exp(log) for log in (mean, low, high))
    verdict, why = _verdict(ratio, low, high, len(logs), found, regime)
    return RegimeTimings(
        concurrency=regime.concurrency,
        requests=regime.count,
        prompt_tokens=regime.prompt_tokens,
        output_tokens=regime.output_tokens,
        min_ratio=regime.min_ratio,
        pairs=tuple(pairs),
        ratio=ratio,
        low=low,
        high=high,
        verdict=verdict,
        why=why,
        faults=found,
    )


def judge_again(timings: Timings, gate: ThroughputGate) -> Timings:
    """The stored pairs under the gate's present margins and confidence; nothing is measured.

    Raises GateError naming every regime of the gate that was never measured.
    """
    measured = {(r.concurrency, r.prompt_tokens, r.output_tokens): r for r in timings.regimes}
    wanted = [(regime.concurrency, regime.prompt_tokens, regime.output_tokens) for regime in gate.regimes]
    missing = [
        Fault(
            f"concurrency {c} with {prompt} + {output} tokens was not measured",
            f"timings of {timings.variant}",
            "run the bench stage again, or take the regime out of gates.throughput",
        )
        for c, prompt, output in wanted
        if (c, prompt, output) not in measured
    ]
    if missing:
        raise GateError(*missing)
    judged = tuple(
        judge_regime(measured[key].pairs, measured[key].faults, regime, gate.confidence)
        for key, regime in zip(wanted, gate.regimes, strict=True)
    )
    return timings.model_copy(update={"regimes": judged})


def _verdict(
    ratio: float, low: float, high: float, usable: int, faults: Sequence[str], regime: Regime
) -> tuple[Outcome, str]:
    asked = f"at least {regime.min_ratio:g} asked"
    if faults:
        return "fail", f"the load runs are void: {'; '.join(faults)}"
    if usable < 2:
        return "inconclusive", f"{usable} usable pair{'s' * (usable != 1)} of load runs: no interval, {asked}"
    if low >= regime.min_ratio:
        return "pass", f"throughput ratio {ratio:.3f}, lower bound {low:.3f}, {asked}"
    if high < regime.min_ratio:
        return "fail", f"throughput ratio {ratio:.3f}, upper bound {high:.3f}, {asked}"
    return "inconclusive", f"throughput ratio {ratio:.3f}, bounds {low:.3f} to {high:.3f}, {asked}; more pairs decide"


def _faults(pair: Pair, regime: Regime, reported: Sequence[str]) -> list[str]:
    """What the pair itself shows, where the load did not report it already."""
    found = []
    for name, run in (("source", pair.baseline), ("variant", pair.variant)):
        if run.failed or run.completed != regime.count:
            found.append((name, f"{run.completed} of {regime.count} requests completed, {run.failed} failed"))
        if not _moves(run):
            found.append((name, "no output tokens a second"))
    made = pair.baseline.output_tokens, pair.variant.output_tokens
    if made[0] != made[1]:
        found.append(("source and variant", f"unequal output tokens, {made[0]} and {made[1]}"))
    return [
        f"{who}, seed {pair.seed}: {what}"
        for who, what in found
        if not any(fault.endswith(f"seed {pair.seed}: {what}") for fault in reported)
    ]


def _moves(run: LoadRun) -> bool:
    return math.isfinite(run.output_throughput) and run.output_throughput > 0
