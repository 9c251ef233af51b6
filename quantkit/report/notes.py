"""What a run says in sentences: its verdict, and what a reader must know before the numbers."""

from __future__ import annotations

import re

from quantkit.records import Scores, Stage
from quantkit.report.stored import Stored

STAGES = ("plan", "quantize", "evaluate", "bench", "gate", "publish")


def headline(stored: Stored) -> str:
    """The verdict in one line."""
    verdict = stored.verdict
    if verdict is None:
        failed = stage(stored, "failed")
        return f"not judged: stage {failed} failed" if failed else f"not judged yet: {_progress(stored)}"
    if verdict.chosen is None:
        return "no variant passed every gate"
    return f"{verdict.chosen} passed every gate and was chosen (objective: {verdict.objective})"


def outcome(stored: Stored) -> str:
    """'pass', 'fail' or 'open', for the colour of the headline."""
    if stored.verdict is None:
        return "fail" if stage(stored, "failed") else "open"
    return "pass" if stored.verdict.chosen else "fail"


def stage(stored: Stored, state: str) -> str | None:
    """The first stage in that state."""
    return next((name for name, found in stages(stored) if found.state == state), None)


def stages(stored: Stored) -> list[tuple[str, Stage]]:
    known = stored.run.stages if stored.run else {}
    return [(name, known[name]) for name in dict.fromkeys([*STAGES, *known]) if name in known]


def notes(stored: Stored) -> list[str]:
    """Limits of what the numbers can say, most general first."""
    return [
        *(f"unreadable: {what}" for what in stored.unreadable),
        *_origin(stored),
        *_scores(stored),
        *_judgements(stored),
        *_speeds(stored),
        *_fallbacks(stored),
    ]


def _progress(stored: Stored) -> str:
    done = [name for name, found in stages(stored) if found.state == "done"]
    return f"the run came as far as {done[-1]}" if done else "no stage is done"


def _origin(stored: Stored) -> list[str]:
    records = [record for record in (stored.run, stored.verdict) if record and record.quantized_origin]
    if not records:
        return []
    origin = str(records[0].quantized_origin)
    bits = re.search(r"I?Q(\d)", origin)
    once = f"came from {bits[1]} bit once already" if bits else "were quantized once already"
    return [f"the source is a dequantized {origin}: these weights {once}"]


def _scores(stored: Stored) -> list[str]:
    found = []
    for suite in stored.suites:
        scores = next(suites[suite] for suites in stored.scores.values() if suite in suites)
        if scores.limit is not None:
            found.append(f"{suite}: {_limit(scores)}")
        guards = dict.fromkeys(s[suite].guard for s in stored.scores.values() if suite in s and s[suite].guard)
        found += [f"{suite}: generated code ran under {guard}" for guard in guards]
    backends = dict.fromkeys(s.backend for suites in stored.scores.values() for s in suites.values())
    if backends:
        found.append(
            f"scores come from the {' and the '.join(backends)} backend; ± is one standard error of one score, while"
            " the gates compare source and variant item by item"
        )
    return found


def _limit(scores: Scores) -> str:
    asked = max((task.n for task in scores.tasks.values()), default=0)
    if asked == scores.limit:
        return f"the first {scores.limit} items only"
    return f"the first {scores.limit} items only, shared out among its tasks ({asked} were asked)"


def _judgements(stored: Stored) -> list[str]:
    variants = stored.verdict.variants if stored.verdict else {}
    every = [(name, one) for name, variant in variants.items() for one in variant.judgements]
    guessing = dict.fromkeys(one.suite for _, one in every if one.source_at_chance)
    found = [f"{suite}: the source itself is at chance, so a loss could not show" for suite in guessing]
    for name, one in every:
        if one.outcome == "inconclusive":
            decides = f"about {one.needed:,} items would decide" if one.needed else "no number of items would decide"
            found.append(f"{name}: {one.suite} is inconclusive with {one.n:,} items, which is no pass; {decides}")
    return found


def _speeds(stored: Stored) -> list[str]:
    targets = dict.fromkeys(timings.target for timings in stored.timings.values())
    found = [
        f"throughput was measured on target {target}: a CPU result is relative on this CPU, it says nothing of a GPU"
        for target in targets
        if target.startswith("cpu")
    ]
    if targets and len(stored.timings) < len(stored.variants):
        left = [name for name in stored.variants if name not in stored.timings]
        found.append(f"not served, so without throughput: {', '.join(left)}")
    return found


def _fallbacks(stored: Stored) -> list[str]:
    found = []
    for name in stored.variants:
        lines = [line for line in stored.ledger if line.variant == name]
        other = [line for line in lines if line.used != line.asked]
        if other:
            used = ", ".join(sorted({line.used for line in other}))
            found.append(f"{name}: {len(other)} of {len(lines)} modules were made with {used}, not {other[0].asked}")
    return found
