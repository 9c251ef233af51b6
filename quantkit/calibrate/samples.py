"""Calibration windows: documents in, a block of token ids out, every window exactly as long as the recipe says.

S windows, L tokens each. No padding, so no token has to be left out of the statistics.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from quantkit.errors import Fault, SolveError

_BATCH = 64
_CHOICE = 16
"""Tokenise up to this many times the wanted tokens, then choose: enough variety, and no hour on a huge set."""


def load_samples(
    documents: Sequence[str], tokenizer: Any, samples: int, length: int, seed: int
) -> tuple[Tensor, dict[str, Any]]:
    """Choose `samples` windows of `length` tokens.

    The documents are shuffled, tokenised, joined by a blank line and cut; windows are then drawn without repetition.
    Where the tokenizer puts a BOS before a text, each window begins with one and has no other. `length` is the
    recipe's alone; the tokenizer's model_max_length says nothing.

    Args:    tokenizer: of transformers (callable, with `bos_token_id`).
    Returns: tokens_SL, int64; and a report: documents used, `empty` ones dropped, `windows` to choose from, tokens
             `kept` and `dropped`, `bos`, and the sha256 `digest` of the ids as little-endian int64.
    Raises:  SolveError: fewer windows than wanted.
    """
    generator = random.Random(seed)  # noqa: S311 a reproducible draw, nothing secret
    texts = [text.strip() for text in documents if text.strip()]
    generator.shuffle(texts)
    bos = _bos(tokenizer)
    body = length - (bos is not None)
    stream: list[int] = []
    used = 0
    while used < len(texts) and len(stream) < _CHOICE * samples * body:
        batch = [text + "\n\n" for text in texts[used : used + _BATCH]]
        for ids in tokenizer(batch, add_special_tokens=False, verbose=False)["input_ids"]:
            stream += [token for token in ids if token != bos]
        used += len(batch)
    windows = len(stream) // body
    if windows < samples:
        what = f"the calibration text gives {windows} windows of {length} tokens, the recipe wants {samples}"
        do = f"set samples: {windows} or less, a smaller length, or use a larger set"
        raise SolveError(Fault(what, "calibration.samples", do if windows else "set a smaller length, or a larger set"))
    starts = [body * window for window in generator.sample(range(windows), samples)]
    rows = [([] if bos is None else [bos]) + stream[start : start + body] for start in starts]
    tokens_SL = torch.tensor(rows, dtype=torch.int64)
    report = {
        "documents": used,
        "empty": len(documents) - len(texts),
        "windows": windows,
        "kept": samples * body,
        "dropped": len(stream) - samples * body,
        "bos": bos is not None,
        "digest": hashlib.sha256(tokens_SL.numpy().astype("<i8").tobytes()).hexdigest(),
    }
    return tokens_SL, report


def _bos(tokenizer: Any) -> int | None:
    """The BOS that this tokenizer puts before a text; None: it puts none."""
    if tokenizer.bos_token_id is None:
        return None
    first = tokenizer("a", add_special_tokens=True)["input_ids"][:1]
    return int(tokenizer.bos_token_id) if first == [tokenizer.bos_token_id] else None
