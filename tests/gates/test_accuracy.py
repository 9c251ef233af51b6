"""The accuracy gate: its bounds against arithmetic done another way, its error rates against exact sums and draws."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize, special

from quantkit.errors import GateError
from quantkit.gates.accuracy import drop_bounds, judge, ratio_bounds
from quantkit.recipe import Margin
from quantkit.records import Judgement, Scores, TaskScore

Z = 1.6448536269514722
DROP = Margin(max_drop=0.05)
RATIO = Margin(max_ratio=1.15)


def scores(name: str, chance: float | None = None, n: int = 100, **changes: Any) -> Scores:
    fields = {
        "suite": "suite",
        "variant": name,
        "backend": "transformers",
        "fingerprint": "f",
        "settings": {"seed": 0},
        "tasks": {"task": TaskScore(metric="acc", value=0.5, stderr=0.1, n=n, chance=chance)},
        "items": "suite.items.jsonl",
        "seconds": 1.0,
    }
    return Scores.model_validate(fields | changes)


def binary(values: Any) -> list[dict[str, Any]]:
    return [{"id": f"q{k}", "task": "task", "correct": int(v)} for k, v in enumerate(values)]


def judged(before: Any, after: Any, margin: Margin = DROP, chance: float | None = None) -> Judgement:
    return judge(scores("source", chance, len(before)), scores("v"), binary(before), binary(after), margin, True, 0.95)


def windows(losses: Any) -> list[dict[str, Any]]:
    return [{"id": f"window/{k}", "nll": list(map(float, loss))} for k, loss in enumerate(losses)]


def judged_ratio(before: Any, after: Any, margin: Margin = RATIO) -> Judgement:
    return judge(scores("source"), scores("v"), windows(before), windows(after), margin, True, 0.95)


# Differences of paired proportions


def tables(n: int, most: int = 130) -> tuple[Any, Any]:
    lost, gained = np.meshgrid(*[np.arange(min(n, most) + 1)] * 2, indexing="ij")
    possible = lost + gained <= n
    return lost[possible], gained[possible]


def probability(lost: Any, gained: Any, n: int, share_lost: float, share_gained: float) -> Any:
    """Of each table, by the trinomial formula."""
    same = n - lost - gained
    ways = special.gammaln(n + 1) - special.gammaln(lost + 1) - special.gammaln(gained + 1) - special.gammaln(same + 1)
    logs = special.xlogy(lost, share_lost) + special.xlogy(gained, share_gained)
    return np.exp(ways + logs + special.xlogy(same, 1 - share_lost - share_gained))


@pytest.mark.parametrize("n", [20, 164, 281])
@pytest.mark.parametrize("drop", [0.01, 0.02, 0.05])
def test_a_variant_on_the_margin_passes_or_fails_falsely_at_most_five_times_in_a_hundred(n: int, drop: float) -> None:
    """Exactly, summed over every table, for discordances from 'only losses' to a third of all items."""
    lost, gained = tables(n)
    low, high = drop_bounds(lost, gained, n, 0.95)
    for share_gained in (0, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.15):
        chance = probability(lost, gained, n, share_gained + drop, share_gained)
        assert chance.sum() > 0.999
        assert chance[high <= drop].sum() <= 0.05
        assert chance[low > drop].sum() <= 0.05


@pytest.mark.parametrize("drop", [0.005, 0.01, 0.02])
@pytest.mark.parametrize("share_gained", [0.0, 0.01, 0.05, 0.15])
def test_the_error_rates_hold_on_the_whole_of_mmlu(drop: float, share_gained: float) -> None:
    n, draws = 14042, 20_000
    shares = [share_gained + drop, share_gained, 1 - 2 * share_gained - drop]
    lost, gained, _ = np.random.default_rng(0).multinomial(n, shares, draws).T
    low, high = drop_bounds(lost, gained, n, 0.95)
    tolerance = 3 * math.sqrt(0.05 * 0.95 / draws)
    assert 0.03 < (high <= drop).mean() <= 0.05 + tolerance
    assert 0.03 < (low > drop).mean() <= 0.05 + tolerance


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_bound_is_where_the_score_test_with_a_numeric_likelihood_turns(data: st.DataObject) -> None:
    n = data.draw(st.integers(5, 400))
    lost = data.draw(st.integers(0, n))
    gained = data.draw(st.integers(0, n - lost))
    high = float(drop_bounds(lost, gained, n, 0.95)[1])
    if not -0.98 < high < 0.98:
        return

    def minus_log(q: float) -> float:
        return -float(special.xlogy([lost, gained, n - lost - gained], [q + high, q, 1 - 2 * q - high]).sum())

    edges = max(0.0, -high), (1 - high) / 2
    q = optimize.minimize_scalar(minus_log, bounds=edges, method="bounded", options={"xatol": 1e-10}).x
    deviation = math.sqrt(n * (2 * q + high - high**2))
    assert (lost - gained + 0.5 - n * high) / deviation == pytest.approx(-Z, abs=1e-2)


def test_no_discordant_pair_is_not_no_error() -> None:
    low, high = drop_bounds(0, 0, np.array([20, 164, 14042]), 0.95)
    assert np.all(high > 0) and np.all(low < 0) and np.all(np.diff(high) < 0)
    assert 0.12 < high[0] < 0.2  # Wald says 0
    assert judged([1] * 10 + [0] * 10, [1] * 10 + [0] * 10).outcome == "inconclusive"


@given(st.integers(1, 300), st.integers(0, 300), st.integers(0, 300), st.sampled_from([0.6, 0.9, 0.99]))
def test_the_interval_holds_the_estimate_and_widens_with_confidence(n: int, b: int, c: int, confidence: float) -> None:
    lost, gained = b % (n + 1), c % (n - b % (n + 1) + 1)
    low, high = drop_bounds(lost, gained, n, confidence)
    wider = drop_bounds(lost, gained, n, 0.995)
    assert -1 <= wider[0] <= low <= (lost - gained) / n <= high <= wider[1] <= 1


def test_enough_items_decide_either_way_and_needed_is_where_they_begin_to() -> None:
    before = np.arange(14042) % 2
    after = before.copy()
    after[1:400:2] = 0  # 200 lost: a drop of 1.4 points
    assert judged(before, after, Margin(max_drop=0.02)).outcome == "pass"
    assert judged(before, after, Margin(max_drop=0.01)).outcome == "fail"
    few = judged(before[:140], [*[0] * 8, *before[8:140]], Margin(max_drop=0.05))
    assert few.outcome == "inconclusive" and few.needed is not None and few.needed > 140
    assert f"about {few.needed} items would decide" in few.why
    rate = few.value
    for items, decided in ((few.needed, True), (few.needed - 1, False)):
        high = float(drop_bounds(rate * items, 0, items, 0.95)[1])
        assert (high <= 0.05) == decided


def test_on_the_margin_no_number_decides() -> None:
    before, after = [1] * 100, [0] * 5 + [1] * 95
    found = judged(before, after)
    assert (found.value, found.outcome, found.needed) == (0.05, "inconclusive", None)
    assert "no number of items would decide" in found.why


def test_a_gate_compares_what_it_has_not_rounded() -> None:
    before, after = [1] * 1000, [0] * 30 + [1] * 970
    high = float(drop_bounds(30, 0, 1000, 0.95)[1])
    assert judged(before, after, Margin(max_drop=high)).outcome == "pass"
    assert judged(before, after, Margin(max_drop=math.nextafter(high, 0))).outcome == "inconclusive"


@pytest.mark.parametrize(
    ("right", "chance", "marked"),
    [(70, 0.25, True), (110, 0.25, False), (0, 0.0, True), (1, 0.0, False), (0, None, False)],
)
def test_a_source_that_guesses_is_marked(right: int, chance: float | None, marked: bool) -> None:
    values = [1] * right + [0] * (281 - right)
    found = judged(values, values, chance=chance)
    assert found.source_at_chance is marked
    assert ("not above chance" in found.why) is marked


def test_items_pair_by_id_whatever_their_order() -> None:
    before, after = binary([1, 1, 0, 0] * 50), binary([1, 0, 1, 0] * 50)
    found = judge(scores("source"), scores("v"), before, after[::-1], DROP, False, 0.95)
    assert (found.value, found.n, found.required) == (0.0, 200, False)
    assert "50 lost, 50 gained" in found.why


@pytest.mark.parametrize(
    ("after", "changes", "said"),
    [
        (binary([1] * 9), {}, "no partner"),
        (binary([1] * 10)[::-1] + binary([1]), {}, "stands twice"),
        (binary([1] * 10), {"fingerprint": "g", "settings": {"seed": 1}}, "seed differ"),
        (binary([1] * 10), {"suite": "other"}, "not the same measurement"),
        (windows([[1.0]] * 10), {}, "no partner"),
    ],
)
def test_unequal_measurements_are_refused(after: Any, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(GateError, match=said):
        judge(scores("source"), scores("v", **changes), binary([1] * 10), after, DROP, True, 0.95)


def test_a_margin_of_the_wrong_kind_is_refused() -> None:
    with pytest.raises(GateError, match="no 'nll'"):
        judged([1] * 10, [1] * 10, RATIO)
    with pytest.raises(GateError, match="no 'correct'"):
        judged_ratio([[1.0]] * 3, [[1.0]] * 3, DROP)


# Perplexity


def test_the_ratio_is_that_of_the_perplexities() -> None:
    random = np.random.default_rng(1)
    before = [random.exponential(3, size) for size in (511, 200, 511, 77)]
    after = [loss + random.normal(0.05, 0.1, len(loss)) for loss in before]
    found = judged_ratio(before, after)
    perplexity = [math.exp(np.concatenate(losses).mean()) for losses in (before, after)]
    assert found.value == pytest.approx(perplexity[1] / perplexity[0], rel=1e-12)
    assert found.low < found.value < found.high and found.task == "perplexity" and found.n == 4


def test_tokens_of_a_window_hang_together() -> None:
    """A window's shift, repeated on each of its tokens, is one observation, not 500: the width does not change."""
    shift = np.random.default_rng(2).normal(0.05, 0.1, 30)
    short, long = (ratio_bounds(shift * size, np.full(30, float(size)), 0.95)[:3] for size in (1, 500))
    assert short == pytest.approx(long)
    assert long[2] - long[1] > 2 * Z * 0.1 / math.sqrt(30) * 0.7


def test_without_skew_the_bounds_are_students() -> None:
    loss = np.array([-2.0, -1.0, 0.0, 1.0, 2.0])
    mean, low, high, spread = ratio_bounds(loss, np.ones(5), 0.95)
    assert (mean, spread) == pytest.approx((0, math.sqrt(2.5)))
    assert (low, high) == pytest.approx((-2.131847 * math.sqrt(0.5), 2.131847 * math.sqrt(0.5)), rel=1e-5)


@pytest.mark.parametrize("kind", ["normal", "skewed"])
def test_a_ratio_on_the_margin_rarely_passes_or_fails(kind: str) -> None:
    """32 windows. Normal: 5 %. Skewed (exponential damage): Student alone passes more falsely, this about 6 %."""
    random, draws = np.random.default_rng(3), 3000
    shape = (draws, 32)
    drawn = random.normal(0, 1, shape) if kind == "normal" else random.exponential(1, shape) - 1
    bounds = np.array([ratio_bounds(loss_W, np.ones(32), 0.95)[1:3] for loss_W in drawn])
    tolerance = 3 * math.sqrt(0.05 * 0.95 / draws)
    assert (bounds[:, 1] <= 0).mean() <= 0.05 + tolerance + (0.01 if kind == "skewed" else 0)
    assert (bounds[:, 0] > 0).mean() <= 0.05 + tolerance
    students = drawn.mean(1) + 1.6955 * drawn.std(1, ddof=1) / math.sqrt(32)
    assert (bounds[:, 1] <= 0).mean() <= (students <= 0).mean()


def test_ratio_verdicts_and_the_windows_that_would_decide() -> None:
    random = np.random.default_rng(4)
    before = random.exponential(3, (32, 100))
    shift = np.linspace(-0.1, 0.1, 32)[:, None]
    assert judged_ratio(before, before + 0.05 + shift).outcome == "pass"
    assert judged_ratio(before, before + 0.3 + shift).outcome == "fail"
    unsure = judged_ratio(before, before + math.log(1.15) - 0.01 + shift)
    assert unsure.outcome == "inconclusive" and unsure.needed is not None
    spread = float(np.std(shift, ddof=1))
    assert unsure.needed == pytest.approx((Z * spread / 0.01) ** 2, rel=0.03)


def test_a_variant_that_is_its_source_passes() -> None:
    before = np.random.default_rng(5).exponential(3, (3, 10))
    found = judged_ratio(before, before, Margin(max_ratio=1.0))
    assert (found.low, found.value, found.high, found.outcome) == (1, 1, 1, "pass")


def test_a_variant_beyond_all_measure_fails_and_is_written() -> None:
    found = judged_ratio([[1.0], [1.0], [1.0]], [[5000.0], [9000.0], [7000.0]])
    assert found.outcome == "fail"
    json.loads(found.model_dump_json(), parse_constant=lambda name: pytest.fail(name))


def test_one_window_has_no_interval() -> None:
    found = judged_ratio([[1.0, 2.0]], [[1.0, 2.0]])
    assert (found.outcome, found.needed) == ("inconclusive", 2)
    assert Judgement.model_validate_json(found.model_dump_json()) == found


@pytest.mark.parametrize("after", [[[1.0], [1.0, 2.0]], [[1.0, math.nan], [1.0, 2.0]], [[1.0, math.inf], [1.0, 2.0]]])
def test_broken_losses_are_refused(after: Any) -> None:
    with pytest.raises(GateError):
        judged_ratio([[1.0, 2.0], [1.0, 2.0]], after)


def test_what_is_written_is_json() -> None:
    found = judged([1] * 20, [0] * 20)
    assert found.outcome == "fail"
    json.loads(found.model_dump_json(), parse_constant=lambda name: pytest.fail(name))
