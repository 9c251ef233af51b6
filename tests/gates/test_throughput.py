"""The throughput gate: bounds against hand arithmetic, error rates against draws, and what voids a load run."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest

from quantkit.errors import GateError
from quantkit.gates.throughput import judge_again, judge_regime
from quantkit.recipe import Regime, ThroughputGate
from quantkit.records import LoadRun, Pair, RegimeTimings, Timings

REGIME = Regime(concurrency=1, min_ratio=1.1)


def run(speed: float, **changes: Any) -> LoadRun:
    fields = dict.fromkeys(("median_ttft_ms", "p99_ttft_ms", "median_tpot_ms", "p99_tpot_ms", "seconds"), 1.0)
    counts = {"completed": 8, "failed": 0, "output_tokens": 384, "output_throughput": speed}
    return LoadRun.model_validate(fields | counts | changes)


def pairs(*ratios: float) -> list[Pair]:
    return [Pair(seed=seed, baseline=run(20.0 + seed), variant=run((20.0 + seed) * r)) for seed, r in enumerate(ratios)]


def judged(*ratios: float, regime: Regime = REGIME) -> RegimeTimings:
    return judge_regime(pairs(*ratios), [], regime, 0.95)


def test_the_ratio_is_the_geometric_mean_with_students_bounds_on_the_logs() -> None:
    found = judged(1.2, 1.3, 1.4)
    logs = [math.log(1.2), math.log(1.3), math.log(1.4)]
    mean = sum(logs) / 3
    reach = 2.919986 * math.sqrt(sum((x - mean) ** 2 for x in logs) / 2 / 3)
    assert (found.ratio, found.low, found.high) == pytest.approx(
        (math.exp(mean), math.exp(mean - reach), math.exp(mean + reach)), rel=1e-6
    )


@pytest.mark.parametrize(
    ("ratios", "verdict"),
    [
        ((1.2, 1.21, 1.19), "pass"),
        ((1.0, 1.01, 0.99), "fail"),
        ((1.0, 1.3, 1.2), "inconclusive"),
        ((1.1, 1.1, 1.1), "pass"),
    ],
)
def test_bounds_decide(ratios: tuple[float, ...], verdict: str) -> None:
    # 1.1 three times is 1.1 only up to rounding: asked with a hair less.
    regime = REGIME.model_copy(update={"min_ratio": 1.1 - 1e-12})
    assert judged(*ratios, regime=regime).verdict == verdict


@pytest.mark.parametrize("runs", [3, 5, 10])
def test_a_variant_on_the_margin_passes_five_times_in_a_hundred(runs: int) -> None:
    """A/A: both sides are the same server, and the gate asks for 1.0."""
    random, draws = np.random.default_rng(runs), 3000
    speeds = np.exp(random.normal(0, 0.05, (draws, 2, runs)))
    regime = Regime(concurrency=1, min_ratio=1.0)
    verdicts = []
    for source, variant in speeds:
        found = [
            Pair(seed=k, baseline=run(a), variant=run(b)) for k, (a, b) in enumerate(zip(source, variant, strict=True))
        ]
        verdicts.append(judge_regime(found, [], regime, 0.95).verdict)
    tolerance = 3 * math.sqrt(0.05 * 0.95 / draws)
    for verdict in ("pass", "fail"):
        assert abs(verdicts.count(verdict) / draws - 0.05) <= tolerance


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"failed": 1, "completed": 7}, "7 of 8 requests completed, 1 failed"),
        ({"completed": 6}, "6 of 8 requests completed"),
        ({"output_tokens": 383}, "unequal output tokens, 384 and 383"),
        ({"output_throughput": 0.0}, "no output tokens a second"),
    ],
)
def test_a_void_run_fails_whatever_its_speed(changes: dict[str, Any], said: str) -> None:
    good = pairs(2.0, 2.0, 2.0)
    bad = good[0].model_copy(update={"variant": good[0].variant.model_copy(update=changes)})
    found = judge_regime([bad, *good[1:]], [], REGIME, 0.95)
    assert found.verdict == "fail" and said in found.why and len(found.faults) == 1
    reported = [fault.replace("variant,", "awq,") for fault in found.faults]
    assert judge_regime([bad, *good[1:]], reported, REGIME, 0.95).faults == tuple(reported)


def test_a_fault_that_the_load_reports_fails_and_is_said_once_on_judging_again() -> None:
    found = judge_regime(pairs(2.0, 2.0, 2.0), ["12 prefix-cache hits", "12 prefix-cache hits"], REGIME, 0.95)
    assert found.verdict == "fail" and found.faults == ("12 prefix-cache hits",)
    gate = ThroughputGate(regimes=(REGIME,))
    assert judge_again(timings(found), gate).regimes[0] == found


@pytest.mark.parametrize("count", [0, 1])
def test_too_few_pairs_decide_nothing(count: int) -> None:
    found = judged(*[2.0] * count)
    assert found.verdict == "inconclusive" and "no interval" in found.why
    json.loads(found.model_dump_json(), parse_constant=lambda name: pytest.fail(name))
    assert RegimeTimings.model_validate_json(found.model_dump_json()) == found


def timings(*regimes: RegimeTimings) -> Timings:
    return Timings(
        variant="awq", baseline="source", target="cpu", regimes=regimes, versions={}, flags=(), kernel="none named"
    )


def test_judging_again_asks_the_present_margins_of_the_old_pairs() -> None:
    crowd = Regime(concurrency=8, min_ratio=0.9, requests=8)
    stored = timings(judged(1.2, 1.21, 1.19), judged(0.95, 0.96, 0.94, regime=crowd))
    assert [r.verdict for r in stored.regimes] == ["pass", "pass"]
    harder = ThroughputGate(
        regimes=(crowd.model_copy(update={"min_ratio": 1.0}), REGIME.model_copy(update={"min_ratio": 1.15}))
    )
    again = judge_again(stored, harder)
    assert [(r.concurrency, r.verdict, r.min_ratio) for r in again.regimes] == [(8, "fail", 1.0), (1, "pass", 1.15)]
    assert again.regimes[1].pairs == stored.regimes[0].pairs and again.variant == "awq"


def test_regimes_that_were_never_measured_are_all_named() -> None:
    gate = ThroughputGate(regimes=(REGIME, Regime(concurrency=2, min_ratio=1.0), Regime(concurrency=4, min_ratio=1.0)))
    with pytest.raises(GateError) as caught:
        judge_again(timings(judged(1.2, 1.2, 1.2)), gate)
    assert len(caught.value.faults) == 2 and "concurrency 4" in str(caught.value)
