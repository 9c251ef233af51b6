"""Two scores may be compared only when everything but the weights was the same: the settings, and their digest."""

from __future__ import annotations

import hashlib
import json
from importlib.metadata import version
from typing import Any

from quantkit.errors import ArtifactError, Fault
from quantkit.evaluate.suites import ChoiceSuite, CodeSuite, PerplexitySuite

BACKEND = "transformers"


def settings_of(
    suite: ChoiceSuite | CodeSuite | PerplexitySuite,
    model: Any,
    tokenizer: Any,
    *,
    limit: int | None,
    data: str,
    guard: str | None = None,
) -> dict[str, Any]:
    """Everything that can move a score besides the weights.

    Args:  limit: the one in force (a recipe's may be lower than the suite's).
           data: digest of the items or the text; for the hub, its name.
           guard: isolation of generated code.
    """
    return {
        "suite": suite.model_dump(mode="json", exclude={"about", "licence"}),
        "limit": limit,
        "data": data,
        "guard": guard,
        "backend": BACKEND,
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": model.device.type,
        "bos": leading_bos(tokenizer),
        "tokenizer": tokenizer_digest(tokenizer),
        "versions": {name: version(name) for name in ("lm_eval", "transformers", "torch")},
    }


def fingerprint(settings: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()


def leading_bos(tokenizer: Any) -> int:
    """How many beginning-of-sequence tokens the tokenizer itself puts before a text: 1, or 0 where it adds none.

    Raises ArtifactError: it adds two.
    """
    if tokenizer.bos_token_id is None:
        return 0
    ids = tokenizer("a")["input_ids"]
    number = next((at for at, token in enumerate(ids) if token != tokenizer.bos_token_id), len(ids))
    if number > 1:
        where = str(getattr(tokenizer, "name_or_path", "tokenizer"))
        do = "remove the BOS from its post-processor or set add_bos_token to false in tokenizer_config.json"
        raise ArtifactError(Fault(f"the tokenizer puts {number} BOS tokens before a text", where, do))
    return int(number)


def tokenizer_digest(tokenizer: Any) -> str:
    """sha256 over what turns text into ids; padding and truncation are left out, they change in use."""
    fast = getattr(tokenizer, "backend_tokenizer", None)
    rules: Any = json.loads(fast.to_str()) if fast is not None else sorted(tokenizer.get_vocab().items())
    if fast is not None:
        rules = {key: value for key, value in rules.items() if key not in ("padding", "truncation")}
    special = {k: str(token) for k, token in sorted(tokenizer.special_tokens_map.items()) if k != "pad_token"}
    return hashlib.sha256(
        json.dumps([type(tokenizer).__name__ if fast is None else "", special, rules]).encode()
    ).hexdigest()
