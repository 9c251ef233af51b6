"""What the task files beside this one call through lm-eval's `!function`."""

from __future__ import annotations

from typing import Any

from datasets import Dataset

from quantkit.evaluate import items


def questions(**_metadata: Any) -> dict[str, Dataset]:
    return {"test": Dataset.from_list(list(items.questions()))}


def problems(**_metadata: Any) -> dict[str, Dataset]:
    return {"test": Dataset.from_list(list(items.problems()))}


def passed(_doc: dict[str, Any], results: list[bool]) -> dict[str, float]:
    """pass@1 of one problem from the verdict that the sandbox filter left in place of the answer."""
    return {"pass@1": float(results[0])}
