"""Laws of the load schedule: interleaved, no prompt twice, every void run named."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantkit.recipe import Regime
from quantkit.serve import load

NAMES = ("source", "awq", "gptq")
REGIME = Regime(concurrency=2, min_ratio=1.0, requests=8, output_tokens=4)
GOOD: dict[str, Any] = {
    "completed": 8,
    "failed": 0,
    "output_tokens": 32,
    "output_throughput": 10.0,
    "median_ttft_ms": 1.0,
    "p99_ttft_ms": 2.0,
    "median_tpot_ms": 3.0,
    "p99_tpot_ms": 4.0,
    "seconds": 3.2,
    "prefix_hits": 0.0,
    "served": 9.0,
}


@given(regimes=st.integers(1, 4), pairs=st.integers(3, 9), seed=st.integers(0, 2**10))
def test_a_round_has_one_seed_and_every_name_and_no_other_round_has_that_seed(
    regimes: int, pairs: int, seed: int
) -> None:
    slots = load.schedule(NAMES, regimes, pairs, seed)
    rounds = [slots[start : start + len(NAMES)] for start in range(0, len(slots), len(NAMES))]
    assert len(rounds) == regimes * (pairs + 1)
    for together in rounds:
        assert {slot.name for slot in together} == set(NAMES)
        assert len({(slot.regime, slot.pair, slot.seed) for slot in together}) == 1
    seeds = [together[0].seed for together in rounds]
    assert len(set(seeds)) == len(seeds)
    assert 0 not in seeds


def test_every_regime_is_warmed_up_before_it_is_measured() -> None:
    slots = load.schedule(NAMES, 2, 3, 0)
    for regime in range(2):
        pairs = [slot.pair for slot in slots if slot.regime == regime]
        assert pairs[:3] == [None] * 3
        assert None not in pairs[3:]


def test_no_name_always_goes_first() -> None:
    slots = load.schedule(NAMES, 1, 3, 0)
    assert [slot.name for slot in slots[3::3]] == list(NAMES)


def test_two_recipe_seeds_share_no_prompt() -> None:
    first, second = ({slot.seed for slot in load.schedule(NAMES, 4, 9, seed)} for seed in (0, 1))
    assert not first & second


def test_a_good_run_has_no_fault() -> None:
    assert load.void(GOOD, REGIME) == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"failed": 8, "completed": 0, "output_tokens": 0}, "0 of 8 requests completed, 8 failed"),
        ({"completed": 7, "output_tokens": 28}, "7 of 8 requests"),
        ({"output_tokens": 31}, "31 output tokens, not 32"),
        ({"prefix_hits": 16.0}, "16 tokens came from the prefix cache"),
        ({"served": -40.0}, "restarted"),
        ({"error": "ValueError: no endpoint"}, "no endpoint"),
    ],
)
def test_what_makes_a_run_worth_nothing_is_named(change: dict[str, Any], said: str) -> None:
    (fault,) = load.void(GOOD | change, REGIME)
    assert said in fault


class Server:
    """What `measure` reads of an endpoint."""

    environment = "any"
    folder = "/nowhere"

    def __init__(self, name: str) -> None:
        self.url = self.model = name


def test_pairs_hold_the_runs_of_one_seed_and_faults_stay_with_their_variant(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    def generator(entries: list[dict[str, Any]], environment: str, scratch: Any) -> list[dict[str, Any]]:
        # Throughput tells seed and name, so that a wrong pairing shows.
        rank = {"source": 0.1, "awq": 0.2, "gptq": 0.3}
        runs = [GOOD | {"output_throughput": entry["seed"] + rank[entry["url"]]} for entry in entries]
        broken = max(place for place, entry in enumerate(entries) if entry["url"] == "gptq")
        runs[broken] = {"error": "gone"}
        return runs

    monkeypatch.setattr(load, "_run", generator)
    servers: Any = {name: Server(name) for name in NAMES}
    measured = load.measure(servers, (REGIME, REGIME), 3, 0, tmp_path)
    for pairs, faults in measured["awq"].values():
        assert len(pairs) == 3
        assert faults == []
        for pair in pairs:
            assert pair.baseline.output_throughput == pytest.approx(pair.seed + 0.1)
            assert pair.variant.output_throughput == pytest.approx(pair.seed + 0.2)
    assert [len(pairs) for pairs, _ in measured["gptq"].values()] == [3, 2]
    assert ["gone" in fault for _, faults in measured["gptq"].values() for fault in faults] == [True]
