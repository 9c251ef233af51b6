"""How well a model predicts text that no calibration saw, and how far it is from its source on the same tokens.

Per token: nll = -log p_variant(next), kl = KL(source || variant) over the whole vocabulary, top1 = both prefer the
same next token. Logits are compared window by window. Suffixes: W windows, T tokens, V vocabulary.
"""

from __future__ import annotations

import hashlib
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional
from tqdm import tqdm

from quantkit.errors import ArtifactError, Fault, PlanError
from quantkit.evaluate.fingerprint import leading_bos
from quantkit.evaluate.suites import PerplexitySuite
from quantkit.records import TaskScore

_POSITIONS = 128
"""Logits taken to float32 at once: 128 positions of a vocabulary of 150,000 are 77 MB."""

_KEPT = 4 << 30
"""Bytes of the source's logits that stay in memory between variants; windows beyond it are computed again."""

Item = dict[str, Any]


class Reference:
    """The full-precision model, whose logits on each window every variant is compared with."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self._kept: dict[bytes, torch.Tensor] = {}
        self._bytes = 0

    def logits(self, ids_T: torch.Tensor) -> torch.Tensor:
        """[T - 1, V] in the model's dtype and on its device."""
        window = ids_T.numpy().tobytes()
        if window in self._kept:
            return self._kept[window]
        found = _logits(self.model, ids_T)
        self._bytes += found.nbytes
        if self._bytes <= _KEPT:
            self._kept[window] = found.clone()
        return found


def _logits(model: Any, ids_T: torch.Tensor) -> torch.Tensor:
    logits_TV: torch.Tensor = model(ids_T[None].to(model.device)).logits[0, :-1]
    return logits_TV


def text_of(suite: PerplexitySuite, held_out: list[str] | None) -> str:
    """The documents, joined. Raises PlanError where there are none."""
    if suite.text != "held-out":
        return Path(suite.text).read_text(encoding="utf-8")
    if not held_out:
        do = "give held_out a share in the set's YAML in calibration/, or name a text file in the suite's `text`"
        raise PlanError(Fault("the calibration set keeps no documents from calibration", "calibration.set", do))
    return "\n\n".join(held_out)


def text_digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def windows_of(suite: PerplexitySuite, text: str, tokenizer: Any, limit: int | None) -> torch.Tensor:
    """[W, T] token ids: the suite's windows, evenly spread over the text; the first `limit` of them.

    A window begins with BOS where the tokenizer puts one before a text. Raises PlanError: the text is too short.
    """
    bos = leading_bos(tokenizer)
    body = suite.length - bos
    ids_T = torch.tensor(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"], dtype=torch.int64)
    available = len(ids_T) // body
    if available < suite.windows:
        what = f"{len(ids_T)} tokens of text make {available} windows of {suite.length}, not {suite.windows}"
        raise PlanError(Fault(what, f"evals/{suite.name}.yaml", "use fewer or shorter windows, or more text"))
    starts = [number * available // suite.windows * body for number in range(suite.windows)]
    ids_WT = torch.stack([ids_T[start : start + body] for start in starts])
    if bos:
        ids_WT = functional.pad(ids_WT, (1, 0), value=tokenizer.bos_token_id)
    return ids_WT[:limit]


@torch.inference_mode()
def measure(model: Any, ids_WT: torch.Tensor, reference: Reference | None = None) -> Iterator[Item]:
    """One item a window: {"id", "nll", "kl", "top1"}, a list of T - 1 values each.

    Args:  reference: of the source; None: no kl and top1. Where it holds this very model they are 0 and 1.
    Raises: PlanError: a window is longer than the model's positions. ArtifactError: logits that are not finite.
    """
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if positions and ids_WT.shape[1] > positions:
        what = f"windows of {ids_WT.shape[1]} tokens, the model has {positions} positions"
        raise PlanError(Fault(what, "evals/perplexity.yaml: length", f"use at most {positions}"))
    own = reference if reference is not None and reference.model is model else None
    for number, ids_T in enumerate(tqdm(ids_WT, desc="perplexity", unit="window", file=sys.stderr)):
        logits_TV = own.logits(ids_T) if own else _logits(model, ids_T)
        reference_TV = reference.logits(ids_T).to(model.device) if reference and not own else None
        columns: dict[str, list[float]] = {"nll": [], "kl": [], "top1": []}
        for start in range(0, len(ids_T) - 1, _POSITIONS):
            part = slice(start, start + _POSITIONS)
            log_TV = functional.log_softmax(logits_TV[part].float(), dim=-1)
            target_T = ids_T[1:][part].to(model.device)
            columns["nll"] += (-log_TV.gather(1, target_T[:, None])[:, 0]).double().tolist()
            if reference_TV is not None:
                source_TV = functional.log_softmax(reference_TV[part].float(), dim=-1)
                columns["top1"] += (source_TV.argmax(dim=-1) == log_TV.argmax(dim=-1)).long().tolist()
                columns["kl"] += torch.linalg.vecdot(source_TV.exp(), source_TV - log_TV).double().tolist()
        if not all(map(math.isfinite, columns["nll"])):
            what = f"window {number}: the logits are not finite numbers"
            raise ArtifactError(
                Fault(what, str(model.config.name_or_path), "quantize again, or leave this variant out")
            )
        if own:
            columns["kl"], columns["top1"] = [0.0] * (len(ids_T) - 1), [1] * (len(ids_T) - 1)
        yield {
            "id": f"window/{number}",
            "task": "perplexity",
            **{name: values for name, values in columns.items() if values},
        }


def scores_of(items: list[Item]) -> dict[str, TaskScore]:
    """perplexity = exp(mean nll), mean kl, mean top1; standard errors over windows (tokens are not independent)."""
    scores = {}
    for name, column in (("perplexity", "nll"), ("kl", "kl"), ("top1_agreement", "top1")):
        if column not in items[0]:
            continue
        mean_W = torch.tensor([sum(item[column]) / len(item[column]) for item in items], dtype=torch.float64)
        value = mean_W.mean()
        stderr = mean_W.std() / len(items) ** 0.5 if len(items) > 1 else torch.tensor(0.0)
        if column == "nll":
            value = value.exp()
            stderr = value * stderr
        scores[name] = TaskScore(metric=name, value=float(value), stderr=float(stderr), n=len(items))
    return scores
