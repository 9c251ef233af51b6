"""The two plots of a run, as inline SVG that takes its text colour and font from the page around it."""

from __future__ import annotations

import io
import warnings
from typing import Any

import matplotlib
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from quantkit.report.escape import clean
from quantkit.report.stored import Stored

GREY = "#8a8f98"
COLOURS = {"pass": "#2e9e5b", "fail": "#d64545", "inconclusive": "#d99a1c"}


def quality_against_size(stored: Stored) -> str:
    """KL to the source (or, where there is none, perplexity) over the size of the weights; '' without any."""
    names = ["source", *stored.variants]
    task = "kl" if any(stored.task(name, "kl") for name in stored.variants) else "perplexity"
    points = [
        (name, stored.sizes[name] / 1e6, score)
        for name in names
        if name in stored.sizes and (score := stored.task(name, task)) is not None
    ]
    if len(points) < 2:
        return ""
    figure, axes = _figure(6.4, 3.4)
    for name, size, score in points:
        verdict = stored.verdict.variants.get(name) if stored.verdict else None
        colour = COLOURS[verdict.accuracy] if verdict else GREY
        axes.errorbar(size, score.value, yerr=score.stderr, fmt="o", color=colour, capsize=3, markersize=7)
        _label(axes, name, (size, score.value), (0, 9))
    axes.set_xlabel("size of the weights, MB")
    axes.set_ylabel("KL(source || variant), nats a token" if task == "kl" else "perplexity")
    axes.margins(x=0.15, y=0.2)
    axes.set_xlim(left=0)
    return _svg(figure, "quality")


def throughput_ratios(stored: Stored) -> str:
    """A row a variant and regime: the ratio with its interval, and the margin; '' without timings."""
    rows = [
        (f"{name} {short}", regime)
        for key, short in stored.regimes().items()
        for name in stored.variants
        if (regime := stored.regime(name, key)) is not None
    ]
    if not rows:
        return ""
    figure, axes = _figure(6.4, 1.1 + 0.42 * len(rows))
    for height, (_, regime) in enumerate(rows):
        colour = COLOURS[regime.verdict]
        axes.plot([regime.low, regime.high], [height, height], color=colour, linewidth=3, solid_capstyle="butt")
        axes.plot([regime.ratio], [height], "o", color=colour, markersize=7)
        margin = [regime.min_ratio, regime.min_ratio]
        axes.plot(margin, [height - 0.38, height + 0.38], color=GREY, linewidth=2, linestyle=(0, (2, 1)))
    axes.axvline(1, color=GREY, linewidth=0.7)
    axes.set_yticks(range(len(rows)), [clean(label) for label, _ in rows])
    for tick in axes.get_yticklabels():
        tick.set_parse_math(False)
    axes.invert_yaxis()
    axes.set_xlabel("output tokens a second, variant over source (dashed: the margin)")
    return _svg(figure, "throughput")


def _figure(width: float, height: float) -> tuple[Figure, Any]:
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasSVG(figure)
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    for spine in axes.spines.values():
        spine.set_color(GREY)
    axes.tick_params(color=GREY)
    axes.grid(color=GREY, alpha=0.25, linewidth=0.6)
    axes.set_axisbelow(True)
    return figure, axes


def _label(axes: Any, text: str, at: tuple[float, float], offset: tuple[int, int]) -> None:
    # Without mathematics: a name with '$' in it is a name.
    axes.annotate(clean(text), at, offset, textcoords="offset points", ha="center", parse_math=False)


def _svg(figure: Figure, salt: str) -> str:
    file = io.StringIO()
    without_metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    # Text stays text, so that the page's font and colours apply; the salt makes equal plots equal files.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": salt}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        figure.savefig(file, format="svg", transparent=True, metadata=without_metadata)
    text = file.getvalue()
    return text[text.index("<svg") :]
