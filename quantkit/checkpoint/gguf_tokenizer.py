"""The tokenizer and chat template that a GGUF carries, rebuilt as the files that transformers and vLLM load.

Source: llama.cpp's pre-tokenizers (llama-vocab.cpp) and the tokenizers of the models that they stand for.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from quantkit.errors import Fault, PlanError
from quantkit.records import write_json, write_text

_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CONTROL, _USER_DEFINED = 3, 4
PRE_TOKENIZERS = ("gpt-2", "llama-bpe", "qwen2", "smollm")
"""Values of tokenizer.ggml.pre that are known. 'default' is not: it says that the converter did not know."""


def refusals(meta: dict[str, Any]) -> list[tuple[str, str]]:
    """(what, do) for each reason why this tokenizer cannot be rebuilt."""
    other = "use the original checkpoint, which has its tokenizer files, as a folder or hub id"
    kind = meta.get("tokenizer.ggml.model")
    lists = ("tokens", "token_type", "merges" if kind == "gpt2" else "scores")
    missing = [f"tokenizer.ggml.{key}" for key in lists if not meta.get(f"tokenizer.ggml.{key}")]
    if kind not in ("gpt2", "llama"):
        return [(f"tokenizer model {kind!r}; known are gpt2 and llama", other)]
    if missing:
        return [(f"the header lacks {', '.join(missing)}", other)]
    pre = meta.get("tokenizer.ggml.pre")
    if kind == "gpt2" and pre not in PRE_TOKENIZERS:
        return [(f"pre-tokenizer {pre!r}; known are {', '.join(PRE_TOKENIZERS)}", other)]
    count = len(meta["tokenizer.ggml.tokens"])
    if any(len(meta[f"tokenizer.ggml.{key}"]) != count for key in ("token_type", "scores")[: 1 + (kind == "llama")]):
        return [(f"the tokenizer's lists differ in length from its {count} tokens", other)]
    ids = {key: meta[key] for key in meta if key.startswith("tokenizer.ggml.") and key.endswith("_token_id")}
    outside = [f"{key} = {number}" for key, number in ids.items() if not 0 <= number < count]
    return [(f"no token has the number of {', '.join(outside)}", other)] if outside else []


def write_tokenizer(folder: Path, meta: dict[str, Any], max_length: int) -> None:
    """tokenizer.json, tokenizer_config.json and, where the file has one, chat_template.jinja.

    Raises PlanError: see `refusals`.
    """
    wrong = refusals(meta)
    if wrong:
        raise PlanError(*(Fault(what, "tokenizer of the GGUF", do) for what, do in wrong))
    tokens = meta["tokenizer.ggml.tokens"]
    tokenizer = _byte_level(meta) if meta["tokenizer.ggml.model"] == "gpt2" else _sentencepiece(meta)
    for token, kind in zip(tokens, meta["tokenizer.ggml.token_type"], strict=True):
        if kind == _CONTROL:
            tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False)])
        elif kind == _USER_DEFINED:
            tokenizer.add_tokens([AddedToken(token, special=False, normalized=False)])
    add_bos, add_eos = _adds(meta)
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": add_bos,
        "add_eos_token": add_eos,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
    }
    for key, ours in (("bos", "bos"), ("eos", "eos"), ("unknown", "unk"), ("padding", "pad")):
        number = meta.get(f"tokenizer.ggml.{key}_token_id")
        if number is not None:
            config[f"{ours}_token"] = tokens[number]
    tokenizer.post_processor = _frame(tokenizer.post_processor, config, meta)
    template = meta.get("tokenizer.chat_template")
    if template:
        config["chat_template"] = template
        write_text(folder / "chat_template.jinja", template)
    write_text(folder / "tokenizer.json", tokenizer.to_str(pretty=True) + "\n")
    write_json(folder / "tokenizer_config.json", config)


def _byte_level(meta: dict[str, Any]) -> Tokenizer:
    pre = meta["tokenizer.ggml.pre"]
    vocab = {token: number for number, token in enumerate(meta["tokenizer.ggml.tokens"])}
    # No merge has a space in its parts (byte level writes it as Ġ), so one space divides it.
    merges = [tuple(merge.split(" ")) for merge in meta["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre == "llama-bpe"))
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre in ("gpt-2", "smollm"))
    if pre == "gpt-2":
        tokenizer.pre_tokenizer = whole
    elif pre == "smollm":
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), whole])
    else:
        pattern = Regex(_WORDS % ("{1,3}" if pre == "llama-bpe" else ""))
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(pattern, "isolated"), whole])
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    return tokenizer


def _sentencepiece(meta: dict[str, Any]) -> Tokenizer:
    """SentencePiece BPE: a merge's rank is the score of the piece that it makes."""
    pieces = meta["tokenizer.ggml.tokens"]
    vocab = {piece: number for number, piece in enumerate(pieces)}
    ranked = []
    for piece, score in zip(pieces, meta["tokenizer.ggml.scores"], strict=True):
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in vocab and right in vocab:
                ranked.append((-score, vocab[left], vocab[right], left, right))
    merges = [(left, right) for *_, left, right in sorted(ranked)]
    unknown = pieces[meta.get("tokenizer.ggml.unknown_token_id", 0)]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    prefix = meta.get("tokenizer.ggml.add_space_prefix", True)
    steps: list[normalizers.Normalizer] = [normalizers.Prepend("▁")] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    restore: list[decoders.Decoder] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*restore, decoders.Strip(" ", 1, 0)] if prefix else restore)
    return tokenizer


def _adds(meta: dict[str, Any]) -> tuple[bool, bool]:
    """Whether texts get a BOS and an EOS: the header's word, or llama.cpp's default for the kind."""
    usual = meta["tokenizer.ggml.model"] == "llama" or meta.get("tokenizer.ggml.pre") == "llama-bpe"
    return (
        bool(meta.get("tokenizer.ggml.add_bos_token", usual)) and "tokenizer.ggml.bos_token_id" in meta,
        bool(meta.get("tokenizer.ggml.add_eos_token", False)) and "tokenizer.ggml.eos_token_id" in meta,
    )


def _frame(before: Any, config: dict[str, Any], meta: dict[str, Any]) -> Any:
    """The post-processor that puts BOS and EOS around a text, after the one that is there."""
    special, left, right = [], "", ""
    if config["add_bos_token"]:
        special.append((config["bos_token"], meta["tokenizer.ggml.bos_token_id"]))
        left = f"{config['bos_token']}:0 "
    if config["add_eos_token"]:
        special.append((config["eos_token"], meta["tokenizer.ggml.eos_token_id"]))
        right = f" {config['eos_token']}:0"
    if not special:
        return before
    frame = processors.TemplateProcessing(
        single=f"{left}$A:0{right}",
        pair=f"{left}$A:0{right} {left}$B:0{right}",
        special_tokens=sorted(set(special)),
    )
    return processors.Sequence([before, frame]) if before is not None else frame
