"""One suite, one model: Scores and its items on disk. The items are written first, the score that names them last."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from quantkit.errors import QuantkitError
from quantkit.evaluate import harness, items, perplexity, sandbox
from quantkit.evaluate.fingerprint import BACKEND, fingerprint, settings_of
from quantkit.evaluate.suites import CodeSuite, PerplexitySuite, Suite
from quantkit.records import Scores, TaskScore, write_text


def evaluate(
    suite: Suite,
    model: Any,
    tokenizer: Any,
    *,
    variant: str,
    out: Path,
    artifact: str | None = None,
    reference: perplexity.Reference | None = None,
    limit: int | None = None,
    allow_unsandboxed: bool = False,
    held_out: list[str] | None = None,
) -> Scores:
    """Run `suite` on a transformers model (eval mode); write out/<suite>.json and out/<suite>.items.jsonl.

    Scores that are there already under the same fingerprint, of the same artifact, are read and not made again.

    Args:   variant: "source" for the baseline.
            artifact: a digest of the weights; None: the suite is always run.
            reference: what kl and top1 of the perplexity suite compare with; None leaves them out.
            limit: the first items only, where lower than the suite's own limit.
            held_out: documents kept from calibration, for a suite whose text is held-out.
    Raises: PlanError: prompts, windows or text do not fit. ToolError: no sandbox, or no hub. ArtifactError: BOS.
    """
    started = time.monotonic()
    limit = min((value for value in (limit, suite.limit) if value is not None), default=None)
    guard = sandbox.find_guard(allow_unsandboxed) if isinstance(suite, CodeSuite) else None
    if isinstance(suite, PerplexitySuite):
        text = perplexity.text_of(suite, held_out)
        data = perplexity.text_digest(text)
    else:
        data = f"hub:{suite.task}" if suite.hub else items.digest(items.read(suite.task))
    settings = settings_of(suite, model, tokenizer, limit=limit, data=data, guard=guard)
    identity = fingerprint(settings)
    if is_current(out, suite, identity, artifact):
        return Scores.read(out / f"{suite.name}.json")
    tasks: dict[str, TaskScore]
    if isinstance(suite, PerplexitySuite):
        ids_WT = perplexity.windows_of(suite, text, tokenizer, limit)
        found = list(perplexity.measure(model, ids_WT, reference))
        tasks = perplexity.scores_of(found)
    else:
        score, found = harness.run(suite, model, tokenizer, limit, guard)
        tasks = {suite.name: score}
    scores = Scores(
        suite=suite.name,
        variant=variant,
        artifact=artifact,
        backend=BACKEND,
        fingerprint=identity,
        settings=settings,
        tasks=tasks,
        items=f"{suite.name}.items.jsonl",
        limit=limit,
        guard=guard,
        seconds=time.monotonic() - started,
    )
    write_text(out / scores.items, "".join(json.dumps(_rounded(item)) + "\n" for item in found))
    scores.write(out / f"{suite.name}.json")
    return scores


def is_current(out: Path, suite: Suite, identity: str, artifact: str | None) -> bool:
    """Whether `out` holds finished scores of this suite, under this fingerprint and of this artifact."""
    try:
        scores = Scores.read(out / f"{suite.name}.json")
    except QuantkitError:
        return False
    same = (scores.fingerprint, scores.artifact) == (identity, artifact)
    return artifact is not None and same and (out / scores.items).is_file()


def read_items(out: Path, scores: Scores) -> list[dict[str, Any]]:
    """The items of a score, in the order in which they were asked."""
    return [json.loads(line) for line in (out / scores.items).read_text(encoding="utf-8").splitlines()]


def _rounded(item: dict[str, Any]) -> dict[str, Any]:
    """Per-token numbers to 7 significant digits: what float32 logits know, at a third of the size."""
    return {key: [_digits(x) for x in value] if isinstance(value, list) else value for key, value in item.items()}


def _digits(value: Any) -> Any:
    return float(f"{value:.7g}") if isinstance(value, float) else value
