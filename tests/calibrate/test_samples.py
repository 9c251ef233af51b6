"""Windows are as long as asked, made of the documents' tokens and nothing else, and the same for the same seed."""

from __future__ import annotations

import hashlib
import struct
from pathlib import Path
from typing import Any

import pytest
import torch

from quantkit.calibrate.samples import load_samples
from quantkit.errors import SolveError
from quantkit.records import Index

DOCUMENTS = [chr(97 + number) * (20 + 7 * number) for number in range(20)]
BOS = 1


class Letters:
    """A tokenizer with one token a letter, and a length limit that nobody should ask for."""

    model_max_length = 10**30

    def __init__(self, bos: bool, bos_id: int = BOS) -> None:
        self.bos_token_id = bos_id
        self.bos = bos

    def __call__(self, text: Any, add_special_tokens: bool = True, **_: object) -> dict[str, Any]:
        if isinstance(text, list):
            return {"input_ids": [self(one, add_special_tokens)["input_ids"] for one in text]}
        start = [self.bos_token_id] if self.bos and add_special_tokens else []
        return {"input_ids": start + [10 + ord(letter) for letter in text]}


@pytest.mark.parametrize("length", [8, 33, 100])
@pytest.mark.parametrize("bos", [False, True])
def test_every_window_has_the_length_and_one_bos_or_none(length: int, bos: bool) -> None:
    tokens_SL, report = load_samples(DOCUMENTS, Letters(bos), 5, length, 0)
    assert tokens_SL.shape == (5, length) and tokens_SL.dtype == torch.int64
    assert (tokens_SL == BOS).sum(1).tolist() == [int(bos)] * 5
    assert (tokens_SL[:, 0] == BOS).all() == bos
    assert report["bos"] == bos


def test_a_bos_that_stands_in_the_text_is_not_a_second_one() -> None:
    letter_a = 10 + ord("a")
    tokens_SL, _ = load_samples(["ab" * 40], Letters(bos=True, bos_id=letter_a), 2, 10, 0)
    assert ((tokens_SL == letter_a).sum(1) == 1).all()


def test_kept_and_dropped_add_up_to_all_tokens() -> None:
    _, report = load_samples([*DOCUMENTS, "", "  "], Letters(False), 7, 50, 3)
    total = sum(len(text) + 2 for text in DOCUMENTS)
    assert report["kept"] == 7 * 50
    assert report["kept"] + report["dropped"] == total
    assert report["windows"] == total // 50
    assert report["empty"] == 2


def test_the_digest_is_that_of_the_ids() -> None:
    tokens_SL, report = load_samples(DOCUMENTS, Letters(False), 4, 16, 0)
    flat = [token for row in tokens_SL.tolist() for token in row]
    assert report["digest"] == hashlib.sha256(struct.pack(f"<{len(flat)}q", *flat)).hexdigest()


def test_the_seed_decides_and_nothing_else() -> None:
    first, again, other = (load_samples(DOCUMENTS, Letters(False), 8, 24, seed)[0] for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_all_windows_together_are_the_stream_cut_once() -> None:
    count = sum(len(text) + 2 for text in DOCUMENTS) // 30
    tokens_SL, _ = load_samples(DOCUMENTS, Letters(False), count, 30, 0)
    letters = sorted(token for row in tokens_SL.tolist() for token in row)
    everything = sorted(10 + ord(letter) for text in DOCUMENTS for letter in text + "\n\n")
    assert len(everything) - len(letters) < 30
    assert all(letters.count(token) <= everything.count(token) for token in set(letters))


@pytest.mark.parametrize(("documents", "windows"), [([], 0), ([""], 0), (["abc"], 0), (["a" * 100], 3)])
def test_too_little_text_is_refused_with_the_number_there_is(documents: list[str], windows: int) -> None:
    with pytest.raises(SolveError, match=f"gives {windows} windows of 32 tokens, the recipe wants 4"):
        load_samples(documents, Letters(False), 4, 32, 0)


def test_a_real_tokenizer_without_bos_gets_none(smollm2: Index) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2.root)
    tokens_SL, report = load_samples(["The quick brown fox. " * 60] * 3, tokenizer, 4, 64, 0)
    assert not report["bos"]
    assert "quick brown fox. The" in tokenizer.decode(tokens_SL[0])


def test_a_real_tokenizer_with_bos_gets_one_per_window(stories260k: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(stories260k)
    tokens_SL, report = load_samples(["Once upon a time. " * 60] * 3, tokenizer, 4, 64, 0)
    starts = tokenizer("a")["input_ids"][0] == tokenizer.bos_token_id
    assert report["bos"] == starts
    assert ((tokens_SL == tokenizer.bos_token_id).sum(1) == int(starts)).all()
