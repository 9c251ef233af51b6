"""Is a variant still as good as its source? Paired item by item, decided on one-sided confidence bounds.

pass: the whole interval is within the margin. fail: the whole interval is beyond it. Otherwise inconclusive, which is
no pass. Nothing is rounded before it is compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from quantkit.errors import Fault, GateError
from quantkit.recipe import Margin
from quantkit.records import Judgement, Outcome, Scores

Item = dict[str, Any]
Floats = NDArray[np.float64]

_MOST = 10**9
"""A number of items beyond which `needed` is None: the estimate sits on the margin."""


def judge(
    source: Scores,
    variant: Scores,
    source_items: Sequence[Item],
    variant_items: Sequence[Item],
    margin: Margin,
    required: bool,
    confidence: float,
) -> Judgement:
    """Judge a variant against the source on one suite; items pair by id, the tasks of a suite are pooled.

    Args:   source_items, variant_items: as Scores tells: {"id", "correct"}, or {"id", "nll": [per token]}.
            confidence: of each one-sided bound.
    Raises: GateError: not the same measurement, not the same items, or a margin that the suite has no measure for.
    """
    where = f"{variant.variant}: {variant.suite}"
    pairs = _paired(source, variant, source_items, variant_items, where)
    key = "nll" if margin.max_ratio is not None else "correct"
    if any(key not in item for pair in pairs for item in pair):
        kind = "max_ratio is for suites with a loss per token" if key == "nll" else "max_drop is for right or wrong"
        raise GateError(Fault(f"{kind}; this suite's items have no {key!r}", where, "correct gates.accuracy"))
    if margin.max_ratio is not None:
        return _judge_ratio(variant.suite, pairs, margin.max_ratio, required, confidence, where)
    limit = margin.max_drop if margin.max_drop is not None else 0.0
    return _judge_drop(source, pairs, limit, required, confidence)


def ratio_bounds(loss_W: Floats, tokens_W: Floats, confidence: float) -> tuple[float, float, float, float]:
    """Mean loss difference per token and its one-sided bounds, from windows whose tokens hang together.

    The mean is the ratio estimator sum(loss) / sum(tokens); its error is that of whole windows (Cochran, Sampling
    Techniques, 3rd ed., 6.19), with Student's t. Damage is skewed (a few windows take most of it), and a plain t bound
    is then too near on that side: Hall's transformation (J. R. Stat. Soc. B 54, 1992) corrects it, and each bound is
    the outer of the two.

    Args:    loss_W: variant minus source, summed over the tokens of a window (nats). tokens_W: tokens of a window.
    Returns: mean, low, high (nats a token) and the standard deviation of one window.
    """
    windows = len(loss_W)
    mean = float(loss_W.sum() / tokens_W.sum())
    residual_W = (loss_W - mean * tokens_W) / tokens_W.mean()
    spread = float(np.sqrt((residual_W**2).sum() / (windows - 1)))
    if spread == 0:
        return mean, mean, mean, 0.0
    quantile = float(stats.t.ppf(confidence, windows - 1))
    skew = float((residual_W**3).mean() / (residual_W**2).mean() ** 1.5) / windows**0.5
    reach = [_unskewed(quantile, skew), _unskewed(-quantile, skew), quantile, -quantile]
    error = spread / windows**0.5
    return mean, mean - max(reach) * error, mean - min(reach) * error, spread


def _unskewed(quantile: float, skew: float) -> float:
    """The t where Hall's t + s (t**2 / 3 + 1 / 6) + s**2 t**3 / 27 is `quantile`; `skew` is s, skewness / sqrt(n)."""
    if abs(skew) < 1e-9:
        return quantile
    return 3 / skew * (float(np.cbrt(1 + skew * (quantile - skew / 6))) - 1)


def drop_bounds(lost: Any, gained: Any, items: Any, confidence: float) -> tuple[Floats, Floats]:
    """One-sided score bounds of a difference of paired proportions, p_source - p_variant; arrays broadcast.

    Tango's score test (Stat. Med. 17, 1998) inverted, with a continuity correction. The variance is the one under the
    tested difference, so no discordant pair does not mean no error: 0 of 20 has the upper bound 0.16.

    Args:    lost: items that only the source got right. gained: only the variant. items: all of them.
    Returns: low, high in -1..1.
    """
    lost, gained, items = np.broadcast_arrays(*(np.asarray(x, dtype=np.float64) for x in (lost, gained, items)))
    quantile = float(stats.norm.ppf(confidence))
    # The difference moves in steps of one, so half an item is due; few losses are skewed upwards, so a whole one below
    # (with half an item 5.9 % of the fails at 281 items and a drop of exactly 0.02 are false).
    return -_upper(gained, lost, items, quantile, 1.0), _upper(lost, gained, items, quantile, 0.5)


def _upper(lost: Floats, gained: Floats, items: Floats, quantile: float, correction: float) -> Floats:
    near, far = (lost - gained) / items, np.ones_like(items)
    # 50 halvings: 1e-15. `far` always is refused (or 1), so what is returned errs to the wide side.
    for _ in range(50):
        middle = (near + far) / 2
        refused = lost - gained + correction - items * middle < -quantile * _deviation(lost, gained, items, middle)
        near, far = np.where(refused, near, middle), np.where(refused, middle, far)
    return far


def _deviation(lost: Floats, gained: Floats, items: Floats, drop: Floats) -> Floats:
    """Standard deviation of lost - gained where the true drop is `drop`, the rest at its maximum likelihood."""
    linear = (2 * items - lost + gained) * drop - lost - gained
    root = np.sqrt(linear**2 + 8 * items * gained * drop * (1 - drop))
    share_gained = (root - linear) / (4 * items)
    return np.sqrt(np.maximum(0.0, items * (2 * share_gained + drop * (1 - drop))))


def _judge_ratio(
    suite: str, pairs: list[tuple[Item, Item]], limit: float, required: bool, confidence: float, where: str
) -> Judgement:
    if any(len(before["nll"]) != len(after["nll"]) or not before["nll"] for before, after in pairs):
        raise GateError(Fault("windows of unequal or no tokens", where, "evaluate source and variant again"))
    tokens_W = np.array([len(before["nll"]) for before, _ in pairs], dtype=np.float64)
    loss_W = np.array([math.fsum(after["nll"]) - math.fsum(before["nll"]) for before, after in pairs])
    if not np.isfinite(loss_W).all():
        raise GateError(Fault("a loss that is no finite number", where, "evaluate source and variant again"))
    n = len(pairs)
    if n < 2:
        value = _factor(loss_W[0] / tokens_W[0])
        low = high = value
        outcome: Outcome = "inconclusive"
        needed: int | None = 2
        why = f"perplexity ratio {value:.3f} of one window: no interval, at least two are needed"
    else:
        mean, below, above, spread = ratio_bounds(loss_W, tokens_W, confidence)
        value, low, high = _factor(mean), _factor(below), _factor(above)
        outcome = _outcome(low, high, limit)
        gap = abs(math.log(limit) - mean)
        decides: Callable[[int], bool] = lambda m: float(stats.t.ppf(confidence, m - 1)) * spread < gap * m**0.5  # noqa: E731 - one line of arithmetic
        needed = _needed(decides, n) if outcome == "inconclusive" else None
        why = f"perplexity ratio {value:.3f}, {_bound(outcome, low, high, '.3f')}, at most {limit:g} allowed"
    return Judgement(
        suite=suite,
        required=required,
        task="perplexity",
        measure="ratio",
        value=value,
        low=low,
        high=high,
        margin=limit,
        outcome=outcome,
        n=n,
        needed=needed,
        why=why + _missing(outcome, needed, "windows"),
    )


def _factor(nats: float) -> float:
    """exp, within what a float holds: a variant that lost its mind fails its gate, it does not stop the run."""
    return math.exp(min(nats, 700.0))


def _judge_drop(
    source: Scores, pairs: list[tuple[Item, Item]], limit: float, required: bool, confidence: float
) -> Judgement:
    n = len(pairs)
    right = sum(int(before["correct"]) for before, _ in pairs)
    lost = sum(int(before["correct"]) > int(after["correct"]) for before, after in pairs)
    gained = sum(int(before["correct"]) < int(after["correct"]) for before, after in pairs)
    low, high = (float(bound) for bound in drop_bounds(lost, gained, n, confidence))
    value = (lost - gained) / n
    outcome = _outcome(low, high, limit)

    def decides(m: int) -> bool:
        bounds = drop_bounds(lost * m / n, gained * m / n, m, confidence)
        return _outcome(float(bounds[0]), float(bounds[1]), limit) != "inconclusive"

    needed = _needed(decides, n) if outcome == "inconclusive" else None
    chance = _chance(source)
    at_chance = chance is not None and float(stats.binom.sf(right - 1, n, chance)) > 1 - confidence
    why = f"{value:+.3f} of {n} items lost ({lost} lost, {gained} gained), {_bound(outcome, low, high, '+.3f')}"
    why += f", at most {limit:g} allowed" + _missing(outcome, needed, "items")
    if at_chance:
        why += f"; the source itself is not above chance ({right} of {n} right, guessing gives {chance:.0%})"
    return Judgement(
        suite=source.suite,
        required=required,
        task=next(iter(source.tasks)) if len(source.tasks) == 1 else source.suite,
        measure="drop",
        value=value,
        low=low,
        high=high,
        margin=limit,
        outcome=outcome,
        n=n,
        needed=needed,
        source_at_chance=at_chance,
        why=why,
    )


def _paired(
    source: Scores, variant: Scores, source_items: Sequence[Item], variant_items: Sequence[Item], where: str
) -> list[tuple[Item, Item]]:
    """Items of equal id, in the source's order. Raises GateError where the two are not one measurement."""
    do = "evaluate source and variant again, with the same settings"
    if (source.suite, source.fingerprint) != (variant.suite, variant.fingerprint):
        names = sorted({*source.settings, *variant.settings})
        differ = [name for name in names if source.settings.get(name) != variant.settings.get(name)]
        raise GateError(Fault(f"not the same measurement: {', '.join(differ) or 'fingerprints'} differ", where, do))
    before = {item["id"]: item for item in source_items}
    after = {item["id"]: item for item in variant_items}
    if len(before) != len(source_items) or len(after) != len(variant_items):
        raise GateError(Fault("an item stands twice", where, do))
    if before.keys() != after.keys() or not before:
        alone = sorted(map(str, before.keys() ^ after.keys()))
        what = f"{len(alone)} items have no partner (such as {alone[0]})" if alone else "there are no items"
        raise GateError(Fault(what, where, do))
    return [(item, after[name]) for name, item in before.items()]


def _outcome(low: float, high: float, limit: float) -> Outcome:
    if high <= limit:
        return "pass"
    return "fail" if low > limit else "inconclusive"


def _needed(decides: Callable[[int], bool], n: int) -> int | None:
    """The smallest number of items, above n, at which the rates seen so far would decide."""
    above = max(2, 2 * n)
    while not decides(above):
        above *= 2
        if above > _MOST:
            return None
    below = n
    while above - below > 1:
        middle = (below + above) // 2
        below, above = (below, middle) if decides(middle) else (middle, above)
    return above


def _chance(source: Scores) -> float | None:
    """Of the pooled items; None where it is not known of every task."""
    tasks = source.tasks.values()
    shares = [task.chance * task.n for task in tasks if task.chance is not None]
    return sum(shares) / sum(task.n for task in tasks) if tasks and len(shares) == len(tasks) else None


def _bound(outcome: Outcome, low: float, high: float, form: str) -> str:
    shown = {"pass": f"upper bound {high:{form}}", "fail": f"lower bound {low:{form}}"}
    return shown.get(outcome, f"bounds {low:{form}} to {high:{form}}")


def _missing(outcome: Outcome, needed: int | None, unit: str) -> str:
    if outcome != "inconclusive":
        return ""
    return f"; about {needed} {unit} would decide" if needed else f"; no number of {unit} would decide"
